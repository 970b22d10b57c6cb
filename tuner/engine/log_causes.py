"""What a line of the log tells of a failure, by the table in `tuner.engine.log_patterns`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tuner.engine.log_patterns import HARMLESS, PATTERNS, Weight
from tuner.types import FailureCause, Stage


@dataclass(frozen=True, slots=True)
class Found:
    """What a line tells.

    Attributes:
        numbers: see `tuner.types.Failure`.
        decisive: whether a starting server cannot recover from it any more.
        engine_dead: whether a server that was ready cannot serve any more.
        also_serving: whether it means the same once the server is ready.
    """

    cause: FailureCause
    weight: Weight
    numbers: Mapping[str, float] = field(default_factory=dict)
    decisive: bool = False
    engine_dead: bool = False
    also_serving: bool = False


def classify(text: str, stage: Stage = Stage.LAUNCH, frames: Collection[str] = ()) -> Found | None:
    """What a message tells of a failure; None if nothing.

    Args:
        text: without prefixes (`tuner.engine.log_lines.clean`).
        frames: functions (and files) of the traceback before it.
    """
    if HARMLESS.search(text):
        return None
    for pattern in PATTERNS:
        if match := pattern.regex.search(text):
            decide = pattern.decide
            return Found(
                cause=decide(pattern.cause, match, stage, frames) if decide else pattern.cause,
                weight=pattern.weight,
                numbers=_numbers(match),
                decisive=pattern.decisive,
                engine_dead=pattern.engine_dead,
                also_serving=pattern.also_serving,
            )
    return None


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


def _numbers(match: re.Match[str]) -> dict[str, float]:
    """The named groups as numbers; `x_gib` is scaled by the unit in `x_unit` where there is one."""
    groups = {name: text for name, text in match.groupdict().items() if text is not None}
    if "batched_tokens" in groups:  # one name, two alternatives
        groups["max_num_batched_tokens"] = groups.pop("batched_tokens")
    numbers: dict[str, float] = {}
    for name, text in groups.items():
        if not name.endswith("_unit"):
            unit = groups.get(name.removesuffix("_gib") + "_unit", "GiB")
            scale = _UNIT_GIB[unit] if name.endswith("_gib") else 1.0
            numbers[name] = float(text.rstrip(".")) * scale
    return numbers
