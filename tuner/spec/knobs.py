"""The entries of `search_space:` -> knobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from tuner.errors import InputError
from tuner.knobs import MIN_STEP, count, json_identity, value_at
from tuner.names import did_you_mean
from tuner.spec.document import Document, Node, kind_of
from tuner.spec.values import (
    named,
    positive_name,
    read_value,
    refuse_percent,
    refuse_twice,
)
from tuner.types import ENV_PREFIX, Choice, FloatRange, IntRange, JsonValue, Knob

_RANGE_KEYS = ("low", "high", "step", "log")
_KEYS = (*_RANGE_KEYS, "choices")
_EXAMPLE = "Write `{low: 16, high: 512}` (with `step` or `log: true`), or a list of values."
MAX_BOUND = 2**53
"""Whole numbers up to here are exact as floats, which is how the study's database keeps them."""


def read_knobs(
    document: Document, section: Node, fixed: Mapping[str, str]
) -> tuple[list[Knob], list[str]]:
    """The searched parameters in the file's order, and remarks that are no errors.

    Args:
        fixed: the sections that fix a name for all trials, by name.

    Raises:
        InputError: with file, line and what to write instead.
    """
    knobs: list[Knob] = []
    remarks: list[str] = []
    lines: dict[str, int] = {}
    for name, node in named(document, section):
        knob = _knob(document, name, node, remarks)
        refuse_twice(document, knob.name, node, lines)
        if knob.name in fixed:
            raise document.error(
                node,
                f"`{knob.name}` is searched here and fixed under `{fixed[knob.name]}`",
                "Delete one of the two.",
            )
        knobs.append(knob)
    return knobs, remarks


def _knob(document: Document, name: str, node: Node, remarks: list[str]) -> Knob:
    if isinstance(node.value, list):
        return _choice(document, name, node)
    if "choices" in node.items:
        _check_keys(document, name, node, ("choices",))
        return _choice(document, name, node.items["choices"])
    if node.items:
        _check_keys(document, name, node, _RANGE_KEYS)
        return _Range(document, name, node).knob(remarks)
    if node.value is None or isinstance(node.value, dict):
        raise document.error(node, f"`{name}` has no range", _EXAMPLE)
    raise document.error(
        node,
        f"`{name}` has one value ({kind_of(node.value)}), nothing to search",
        f"Fix it under `{_home(name)}`, or give a range. {_EXAMPLE}",
    )


def _home(name: str) -> str:
    """The section that fixes `name` for all trials."""
    return "server.env" if name.startswith(ENV_PREFIX) else "server.args"


def _check_keys(document: Document, name: str, node: Node, allowed: tuple[str, ...]) -> None:
    for key in node.items:
        if key in allowed:
            continue
        if key in _KEYS:
            message = f"`{name}` has both a range and choices"
            raise document.error(node.items[key], message, "Delete one of the two.")
        raise document.error(
            node.items[key],
            f"`{name}.{key}` is an unknown key",
            did_you_mean(key, _KEYS) or _EXAMPLE,
        )


# --- choices ---------------------------------------------------------------------------


def _choice(document: Document, name: str, node: Node) -> Choice:
    if not isinstance(node.value, list):
        raise document.error(
            node, f"`{name}.choices` must be a list, not {kind_of(node.value)}", _EXAMPLE
        )
    if not node.value:
        raise document.error(node, f"`{name}` has no choices", _EXAMPLE)
    choices: list[JsonValue] = []
    seen: set[str] = set()
    for item in node.value:
        value = read_value(document, name, item)
        identity = json_identity(value)
        if identity in seen:
            raise document.error(
                item, f"`{name}` has the choice {json.dumps(value)[:60]} twice", "Delete one."
            )
        seen.add(identity)
        refuse_percent(document, name, item, [value])
        choices.append(value)
    settled = positive_name(name, choices)
    if settled != name:
        choices = [None if value is None else not value for value in choices]
    return Choice(settled, tuple(choices))


# --- ranges ----------------------------------------------------------------------------


class _Range:
    """One `{low, high, step, log}` while it is checked."""

    def __init__(self, document: Document, name: str, node: Node) -> None:
        self._document = document
        self._name = name
        self._node = node

    def knob(self, remarks: list[str]) -> IntRange | FloatRange:
        low, high = self._number("low"), self._number("high")
        if low is None or high is None:
            missing = "low" if low is None else "high"
            raise self._error(missing, f"has no `{missing}`", _EXAMPLE)
        refuse_percent(self._document, self._name, self._node, [low, high])
        step, log = self._number("step"), self._log()
        self._check_bounds(low, high)
        self._check_step(low, high, step, log)
        if all(isinstance(number, int) for number in (low, high, step or 1)):
            whole = IntRange(self._name, int(low), int(high), int(step or 1), log)
            last = whole.high if log else int(self._last(whole, remarks))
            return replace(whole, high=last)
        real = FloatRange(
            self._name, float(low), float(high), None if step is None else float(step), log
        )
        return real if step is None else replace(real, high=float(self._last(real, remarks)))

    def _number(self, key: str) -> int | float | None:
        node = self._node.items.get(key)
        if node is None or node.value is None:
            return None
        value = read_value(self._document, self._name, node)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, f"must have a number as `{key}`, not {kind_of(value)}")
        if abs(value) > MAX_BOUND:
            raise self._error(key, f"has a `{key}` beyond {MAX_BOUND}", "Write a smaller number.")
        return value

    def _log(self) -> bool:
        node = self._node.items.get("log")
        if node is None or node.value is None:
            return False
        if not isinstance(node.value, bool):
            raise self._error("log", f"must have true or false as `log`, not {kind_of(node.value)}")
        return node.value

    def _check_bounds(self, low: float, high: float) -> None:
        if low > high:
            raise self._error(
                "low",
                f"has a low ({low}) above its high ({high})",
                f"Write `{{low: {high}, high: {low}}}`.",
            )
        if low == high:
            variable = self._name.removeprefix(ENV_PREFIX)
            raise self._error(
                "low",
                f"has the same low and high ({low}), nothing to search",
                f"Fix it under `{_home(self._name)}`: `{variable}: {low}`.",
            )

    def _check_step(self, low: float, high: float, step: float | None, log: bool) -> None:
        if log and low <= 0:
            raise self._error(
                "low",
                f"cannot be logarithmic from {low} on",
                "Write a low above 0, or leave `log` out.",
            )
        if step is None:
            return
        if log:
            raise self._error(
                "step", "has both step and log", "Delete one: a logarithmic range has no step."
            )
        if step <= 0:
            raise self._error("step", f"must have a step above 0, not {step}")
        if step < MIN_STEP:
            raise self._error("step", f"must have a step of at least {MIN_STEP:g}, not {step}")
        if step > (high - low) + MIN_STEP:
            raise self._error(
                "step",
                f"has a step ({step}) larger than its range ({round(high - low, 10)})",
                f"Write a step of at most {round(high - low, 10)}.",
            )

    def _last(self, knob: IntRange | FloatRange, remarks: list[str]) -> float:
        """The largest value on the grid, which Optuna wants as `high`."""
        values = count(knob)
        assert values is not None
        last = value_at(knob, values - 1)
        assert isinstance(last, int | float)
        if abs(last - knob.high) <= MIN_STEP:
            return knob.high
        remarks.append(
            f"line {self._node.items['high'].line}: `{self._name}` ends at {last}, because its "
            f"high ({knob.high}) is not its low plus a whole number of steps"
        )
        return last

    def _error(self, key: str, message: str, hint: str = "") -> InputError:
        node = self._node.items.get(key, self._node)
        return self._document.error(node, f"`{self._name}` {message}", hint)
