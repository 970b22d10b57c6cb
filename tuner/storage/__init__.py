"""The study's database, its lock, and what a killed run left in it.

Optuna's own tables hold everything: parameters as they ran, value, constraints, and user
attributes that a person can read in optuna-dashboard. One process writes at a time.
"""

from tuner.storage.location import StudyLocation, find
from tuner.storage.lock import StudyLock
from tuner.storage.store import LeftTrial, Queued, RunningTrial, StudyStore

__all__ = [
    "LeftTrial",
    "Queued",
    "RunningTrial",
    "StudyLocation",
    "StudyLock",
    "StudyStore",
    "find",
]
