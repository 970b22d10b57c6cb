"""When a study has run long enough: pure functions of what is known."""

from __future__ import annotations

from enum import StrEnum

from tuner.records import StudyRecord
from tuner.types import BudgetSpec


class Ending(StrEnum):
    """Why a run of a study ended by itself."""

    TRIALS = "the trials of the budget are used up"
    TIME = "the time of the budget is used up"
    EXHAUSTED = "nothing is left of the search space that was not measured"


def used_up(study: StudyRecord, budget: BudgetSpec) -> Ending | None:
    """Which part of the budget is used up, if one is.

    A trial that would, at the median duration so far, end past the time limit is not begun;
    the first one always is.
    """
    if budget.trials is not None and study.finished_trials >= budget.trials:
        return Ending.TRIALS
    if budget.time_s is None or study.typical_trial_s is None:
        return None
    return Ending.TIME if study.time_spent_s + study.typical_trial_s > budget.time_s else None


def remaining_s(study: StudyRecord, budget: BudgetSpec) -> float | None:
    """How long the study will still take, at the median duration so far; None if unknown."""
    typical_s = study.typical_trial_s
    if typical_s is None:
        return None
    limits = []
    if budget.trials is not None:
        limits.append((budget.trials - study.finished_trials) * typical_s)
    if budget.time_s is not None:
        limits.append(budget.time_s - study.time_spent_s)
    return max(0.0, min(limits)) if limits else None
