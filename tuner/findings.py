"""What `tuner check` finds out, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.types import JsonValue, StudySpec

ASSUMED_START_S = 60.0
ASSUMED_TPOT_S = 0.03
"""For the estimate before anything was measured, and said with it: a small model on one GPU
starts in about a minute and gives each request some thirty tokens a second."""

ASSUMED_PROBES = 7
"""Loads of one trial of `max_rate`: six to eight as a rule, twelve at most
(`tuner.measuring.rates`)."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a space file means.

    Attributes:
        defaults: vLLM's own value of each searched flag, where it could be asked.
        command, env: of the first launch, secrets masked; its port is chosen at the launch.
        unchecked: why vLLM could not be asked; empty if it was.
        points: of the search space, constraints not applied; None if a range is continuous.
        trial_s: expected length of one trial.
        trial_s_is_measured: whether that comes from the study's finished trials.
        remarks: what is allowed but may not be meant.
    """

    spec: StudySpec
    defaults: Mapping[str, JsonValue]
    command: Sequence[str]
    env: Mapping[str, str]
    unchecked: str
    points: int | None
    trial_s: float
    trial_s_is_measured: bool
    remarks: Sequence[str]

    @property
    def total_s(self) -> float:
        """Expected length of the whole study."""
        budget = self.spec.budget
        limits = [budget.time_s] if budget.time_s is not None else []
        if budget.trials is not None:
            trials = budget.trials if self.points is None else min(budget.trials, self.points + 1)
            limits.append(trials * self.trial_s)
        return min(limits)
