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

from tuner.knobs import count, value_at
from tuner.types import Choice, FloatRange, IntRange, JsonValue, Knob

OptunaValue: TypeAlias = "bool | int | float | str | None"


def distribution(knob: Knob) -> BaseDistribution:
    """The distribution that a knob is drawn from."""
    match knob:
        case IntRange(low=low, step=step, log=log):
            top = value_at(knob, (count(knob) or 1) - 1)  # Optuna wants the bound on the grid
            assert isinstance(top, int)
            return IntDistribution(low, top, log=log, step=step)
        case FloatRange(low=low, high=high, step=None, log=log):
            return FloatDistribution(low, high, log=log)
        case FloatRange(low=low, step=step):
            top = value_at(knob, (count(knob) or 1) - 1)
            assert isinstance(top, int | float)
            return FloatDistribution(low, float(top), step=step)
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
