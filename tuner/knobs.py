"""One searched parameter: how many values it has, which, and whether a value is one of them."""

from __future__ import annotations

import json
import math

from tuner.types import Choice, FloatRange, IntRange, JsonValue, Knob

GRID_DIGITS = 10
"""Decimals of a value on a grid of floats, so that 0.7 + 3·0.01 is 0.73."""

MIN_STEP = 1e-9
"""Smallest step of a grid of floats; finer ones would drown in the rounding."""

_TOLERANCE = 1e-6
"""Of a step: how far from a grid point a float may be and still mean it."""


def count(knob: Knob) -> int | None:
    """How many values it has; None for a continuous range."""
    match knob:
        case Choice():
            return len(knob.choices)
        case IntRange():
            return (knob.high - knob.low) // knob.step + 1
        case FloatRange(step=None):
            return None
        case FloatRange(step=step):
            assert step is not None
            return math.floor((knob.high - knob.low) / step + _TOLERANCE) + 1


def value_at(knob: Knob, index: int) -> JsonValue:
    """Its value number `index`, from 0 on, in rising order or the order of the choices.

    Raises:
        IndexError: there is no such value, or the range is continuous.
    """
    total = count(knob)
    if total is None or not 0 <= index < total:
        raise IndexError(index)
    match knob:
        case Choice():
            return knob.choices[index]
        case IntRange():
            return knob.low + index * knob.step
        case FloatRange():
            return round(knob.low + index * (knob.step or 0.0), GRID_DIGITS)


def contains(knob: Knob, value: JsonValue) -> bool:
    """Whether `value` is one of its values; a whole float is no value of a whole range."""
    if isinstance(knob, Choice):
        return json_identity(value) in map(json_identity, knob.choices)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(knob, IntRange):
        in_range = isinstance(value, int) and knob.low <= value <= knob.high
        return in_range and (value - knob.low) % knob.step == 0
    if knob.step is None:
        return knob.low <= value <= knob.high
    return _grid_index(knob, value) is not None


def snap(knob: Knob, value: JsonValue) -> JsonValue:
    """`value` as it is written: exactly on its grid, an int for a whole range.

    A value that is not of `knob` is returned as it is.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(knob, IntRange):
        return int(value) if float(value).is_integer() else value
    if isinstance(knob, FloatRange) and (index := _grid_index(knob, value)) is not None:
        return value_at(knob, index)
    return value


def json_identity(value: JsonValue) -> str:
    """Equal for values that are the same in JSON: 1 and 1.0 are, 1 and true are not."""

    def plain(part: JsonValue) -> JsonValue:
        if isinstance(part, float) and part.is_integer():
            return int(part)
        if isinstance(part, list):
            return [plain(item) for item in part]
        if isinstance(part, dict):
            return {key: plain(item) for key, item in part.items()}
        return part

    return json.dumps(plain(value), sort_keys=True)


def _grid_index(knob: FloatRange, value: float) -> int | None:
    """Which grid point `value` means, None for none or a range without a grid."""
    total = count(knob)
    if knob.step is None or total is None or not math.isfinite(value):
        return None
    position = (value - knob.low) / knob.step
    index = round(position)
    return index if abs(position - index) <= _TOLERANCE and 0 <= index < total else None
