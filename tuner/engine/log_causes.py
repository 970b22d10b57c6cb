"""What a line of the log tells of a failure, by the table in `tuner.engine.log_patterns`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tuner.engine.log_interest import TELLING
from tuner.engine.log_patterns import HARMLESS, PATTERNS, Pattern, Weight
from tuner.types import FailureCause, Stage


@dataclass(frozen=True, slots=True)
class Found:
    """What a line tells.

    Attributes:
        numbers: see `tuner.types.Failure`.
        decisive: whether a starting server cannot recover from it any more.
        engine_dead: whether a server that was ready cannot serve any more.
        also_serving: whether it means the same once the server is ready.
        refines: whether it says more of an out-of-memory failure just before it.
    """

    cause: FailureCause
    weight: Weight
    numbers: Mapping[str, float] = field(default_factory=dict)
    decisive: bool = False
    engine_dead: bool = False
    also_serving: bool = False
    refines: bool = False


def classify(
    text: str,
    stage: Stage = Stage.LAUNCH,
    frames: Collection[str] = (),
    *,
    warning: bool = False,
) -> Found | None:
    """What a message tells of a failure; None if nothing.

    Args:
        text: without prefixes (`tuner.engine.log_lines.clean`).
        frames: functions (and files) of the traceback before it.
        warning: vLLM itself calls it a warning, or less.
    """
    if TELLING.search(text) is None or HARMLESS.search(text):
        return None
    for pattern in _WARNINGS if warning else PATTERNS:
        match = pattern.regex.search(text)
        if match is None:
            continue
        cause: FailureCause | None = pattern.cause
        if pattern.decide is not None:
            cause = pattern.decide(pattern.cause, match, stage, frames)
        if cause is None:
            return None
        return Found(
            cause=cause,
            weight=pattern.weight,
            numbers=_numbers(pattern, match, text),
            decisive=pattern.decisive,
            engine_dead=pattern.engine_dead,
            also_serving=pattern.also_serving,
            refines=pattern.refines,
        )
    return None


_WARNINGS = tuple(pattern for pattern in PATTERNS if pattern.any_level)

_UNIT_GIB = {
    "bytes": 2**-30,
    "KiB": 2**-20,
    "MiB": 2**-10,
    "GiB": 1.0,
    "TiB": 1024.0,
    # torch before 2.1 wrote GB and MB for the same binary units.
    "KB": 2**-20,
    "MB": 2**-10,
    "GB": 1.0,
    "TB": 1024.0,
}


_CERTAINLY_BYTES = 1e6
"""No device has as many GiB; releases to 0.8 print some sizes in bytes, without a unit."""


def _numbers(pattern: Pattern, match: re.Match[str], text: str) -> dict[str, float]:
    """The named groups of a match and of the pattern's details, as numbers."""
    numbers = _groups(match)
    for detail in pattern.details:
        if more := detail.search(text):
            numbers |= _groups(more)
    for name, other in pattern.aliases.items():
        if name not in numbers and other in numbers:
            numbers[name] = numbers[other]
    return numbers


def _groups(match: re.Match[str]) -> dict[str, float]:
    """The named groups as numbers; `x_gib` is scaled by the unit in `x_unit` where there is one."""
    groups = {name: text for name, text in match.groupdict().items() if text is not None}
    if "batched_tokens" in groups:  # one name, two alternatives
        groups["max_num_batched_tokens"] = groups.pop("batched_tokens")
    numbers: dict[str, float] = {}
    for name, text in groups.items():
        if name.endswith("_unit") or (number := _number(text)) is None:
            continue
        if name.endswith("_gib"):
            unit = groups.get(name.removesuffix("_gib") + "_unit")
            bare = "bytes" if abs(number) > _CERTAINLY_BYTES else "GiB"
            number *= _UNIT_GIB[unit or bare]
        numbers[name] = number
    return numbers


def _number(text: str) -> float | None:
    try:
        number = float(text.rstrip("."))
    except ValueError:  # such as "1.2.3", from a line that was cut and joined
        return None
    return number if math.isfinite(number) else None
