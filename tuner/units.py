"""Durations and sizes as people write them: `1h30m`, `64MiB`, `8K`.

Single letters follow vLLM's command line (`human_readable_int` in its `argparse_utils`):
`K M G T` are powers of 1024, `k m g t` powers of 1000. The longer spellings are the usual
ones: `Ki`/`KiB` binary, `kB`/`KB` decimal, and their case does not matter.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

GIB = 2**30
"""Bytes in one GiB."""

_UNITS_S = {unit: Fraction(s) for unit, s in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))}
_UNITS_S["ms"] = Fraction(1, 1000)
_DURATION_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(ms|[dhms])\s*")
_PLAIN_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]{1,3})")


def _multipliers() -> dict[str, int]:
    table: dict[str, int] = {}
    for power, letter in enumerate("KMGT", start=1):
        table[letter] = 1024**power
        table[letter.lower()] = 1000**power
    return table


_ONE_LETTER = _multipliers()


def parse_duration(value: str | int | float) -> float:
    """Seconds in `90`, `"90s"`, `"15m"`, `"1h30m"` or `"500ms"`; a plain number is seconds.

    Units run from large to small, each at most once: d, h, m, s, ms.

    Raises:
        ValueError: not a duration, negative or not finite. The message says so.
    """
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a duration")
    if isinstance(value, int | float):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{value} is not a duration")
        return float(value)
    text = value.strip()
    if _PLAIN_NUMBER.fullmatch(text):
        return float(text)
    seconds = Fraction(0)
    position = 0
    units = list(_UNITS_S)
    while position < len(text):
        part = _DURATION_PART.match(text, position)
        if part is None or part[2] not in units:
            raise ValueError(f"'{_shorten(value)}' is not a duration")
        seconds += Fraction(part[1]) * _UNITS_S[part[2]]
        units = units[units.index(part[2]) + 1 :]
        position = part.end()
    if not text:
        raise ValueError("an empty text is not a duration")
    return float(seconds)


def parse_quantity(text: str) -> Fraction | None:
    """The number in `8K`, `64MiB` or `1.5GB` (bytes, or a count); None for anything else.

    Plain numbers without a unit are "anything else", and so are words such as `fp8`.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        return None
    unit = match[2]
    multiplier = _ONE_LETTER.get(unit) if len(unit) == 1 else _long_unit(unit.lower())
    return None if multiplier is None else Fraction(match[1]) * multiplier


def parse_whole(text: str) -> int | None:
    """A quantity as a whole number; None if `text` is no quantity.

    Raises:
        ValueError: it is one, but not whole (`0.3K`).
    """
    quantity = parse_quantity(text)
    if quantity is None:
        return None
    if quantity.denominator != 1:
        raise ValueError(f"'{text}' is not a whole number ({float(quantity):g})")
    return int(quantity)


def parse_gib(text: str) -> int | float | None:
    """A quantity of bytes in GiB, an int where that is exact; None if `text` is no quantity."""
    quantity = parse_quantity(text)
    if quantity is None:
        return None
    gib = quantity / GIB
    return int(gib) if gib.denominator == 1 else float(gib)


def _long_unit(unit: str) -> int | None:
    """Multiplier of a lower-case unit of two or three letters."""
    letter, rest = unit[0].upper(), unit[1:]
    if letter not in _ONE_LETTER:
        return None
    if rest in ("i", "ib"):
        return _ONE_LETTER[letter]
    return _ONE_LETTER[letter.lower()] if rest == "b" else None


def _shorten(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
