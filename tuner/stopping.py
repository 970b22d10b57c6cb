"""When a study has run long enough: pure functions of what is known."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from tuner.records import StudyRecord, TrialRecord, TrialState
from tuner.types import BudgetSpec, FailureCause

FAILURES_AT_FIRST = 8
"""So many failures of other kinds than memory, before anything was measured, end a study.

At two to five minutes a start that is 15 to 40 minutes. A space of which only a third works
fails eight times in a row by chance in 4 of 100 studies; running it again is all it takes."""

MEMORY_FAILURES_AT_FIRST = 20
"""The same with memory failures counted, too: each tells the search by how much it missed,
and in a space that is mostly too large the way down takes a dozen trials."""

ALIKE_IN_A_ROW = 15
"""So many with one cause other than memory, one after another, end a study that measured
something before: the machine is not what it was (a driver that hangs, a disk that is gone)."""

OTHERS_IN_A_ROW = 20
"""The same with causes that take turns: so many failures of other kinds than memory with
neither a measurement nor a failure of memory between them."""

MEMORY_CAUSES = frozenset(
    {
        FailureCause.OOM_LOAD,
        FailureCause.OOM_PROFILE,
        FailureCause.OOM_KV_ALLOC,
        FailureCause.OOM_WARMUP,
        FailureCause.OOM_GRAPH_CAPTURE,
        FailureCause.OOM_RUNTIME,
        FailureCause.HOST_OOM,
        FailureCause.KV_NO_BLOCKS,
        FailureCause.KV_TOO_SMALL,
        FailureCause.STATE_BLOCKS,
    }
)
"""Failures that the search can learn its way out of."""


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


def broken(run: Sequence[TrialRecord], *, ever_measured: bool) -> Sequence[TrialRecord] | None:
    """The failures in a row that end a study, if it has come to that.

    Args:
        run: the finished trials of this run of the study, in order. Earlier runs do not count:
            who runs the same command again has seen why it stopped.
        ever_measured: whether any run measured anything.
    """
    row: list[TrialRecord] = []
    for trial in run:
        row = [] if trial.state is TrialState.MEASURED else [*row, trial]
    if not ever_measured:
        others = sum(not _teaches(trial) for trial in row)
        too_many = others >= FAILURES_AT_FIRST or len(row) >= MEMORY_FAILURES_AT_FIRST
        return row if too_many else None
    others_row: list[TrialRecord] = []
    for trial in row:
        others_row = [] if _teaches(trial) else [*others_row, trial]
    last = others_row[-ALIKE_IN_A_ROW:]
    alike = len({trial.failure.cause for trial in last if trial.failure}) == 1
    if len(last) == ALIKE_IN_A_ROW and alike:
        return last
    return others_row if len(others_row) >= OTHERS_IN_A_ROW else None


def _teaches(trial: TrialRecord) -> bool:
    """Whether the search learns from it where not to go: too little memory or context."""
    return trial.failure is None or trial.failure.cause in MEMORY_CAUSES


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
