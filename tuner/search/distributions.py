"""Knobs as Optuna sees them, such that what Optuna stores is what ran.

Numbers stay numbers and choices stay themselves; only a choice that is a list or a mapping,
which Optuna cannot hold, is stored as its JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from tuner.types import Choice, FloatRange, IntRange, JsonValue, Knob

OptunaValue: TypeAlias = "bool | int | float | str | None"

_FLOAT_DIGITS = 10
"""Enough for any grid a person writes, few enough that 0.7 + 3 x 0.01 is 0.73."""


def distribution(knob: Knob) -> BaseDistribution:
    """The distribution that a knob is drawn from."""
    match knob:
        case IntRange(low=low, high=high, step=step, log=log):
            top = low + (high - low) // step * step  # Optuna wants the bound on the grid
            return IntDistribution(low, top, log=log, step=step)
        case FloatRange(low=low, high=high, step=step, log=log):
            if step is None:
                return FloatDistribution(low, high, log=log)
            steps = int((high - low) / step + 1e-9)
            return FloatDistribution(low, round(low + steps * step, _FLOAT_DIGITS), step=step)
        case Choice(choices=choices):
            return CategoricalDistribution([encode_value(value) for value in choices])


def encode(params: Mapping[str, JsonValue]) -> dict[str, OptunaValue]:
    """Parameters as Optuna holds them."""
    return {name: encode_value(value) for name, value in params.items()}


def encode_value(value: JsonValue) -> OptunaValue:
    """One value as Optuna holds it."""
    if isinstance(value, list | dict):
        return json.dumps(value, sort_keys=True)
    return value


def decode(knobs: Sequence[Knob], stored: Mapping[str, OptunaValue]) -> dict[str, JsonValue]:
    """Parameters as JSON values, from what a trial suggested."""
    return {knob.name: _decode_value(knob, stored[knob.name]) for knob in knobs}


def _decode_value(knob: Knob, value: OptunaValue) -> JsonValue:
    if isinstance(knob, Choice):
        return next(c for c in knob.choices if _same(encode_value(c), value))
    return value


def _same(left: OptunaValue, right: OptunaValue) -> bool:
    """Equality that tells `true` from 1."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)
