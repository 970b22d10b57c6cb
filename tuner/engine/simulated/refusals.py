"""What vLLM's argument parser and configuration check refuse, in their words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.engine.simulated.failures import StartFailure
from tuner.types import FailureCause, Stage

_PYDANTIC = "pydantic_core._pydantic_core.ValidationError"
_MORE = "    For further information visit https://errors.pydantic.dev/2.14/v/"


@dataclass(frozen=True, slots=True)
class OutOfBounds:
    """A value beyond what its field allows.

    Attributes:
        field: with underscores, as vLLM's configuration names it.
        demand: such as "greater than or equal to 1".
    """

    field: str
    demand: str
    value: float


def by_the_parser(line: str) -> StartFailure:
    """The argument parser refuses: exit code 2. `line` starts with `argument --...`."""
    return StartFailure(
        FailureCause.BAD_CONFIG, Stage.LAUNCH, exit_code=2, message=f"vllm serve: error: {line}"
    )


def by_bounds(config: str, found: Sequence[OutOfBounds]) -> StartFailure:
    """pydantic refuses values of one configuration class."""
    lines = [_headline(config, len(found))]
    for wrong in found:
        kind = _kind(wrong.demand)
        is_whole = math.isfinite(wrong.value) and wrong.value == int(wrong.value)
        shown = str(int(wrong.value)) if is_whole else f"{wrong.value:g}"
        type_name = "int" if isinstance(wrong.value, int) else "float"
        lines += [
            wrong.field,
            f"  Input should be {wrong.demand} "
            f"[type={kind}, input_value={shown}, input_type={type_name}]",
            _MORE + kind,
        ]
    return StartFailure(FailureCause.BAD_CONFIG, Stage.LAUNCH, message="\n".join(lines))


def by_value(
    config: str, complaint: str, numbers: Mapping[str, float] | None = None
) -> StartFailure:
    """A configuration class's own check refuses how values go together.

    Args:
        numbers: what the log reader finds in `complaint`.
    """
    lines = [
        _headline(config, 1),
        f"  Value error, {complaint} [type=value_error, "
        "input_value=ArgsKwargs((), {'runner_t..., 'stream_interval': 1}), input_type=ArgsKwargs]",
        _MORE + "value_error",
    ]
    return StartFailure(
        FailureCause.BAD_CONFIG, Stage.LAUNCH, numbers=numbers or {}, message="\n".join(lines)
    )


def _headline(config: str, count: int) -> str:
    return f"{_PYDANTIC}: {count} validation error{'s' if count > 1 else ''} for {config}"


def _kind(demand: str) -> str:
    """pydantic's name of a bound: "greater than or equal to 1" is `greater_than_equal`."""
    words = demand.rpartition(" ")[0]
    return words.replace(" or equal to", " equal").replace(" than", "_than").replace(" ", "_")
