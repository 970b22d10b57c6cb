"""Trials in the hands of a running study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import optuna

from tuner.records import Attempt
from tuner.types import JsonValue, Outcome


@dataclass(frozen=True, slots=True)
class Queued:
    """A trial that waits to be run: the reference, or one that was interrupted."""

    params: Mapping[str, JsonValue]
    is_reference: bool


@dataclass(frozen=True, slots=True)
class RunningTrial:
    """A trial between `start` and `finish`, `interrupt` or `abort`."""

    number: int
    optuna_trial: optuna.Trial


@dataclass(frozen=True, slots=True)
class LeftTrial:
    """A trial that was running when its tuner died.

    Attributes:
        outcome: if it was known already; then only the end of its record is missing.
        attempts: the failed starts before.
    """

    trial: RunningTrial
    outcome: Outcome | None
    duration_s: float
    attempts: tuple[Attempt, ...] = ()
