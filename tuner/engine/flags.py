"""What flags a vLLM has, and which values each of them takes.

A `FlagTable` comes from the vLLM that will run (`tuner.engine.introspect`), because flags,
their types, defaults and choices differ from release to release.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property

from tuner.types import JsonValue


class FlagKind(StrEnum):
    """What values a flag takes."""

    BOOL = "bool"
    """`--flag` and `--no-flag`."""
    SWITCH = "switch"
    """`--flag` only; left out is false."""
    INT = "int"
    SIZE = "size"
    """An integer, or one with a unit: 64k is 64,000, 64K is 65,536."""
    FLOAT = "float"
    STR = "str"
    JSON = "json"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of `vllm serve`.

    Attributes:
        name: with hyphens and without the leading two.
        dest: the name that vLLM's parser stores it under.
        aliases: other spellings, short ones included (`tp`).
        default: None also where vLLM decides later, from model and device.
        choices: None where any value of the kind will do.
        nargs: argparse's: "+", "*", "?" or a number; None for one value.
        optional_value: whether the flag may stand without a value.
        repeats: whether a list is given by repeating the flag.
        group: argparse's heading, such as "CacheConfig".
    """

    name: str
    dest: str
    aliases: tuple[str, ...]
    kind: FlagKind
    default: JsonValue
    choices: tuple[JsonValue, ...] | None
    nargs: str | int | None
    optional_value: bool = False
    repeats: bool = False
    deprecated: bool = False
    group: str = ""

    @property
    def takes_list(self) -> bool:
        """Whether several values may follow."""
        return self.repeats or self.nargs in ("+", "*") or isinstance(self.nargs, int)


@dataclass(frozen=True)
class FlagTable:
    """All flags of one vLLM.

    Attributes:
        version: of that vLLM.
        flags: by name.
        env_names: environment variables it knows; empty where it could not say.
    """

    version: str
    flags: Mapping[str, Flag]
    env_names: frozenset[str] = frozenset()

    @cached_property
    def _by_alias(self) -> dict[str, Flag]:
        return {alias: flag for flag in self.flags.values() for alias in flag.aliases}

    def find(self, name: str) -> Flag | None:
        """The flag of this name or alias; hyphens and underscores are the same."""
        hyphened = name.replace("_", "-")
        return self.flags.get(hyphened) or self._by_alias.get(hyphened)

    def suggest(self, name: str) -> list[str]:
        """Up to three flags that a user who wrote `name` may have meant, best first."""
        hyphened = name.replace("_", "-").lower()
        longer = [flag for flag in self.flags if flag.startswith(hyphened)]
        close = difflib.get_close_matches(hyphened, self.flags, n=3, cutoff=0.72)
        return list(dict.fromkeys([*longer[:2], *close]))[:3]

    def to_json(self) -> dict[str, object]:
        """A JSON object that `from_json` reads."""
        return {
            "version": self.version,
            "flags": [asdict(flag) for flag in self.flags.values()],
            "env_names": sorted(self.env_names),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> FlagTable:
        """Read what `to_json` or the probe wrote.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        entries = document["flags"]
        names = document["env_names"]
        if not isinstance(entries, list) or not isinstance(names, list):
            raise TypeError("not a flag table")
        flags = [_flag(entry) for entry in entries]
        return cls(
            version=str(document["version"]),
            flags={flag.name: flag for flag in flags},
            env_names=frozenset(str(name) for name in names),
        )


def _flag(entry: Mapping[str, JsonValue]) -> Flag:
    choices, aliases, nargs = entry["choices"], entry["aliases"], entry["nargs"]
    if not isinstance(aliases, list) or not isinstance(choices, list | None):
        raise TypeError("not a flag")
    return Flag(
        name=str(entry["name"]),
        dest=str(entry["dest"]),
        aliases=tuple(str(alias) for alias in aliases),
        kind=FlagKind(str(entry["kind"])),
        default=entry["default"],
        choices=None if choices is None else tuple(choices),
        nargs=nargs if isinstance(nargs, str | int) else None,
        optional_value=bool(entry["optional_value"]),
        repeats=bool(entry["repeats"]),
        deprecated=bool(entry["deprecated"]),
        group=str(entry["group"]),
    )


# --- values ----------------------------------------------------------------------------

_SIZE = re.compile(r"\s*(?:\d+|\d+(?:\.\d+)?[kmgt]|\d+[KMGT])\s*")
_BINARY_UNIT = re.compile(r"\s*(\d+)\s*([kKmMgGtT])i?[bB]?\s*")
_TRUTH = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false"}


def value_problem(flag: Flag, value: JsonValue) -> str | None:
    """Why `flag` does not take `value`, as a phrase for a sentence; None if it does.

    None as a value means "left at vLLM's default" and suits every flag.
    """
    if value is None or flag.kind is FlagKind.ANY:
        return None
    if flag.kind in (FlagKind.BOOL, FlagKind.SWITCH):
        return _bool_problem(value)
    if isinstance(value, bool) and flag.optional_value:
        return None
    if isinstance(value, list) and flag.takes_list:
        return _list_problem(flag, value)
    return _single_problem(flag, value)


def _list_problem(flag: Flag, values: Sequence[JsonValue]) -> str | None:
    if isinstance(flag.nargs, int) and len(values) != flag.nargs:
        return f"takes {flag.nargs} values, not {len(values)}"
    if flag.nargs == "+" and not values:
        return "takes at least one value"
    problems = (_single_problem(flag, value, in_list=True) for value in values)
    return next((problem for problem in problems if problem), None)


def _single_problem(flag: Flag, value: JsonValue, in_list: bool = False) -> str | None:
    if flag.kind is FlagKind.JSON:
        return _json_problem(value)
    # An object in a list stays allowed: `lora-modules` takes JSON objects as words.
    if isinstance(value, list) or (isinstance(value, dict) and not in_list):
        return f"takes one value, not {_quoted(value)}"
    if flag.choices is not None and str(value) not in {str(choice) for choice in flag.choices}:
        return f"takes one of {_listed(flag.choices)}, not {_quoted(value)}"
    if flag.name == "max-model-len" and value in ("auto", "-1"):
        return None
    return _KIND_PROBLEMS[flag.kind](value)


def _bool_problem(value: JsonValue) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.lower() in _TRUTH:
        return f"takes true or false: write {_TRUTH[value.lower()]} without quotes"
    return f"takes true or false, not {_quoted(value)}"


def _json_problem(value: JsonValue) -> str | None:
    if not isinstance(value, str):
        return None
    try:
        json.loads(value)
    except ValueError:
        return f"takes JSON (a mapping in YAML), not {_quoted(value)}"
    return None


def _int_problem(value: JsonValue) -> str | None:
    if isinstance(value, str):
        fits = re.fullmatch(r"\s*[+-]?\d+\s*", value) is not None
    else:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        fits = fits and float(value).is_integer()  # type: ignore[arg-type]
    return None if fits else f"takes a whole number, not {_quoted(value)}"


def _size_problem(value: JsonValue) -> str | None:
    if not isinstance(value, str):
        return _int_problem(value)
    if _SIZE.fullmatch(value):
        return None
    if unit := _BINARY_UNIT.fullmatch(value):
        better = f"{unit[1]}{unit[2].upper()}"
        return f"takes a whole number with k, m, g or K, M, G: write {better}, not {_quoted(value)}"
    return f"takes a whole number, with a unit such as 64K if you like, not {_quoted(value)}"


def _float_problem(value: JsonValue) -> str | None:
    try:
        if not isinstance(value, bool):
            float(value)  # type: ignore[arg-type]  # a ValueError or TypeError is the answer
            return None
    except (ValueError, TypeError):
        pass
    return f"takes a number, not {_quoted(value)}"


def _str_problem(value: JsonValue) -> str | None:
    return f"takes text, not {_quoted(value)}" if isinstance(value, bool) else None


_KIND_PROBLEMS = {
    FlagKind.INT: _int_problem,
    FlagKind.SIZE: _size_problem,
    FlagKind.FLOAT: _float_problem,
    FlagKind.STR: _str_problem,
}


def _quoted(value: JsonValue) -> str:
    return json.dumps(value)


def _listed(choices: Sequence[JsonValue], at_most: int = 24) -> str:
    words = [str(choice) for choice in choices if choice is not None]
    more = f" … ({len(words) - at_most} more)" if len(words) > at_most else ""
    return ", ".join(words[:at_most]) + more
