"""Points of a space without a sampler: random ones, and those beside a point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import optuna

from tuner.search.distributions import decode, distribution
from tuner.space import Space
from tuner.types import Choice, FloatRange, IntRange, JsonValue, Knob

_RATIOS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
_SHARES = (-0.2, -0.05, -0.01, 0.01, 0.05, 0.2)
"""Steps from a value: by ratio where a range is searched by ratio, else by share of the range."""


def random_points(
    space: Space, count: int, random: np.random.Generator
) -> list[dict[str, JsonValue]]:
    """Up to `count` different points that satisfy the constraints; four times as many are drawn
    at most."""
    sampler = optuna.samplers.RandomSampler(seed=int(random.integers(2**32)))
    study = optuna.create_study(sampler=sampler)
    knobs = tuple(space.knobs.values())
    distributions = {knob.name: distribution(knob) for knob in knobs}
    found: dict[str, dict[str, JsonValue]] = {}
    for _ in range(4 * count):
        params = space.normalise(decode(knobs, study.ask(distributions).params))
        if space.violated(params) is None:
            found[space.decode(params).digest] = params
        if len(found) == count:
            break
    return list(found.values())


def neighbours(space: Space, params: Mapping[str, JsonValue]) -> Iterator[dict[str, JsonValue]]:
    """Points that differ from `params` in one parameter, near and far."""
    for name, knob in space.knobs.items():
        for value in _values_beside(knob, params[name]):
            if value != params[name] and space.contains(name, value):
                yield {**params, name: value}


def _values_beside(knob: Knob, value: JsonValue) -> Iterator[JsonValue]:
    if isinstance(knob, Choice):
        yield from knob.choices
        return
    assert isinstance(value, int | float)
    width = knob.high - knob.low
    steps = (
        [value * r for r in _RATIOS] if knob.log else [value + share * width for share in _SHARES]
    )
    for moved in (knob.low, knob.high, *steps):
        inside = min(max(moved, knob.low), knob.high)
        yield _on_grid(knob, inside)
    if isinstance(knob, IntRange):
        yield from (value - knob.step, value + knob.step)


def _on_grid(knob: IntRange | FloatRange, value: float) -> int | float:
    if knob.step is None:
        return float(value)
    snapped = knob.low + round((value - knob.low) / knob.step) * knob.step
    return int(snapped) if isinstance(knob, IntRange) else round(snapped, 10)
