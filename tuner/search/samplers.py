"""Optuna samplers by the name the space file uses."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence

import optuna
from optuna.samplers import BaseSampler, GPSampler, QMCSampler, RandomSampler, TPESampler

from tuner.errors import InputError
from tuner.types import Choice, Knob, SamplerKind

STARTUP_TRIALS = 8
"""Random points before a model is used. Optuna's default of 10 is a third of a usual budget
here; below twice the number of parameters (four to six) a model has little to go by."""

GP_UP_TO_TRIALS = 250
"""Optuna's AutoSampler leaves the Gaussian process here: its cost grows with the cube."""


def make_sampler(kind: SamplerKind, seed: int) -> BaseSampler:
    """A sampler by name; `auto` must have been resolved.

    Raises:
        InputError: `gp` without torch.
    """
    check_sampler(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return _SAMPLERS[kind](seed)


def check_sampler(kind: SamplerKind) -> None:
    """Refuse a sampler whose packages are missing.

    Raises:
        InputError: `gp` without torch.
    """
    if kind is SamplerKind.GP and not _has_torch():
        raise InputError(
            "search.sampler: gp needs torch, which is not installed",
            "pip install 'vllm-memory-tuner[gp]', or write `sampler: tpe`",
        )


def resolve(kind: SamplerKind, knobs: Sequence[Knob], trials: int | None) -> SamplerKind:
    """What `auto` means: the rule of Optuna's AutoSampler, as far as packages allow.

    A Gaussian process where every parameter is a number, torch is there and the budget is
    small enough for it; else TPE.
    """
    if kind is not SamplerKind.AUTO:
        return kind
    numeric = not any(isinstance(knob, Choice) for knob in knobs)
    small = trials is None or trials < GP_UP_TO_TRIALS
    return SamplerKind.GP if numeric and small and _has_torch() else SamplerKind.TPE


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


_SAMPLERS: dict[SamplerKind, Callable[[int], BaseSampler]] = {
    SamplerKind.TPE: lambda seed: TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS),
    SamplerKind.GP: lambda seed: GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS),
    SamplerKind.RANDOM: lambda seed: RandomSampler(seed=seed),
    SamplerKind.QMC: lambda seed: QMCSampler(seed=seed, scramble=True),
}
