"""What a study remembers of its trials, as plain data: what the reports and exports read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tuner.types import (
    EngineConfig,
    Failure,
    FailureCause,
    JsonValue,
    Measurement,
    Outcome,
    Stage,
    StudySpec,
)


class TrialState(StrEnum):
    """How a trial ended, in the words of a report."""

    WAITING = "waiting"
    RUNNING = "running"
    MEASURED = "measured"
    INFEASIBLE = "infeasible"
    """It ran and failed, or served nothing: it may not win."""
    INTERRUPTED = "interrupted"
    """Stopped by the user or with the tuner; it is run again."""
    ABORTED = "aborted"
    """Stopped by a failure of the environment; it says nothing of the configuration."""

    DROPPED = "dropped"
    """Queued, but the space file changed before it was run."""

    @property
    def finished(self) -> bool:
        """Whether it counts towards the budget."""
        return self in (TrialState.MEASURED, TrialState.INFEASIBLE)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start that failed and was followed by another one of the same configuration.

    Attributes:
        line: the decisive line.
        then: what was done, such as "started again after 5 s".
        trial: in whose folder the log is; not the trial's own where that was interrupted.
    """

    cause: FailureCause
    stage: Stage
    line: str
    then: str
    trial: int


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One trial as the study database holds it.

    Attributes:
        params: the searched parameters; for the reference those that it sets.
        effective: what vLLM makes of the configuration, where it was asked.
        score: None until finished; 0 for a failure.
        directory: where its logs are.
        attempts: the failed starts before the one that `outcome` tells of, in order.
    """

    number: int
    state: TrialState
    params: Mapping[str, JsonValue]
    config: EngineConfig | None
    is_reference: bool
    score: float | None
    constraints: Mapping[str, float]
    outcome: Outcome | None
    directory: Path | None
    effective: Mapping[str, JsonValue] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    duration_s: float | None = None
    attempts: tuple[Attempt, ...] = ()

    @property
    def measurement(self) -> Measurement | None:
        """The measurement, if there is one."""
        return self.outcome if isinstance(self.outcome, Measurement) else None

    @property
    def failure(self) -> Failure | None:
        """The failure, if it failed."""
        return self.outcome if isinstance(self.outcome, Failure) else None

    @property
    def simulated(self) -> bool:
        """Whether it ran on the stand-in: no figure of it is of a real device."""
        return self.outcome is not None and self.outcome.memory.simulated


class StudyState(StrEnum):
    """Where a study stands."""

    EMPTY = "empty"
    RUNNING = "running"
    STOPPED = "stopped"
    """Not finished and nobody works on it: `tuner run` goes on."""
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """A study as its database holds it.

    Attributes:
        spec: the space file it was made with (budget and sampler: last used).
        versions: of tuner, Python, Optuna, vLLM and the device, as measured with.
    """

    name: str
    spec: StudySpec
    state: StudyState
    trials: Sequence[TrialRecord]
    versions: Mapping[str, str]

    @property
    def reference(self) -> TrialRecord | None:
        """The finished trial of what runs today."""
        finished = (t for t in self.trials if t.is_reference and t.state.finished)
        return next(finished, None)

    @property
    def best(self) -> TrialRecord | None:
        """The incumbent: the highest score among the trials that may win."""
        measured = [t for t in self.trials if t.state is TrialState.MEASURED]
        return max(measured, key=lambda t: t.score or 0.0, default=None)

    @property
    def gain(self) -> float | None:
        """How much better the best scored than the reference, as a share (0.24 is 24 %)."""
        if self.best is None or self.reference is None:
            return None
        if not self.best.score or not self.reference.score:
            return None
        return self.best.score / self.reference.score - 1.0

    @property
    def simulated(self) -> bool:
        """Whether any trial ran on the stand-in."""
        return any(trial.simulated for trial in self.trials)

    @property
    def finished_trials(self) -> int:
        """How many trials count towards the budget."""
        return sum(t.state.finished for t in self.trials)

    @property
    def time_spent_s(self) -> float:
        """Seconds spent in finished trials."""
        return sum(t.duration_s or 0.0 for t in self.trials if t.state.finished)

    @property
    def typical_trial_s(self) -> float | None:
        """Median duration of the finished trials."""
        durations = [t.duration_s for t in self.trials if t.state.finished and t.duration_s]
        return statistics.median(durations) if durations else None
