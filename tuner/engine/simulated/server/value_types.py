"""How vLLM's parser reads the values of its flags: argparse types by a flag's kind.

argparse names a type's function in its complaint (`invalid int value: 'abc'`), so that the
functions here are called as vLLM's are.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable

from tuner.engine.flags import Flag, FlagKind
from tuner.types import JsonValue

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_readable_int(text: str) -> int:
    """`1k` is 1,000, `1K` is 1,024; decimals only with the small letters.

    Raises:
        ValueError: it is no such number.
        argparse.ArgumentTypeError: decimals with a binary suffix.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        return int(text)
    number, suffix = match.groups()
    if suffix in _DECIMAL:
        return int(float(number) * _DECIMAL[suffix])
    if "." in number:
        raise argparse.ArgumentTypeError(
            f"Decimals are not allowed with binary suffixes like {suffix}. Did you mean to use "
            f"{number}{suffix.lower()} instead?"
        )
    return int(number) * _BINARY[suffix]


def human_readable_int_or_auto(text: str) -> int:
    """The same; `auto` is -1."""
    return -1 if text.strip().lower() in ("auto", "-1") else human_readable_int(text)


def _json_text(text: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"Value {text} cannot be converted to <function loads at 0x7f2b1c0e5d00>."
        ) from None
    return value


def _json_or_text(text: str) -> JsonValue:
    return _json_text(text) if re.match(r"(?s)^\s*[{\[].*[}\]]\s*$", text) else text


_BY_KIND: dict[FlagKind, Callable[[str], JsonValue]] = {
    FlagKind.INT: int,
    FlagKind.SIZE: human_readable_int,
    FlagKind.FLOAT: float,
    FlagKind.STR: str,
    FlagKind.JSON: _json_text,
    FlagKind.ANY: _json_or_text,
}


def type_of(flag: Flag) -> Callable[[str], JsonValue]:
    """The function that reads one value of `flag`; for argparse."""
    read = human_readable_int_or_auto if flag.name == "max-model-len" else _BY_KIND[flag.kind]
    if flag.default is not None or flag.kind is FlagKind.STR:
        return read

    def nullable(text: str) -> JsonValue:
        return None if text in ("", "None") else read(text)

    nullable.__name__ = read.__name__
    return nullable
