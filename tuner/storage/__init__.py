"""The study's database, its lock, and what a killed run left in it.

Optuna's own tables hold everything: parameters as they ran, value, constraints, and user
attributes that a person can read in optuna-dashboard. One process writes at a time.
"""

from tuner.storage.location import StudyLocation
from tuner.storage.lock import StudyLock
from tuner.storage.opening import find
from tuner.storage.store import StudyStore
from tuner.storage.trials import LeftTrial, Queued, RunningTrial

__all__ = [
    "LeftTrial",
    "Queued",
    "RunningTrial",
    "StudyLocation",
    "StudyLock",
    "StudyStore",
    "find",
]
