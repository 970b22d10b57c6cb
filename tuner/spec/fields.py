"""Values of a space file's fixed sections: what they may be, and what is said of others.

Every validator raises through `tuner.spec.problems.wrong`, so that a message reads
"`workload.requests` must be ...".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from tuner.names import did_you_mean, is_study_name
from tuner.spec.document import kind_of
from tuner.spec.problems import wrong
from tuner.units import parse_duration, parse_whole

_E = TypeVar("_E", bound=StrEnum)

LARGEST = 2**53
LIKELY_MS = 10
"""A latency without a unit is likely meant in milliseconds from here on."""

_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%")


def whole(minimum: int, maximum: int = LARGEST) -> Callable[[object], int]:
    """Reads a whole number, also with a unit such as 8K."""

    def validate(value: object) -> int:
        try:
            number = parse_whole(value) if isinstance(value, str) else value
        except ValueError as error:
            raise wrong(f"must be a whole number: {error}") from None
        if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
            raise wrong(f"must be a whole number of at least {minimum}, not {kind_of(value)}")
        if number > maximum:
            raise wrong(f"must be at most {maximum}, not {kind_of(value)}")
        return number

    return validate


def number(
    minimum: float, *, exclusive: bool, maximum: float = LARGEST
) -> Callable[[object], float]:
    """Reads a number within bounds; `exclusive` leaves the lower one out."""
    bound = f"greater than {minimum:g}" if exclusive else f"of at least {minimum:g}"

    def validate(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(f"must be a number {bound}, not {kind_of(value)}")
        if value < minimum or (exclusive and value == minimum):
            raise wrong(f"must be a number {bound}, not {kind_of(value)}")
        if value > maximum:
            raise wrong(f"must be at most {maximum:g}, not {kind_of(value)}")
        return float(value)

    return validate


def share(low: float, high: float, example: str) -> Callable[[object], float]:
    """Reads `2%`, or 0.02; both bounds are allowed."""

    def validate(value: object) -> float:
        hint = f"Write a percentage, such as {example}."
        if isinstance(value, str) and (percent := _PERCENT.fullmatch(value.strip())):
            found = float(percent[1]) / 100
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found = float(value)
        else:
            raise wrong(f"must be a percentage, not {kind_of(value)}", hint)
        if not low <= found <= high:
            bounds = f"from {100 * low:g}% to {100 * high:g}%"
            raise wrong(f"must be {bounds}, not {kind_of(value)}", hint)
        return found

    return validate


def duration(value: object) -> float:
    """Reads a time span that is longer than nothing, in seconds."""
    return _span_s(value, "Write it like 500ms, 90s, 15m, 4h or 1h30m; a plain number is seconds.")


def _span_s(value: object, hint: str) -> float:
    if not isinstance(value, str | int | float):
        raise wrong(f"must be a duration, not {kind_of(value)}", hint)
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise wrong(f"must be a duration: {error}", hint) from None
    if seconds <= 0:
        raise wrong(f"must be longer than nothing, not {kind_of(value)}", hint)
    return seconds


def latency(value: object) -> float:
    """Reads a time span with its unit, in seconds.

    What a request may take is as often meant in milliseconds as in seconds: a plain number
    would be wrong by a thousand without a word.
    """
    seconds = _span_s(value, "Write it like 200ms or 0.2s.")
    try:
        plain = float(value) if isinstance(value, str | int | float) else None
    except ValueError:
        return seconds
    if plain is None:
        return seconds
    meant_s = plain / 1000 if plain >= LIKELY_MS else plain
    raise wrong(f"has no unit: {kind_of(value)}", f"Write {meant_s * 1000:g}ms or {meant_s:g}s.")


def text(value: object) -> str:
    """Reads one line of text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise wrong(f"must be a text, not {kind_of(value)}")
    if "\0" in value or "\n" in value:
        raise wrong("must be one line of text")
    return value.strip()


def expanded(path: str) -> str:
    """`~` as a shell would; other relative paths stay relative to the current directory."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:  # there is no such user: a folder of that name, then
        return path


def study(value: object) -> str:
    """Reads the name of a study."""
    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(name, str) or not is_study_name(name):
        raise wrong(
            f"must name one folder, which {kind_of(value)} cannot",
            "Use letters, digits, `.`, `_` and `-`, and start with a letter or digit.",
        )
    return name


def command(value: object) -> tuple[str, ...]:
    """Reads the words of a command line."""
    hint = "Write it as a list, such as `command: [vllm, serve]`."
    if isinstance(value, str):
        try:
            parts = ", ".join(shlex.split(value))
        except ValueError:
            parts = ""
        raise wrong("must be a list", f"Write `command: [{parts}]`." if parts else hint)
    if not isinstance(value, list) or not value:
        raise wrong(f"must be a list of words, not {kind_of(value or None)}", hint)
    for part in value:
        plain = isinstance(part, str | int | float) and not isinstance(part, bool)
        if not plain or not str(part) or "\0" in str(part):
            raise wrong(f"must hold words only, not {kind_of(part)}", hint)
    return tuple(str(part) for part in value)


def one_of(kinds: type[_E]) -> Callable[[object], _E]:
    """Reads one of the words of `kinds`."""
    names = [kind.value for kind in kinds]

    def validate(value: object) -> _E:
        if isinstance(value, str) and value in names:
            return kinds(value)
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        raise wrong(f"must be one of {', '.join(names)}, not {kind_of(value)}", hint)

    return validate


def switch(value: object) -> bool:
    """Reads true or false."""
    if not isinstance(value, bool):
        raise wrong(f"must be true or false, not {kind_of(value)}")
    return value


def named_values(value: object) -> dict[str, object]:
    """Reads a mapping whose keys are the user's."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(f"must be a mapping, not {kind_of(value)}", "Write `name: value` lines.")
    return value


def searched(value: object) -> dict[str, object]:
    """Reads a mapping that is not empty."""
    if not (named := named_values(value)):
        raise wrong(
            "is empty, there is nothing to search",
            "Write a parameter, such as `max-num-seqs: {low: 16, high: 512, log: true}`.",
        )
    return named


def lines(value: object) -> list[object]:
    """Reads a list of constraints."""
    if isinstance(value, list):
        return value
    hint = "Write a list: each constraint on its own line after `- `."
    raise wrong(f"must be a list of expressions, not {kind_of(value)}", hint)


Whole = Annotated[int, BeforeValidator(whole(1))]
WholeOrZero = Annotated[int, BeforeValidator(whole(0))]
NotNegative = Annotated[float, BeforeValidator(number(0, exclusive=False))]
Duration = Annotated[float, BeforeValidator(duration)]
Switch = Annotated[bool, BeforeValidator(switch)]
Text = Annotated[str, BeforeValidator(text)]
NamedValues = Annotated[dict[str, object], BeforeValidator(named_values)]


class Section(BaseModel):
    """A mapping with known keys; a key without a value counts as not written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    needs_value: ClassVar[frozenset[str]] = frozenset()
    """Optional keys that may not stand there empty."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, value: object) -> object:
        if isinstance(value, Section):
            return value
        known = list(cls.model_fields)
        if not isinstance(value, dict):
            example = ", ".join(f"{key}: …" for key in known[:3])
            raise wrong(f"must be a mapping, not {kind_of(value)}", f"Write `{{{example}}}`.")
        kept: dict[str, object] = {}
        for written, entry in value.items():
            key = str(written).replace("-", "_")
            if key not in known:
                hint = did_you_mean(key, known) or f"Known keys here: {', '.join(known)}."
                raise wrong("is an unknown key", hint, at=str(written))
            if key in kept:
                raise wrong("is written twice", "Delete one of the two.", at=str(written))
            kept[key] = entry
        return {
            key: entry for key, entry in kept.items() if entry is not None or key in cls.needs_value
        }
