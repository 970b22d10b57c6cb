"""Flag values as vLLM's command line parser reads them, and what it says of bad ones."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from tuner.types import JsonValue


class BadArgument(Exception):
    """A value that the argument parser refuses; the message is the parser's own line."""


_SUFFIXES = {
    letter if base == 1024 else letter.lower(): base**power
    for base in (1000, 1024)
    for power, letter in enumerate("KMGT", start=1)
}
_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


class FlagValues:
    """The flags of one start, read by name.

    Args:
        args: values as JSON by hyphenated name; `no-x: true` stands for `x: false`, None and
            the text "None" for a flag that is not set.
    """

    def __init__(self, args: Mapping[str, JsonValue]) -> None:
        self._args: dict[str, JsonValue] = {}
        for name, value in args.items():
            canonical = name.replace("_", "-")
            if canonical.startswith("no-") and isinstance(value, bool):
                canonical, value = canonical.removeprefix("no-"), not value
            if value is not None and value != "None":
                self._args[canonical] = value

    def whole(self, name: str) -> int | None:
        """A plain whole number.

        Raises:
            BadArgument: it is none.
        """
        value = self._args.get(name)
        if value is None:
            return None
        number = _plain_whole(value)
        if number is None:
            raise BadArgument(f"argument --{name}: invalid int value: '{value}'")
        return number

    def sized(self, name: str) -> int | None:
        """A whole number that may be written `64M` (2^20) or `1.5k` (10^3).

        Raises:
            BadArgument: it is none.
        """
        value = self._args.get(name)
        if value is None:
            return None
        number = _plain_whole(value)
        if number is None and isinstance(value, str):
            number = _suffixed(value.strip())
        if number is None:
            raise BadArgument(f"argument --{name}: invalid human_readable_int value: '{value}'")
        return number

    def length(self, name: str) -> int | None:
        """Like `sized`; -1 or `auto` ask vLLM to choose, and are -1.

        Raises:
            BadArgument: it is none.
        """
        value = self._args.get(name)
        if isinstance(value, str) and value.strip().lower() == "auto":
            return -1
        return self.sized(name)

    def real(self, name: str) -> float | None:
        """A number.

        Raises:
            BadArgument: it is none.
        """
        value = self._args.get(name)
        if value is None:
            return None
        try:
            if isinstance(value, bool | list | dict):
                raise ValueError(value)
            return float(value)
        except ValueError:
            raise BadArgument(f"argument --{name}: invalid float value: '{value}'") from None

    def switch(self, name: str, default: bool) -> bool:
        """A flag that is on or off."""
        value = self._args.get(name)
        return default if value is None else value not in (False, "false", "False")

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        """One of `choices`.

        Raises:
            BadArgument: another.
        """
        value = self._args.get(name, default)
        if not isinstance(value, str) or value not in choices:
            listed = ", ".join(repr(choice) for choice in choices)
            raise BadArgument(
                f"argument --{name}: invalid choice: '{value}' (choose from {listed})"
            )
        return value

    def wholes(self, name: str) -> tuple[int, ...] | None:
        """Several whole numbers.

        Raises:
            BadArgument: one of them is none.
        """
        value = self._args.get(name)
        if value is None:
            return None
        numbers = [_plain_whole(item) for item in (value if isinstance(value, list) else [value])]
        if None in numbers:
            raise BadArgument(f"argument --{name}: invalid int value: '{value}'")
        return tuple(number for number in numbers if number is not None)

    def json_object(self, name: str) -> Mapping[str, JsonValue]:
        """A JSON object, or the text of one; empty where it is not set.

        Raises:
            BadArgument: anything else.
        """
        value = self._args.get(name, {})
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise BadArgument(
                    f"argument --{name}: Value {value} cannot be converted to "
                    "<function loads at 0x7f2b1c0e5d00>."
                ) from None
        if not isinstance(value, dict):
            raise BadArgument(f"argument --{name}: invalid value: '{value}'")
        return value


def _plain_whole(value: JsonValue) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)
    return None


def _suffixed(text: str) -> int | None:
    match = _SUFFIXED.fullmatch(text)
    if match is None:
        return None
    number, suffix = match.groups()
    if suffix.isupper() and "." in number:
        return None  # vLLM takes no decimals with binary suffixes
    return int(float(number) * _SUFFIXES[suffix])
