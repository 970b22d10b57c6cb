"""YAML text -> plain values that know their line.

Only what a space file needs, read with care for what people write into one: duplicate keys are
errors, tags and Python objects are refused, size, depth and aliases are bounded, and scalars
are read as in YAML 1.2's core schema (so that `1e-3` is a number and `4:00` is not 240), with
YAML 1.1's yes/no/on/off as well, since `vllm serve --config` reads those as true and false.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import yaml

from tuner.errors import InputError
from tuner.types import JsonValue

MAX_BYTES = 256 * 1024
"""Of a space file; a long one has a few kilobytes."""

MAX_DEPTH = 30
"""Levels of nesting."""

MAX_NODES = 20_000
"""Values in a file after aliases are written out, which bounds alias bombs."""

MAX_KEY_LENGTH = 200
"""Characters of a key; the longest flags have about fifty."""

Where: TypeAlias = Sequence[str | int]
"""Keys and indices from the top of the file to a value."""

_TAG = "tag:yaml.org,2002:"
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+)")
_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"
)


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the file. `line` counts from 1; for the value of a key it is the key's line.

    `written` is the text of a scalar, which tells `8.10` from `8.1`.
    """

    value: bool | int | float | str | list[Node] | dict[str, Node] | None
    line: int
    written: str = ""

    def plain(self) -> JsonValue:
        """The value without its lines."""
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return self.value

    @property
    def items(self) -> dict[str, Node]:
        """The entries of a mapping; none for anything else."""
        return self.value if isinstance(self.value, dict) else {}


@dataclass(frozen=True, slots=True)
class Document:
    """A space file as YAML understands it."""

    path: Path
    root: Node

    def at(self, where: Where) -> Node:
        """The node at `where`, or the deepest one on the way to it that exists."""
        node = self.root
        for step in where:
            found = _child(node, step)
            if found is None:
                return node
            node = found
        return node

    def section(self, *where: str) -> Node:
        """The node at `where`, an empty one if the file does not have it."""
        node: Node | None = self.root
        for step in where:
            node = None if node is None else _child(node, step)
        return Node(None, self.root.line) if node is None else node

    def error(self, node: Node, message: str, hint: str = "") -> InputError:
        """An error to be raised that points at the line of `node`."""
        return InputError(f"{self.path}:{node.line}: {message}", hint)


def read(text: str, path: Path) -> Document:
    """Parse `text`, whose top level must be a mapping.

    Raises:
        InputError: it cannot be used; `path` and the line are in the message.
    """
    if len(text) > MAX_BYTES:
        raise too_large(path)
    try:
        tree = yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(
            f"{path}:{line}: the file holds a character that YAML does not allow",
            "A space file is plain UTF-8 text.",
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        problem = (error.problem or "").removeprefix("but ")
        raise InputError(f"{path}:{line}: not valid YAML: {problem}", _hint(error)) from None
    if tree is None:
        raise InputError(f"{path}:1: the file is empty", "See search_spaces/ for examples.")
    root = _Builder(path).build(tree, 1, 0)
    if not isinstance(root.value, dict):
        raise InputError(
            f"{path}:{root.line}: the top level must be a mapping, not {kind_of(root.value)}",
            "Start lines with a key such as `server:`, `search_space:` and `workload:`.",
        )
    return Document(path, root)


def too_large(path: Path) -> InputError:
    """The error for a file of more than `MAX_BYTES`."""
    return InputError(
        f"{path}:1: the file is larger than {MAX_BYTES // 1024} KiB",
        "A space file is a short YAML text; is this the right file?",
    )


def kind_of(value: object) -> str:
    """What a value is, in the words of messages."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case str():
            return f"'{value}'" if len(value) <= 60 else f"'{value[:59]}…'"
        case list() | tuple():
            return "a list"
    return "a mapping"


class _Loader(yaml.SafeLoader):
    """Composes nodes only: PyYAML's parser, our scalars, a bound on nesting."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


for _tag, _pattern, _first in (
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    (
        "bool",
        re.compile("|".join(f"{w}|{w.capitalize()}|{w.upper()}" for w in _BOOLEANS)),
        list("tTfFyYnNoO"),
    ),
    ("int", _INTEGER, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(_TAG + _tag, re.compile(rf"(?:{_pattern.pattern})\Z"), _first)


class _Builder:
    """YAML nodes -> `Node`, counting."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0

    def build(self, node: yaml.Node, line: int, depth: int) -> Node:
        self._count += 1
        if self._count > MAX_NODES or depth > MAX_DEPTH:
            raise self._error(
                node, "aliases make the file too large", "Write the values out without `&` and `*`."
            )
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node), line, str(node.value))
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            items = [self.build(item, _line(item), depth + 1) for item in node.value]
            return Node(items, line)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Node(self._mapping(node, depth), line)
        raise self._unknown_tag(node)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "a key must be a word", "Write `name: value`.")
            key = str(key_node.value)
            if key == "<<":
                raise self._error(
                    key_node, "merge keys (`<<`) are not understood", "Write the values out."
                )
            if len(key) > MAX_KEY_LENGTH:
                raise self._error(
                    key_node, f"`{key[:40]}…` is too long for a key", "Write `name: value`."
                )
            if key in entries:
                raise self._error(
                    key_node,
                    f"`{key}` is written twice (first in line {entries[key].line})",
                    "Delete one of the two.",
                )
            entries[key] = self.build(value_node, _line(key_node), depth + 1)
        return entries

    def _scalar(self, node: yaml.ScalarNode) -> bool | int | float | str | None:
        text = str(node.value)
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise self._error(node, "half of a character (a surrogate) is no text", "Delete it.")
        kind = node.tag.removeprefix(_TAG)
        digits = text.replace("_", "")
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool" and text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        if kind == "int" and _INTEGER.fullmatch(text):
            return self._bounded(node, digits)
        if kind == "float" and (_FLOAT.fullmatch(text) or _INTEGER.fullmatch(text)):
            number = _float(digits.replace(".inf", "inf").replace(".nan", "nan").lower())
            if not math.isfinite(number):
                raise self._error(
                    node, f"`{text}` is not a finite number", "Write a number, or leave it out."
                )
            return number
        raise self._unknown_tag(node)

    def _bounded(self, node: yaml.ScalarNode, digits: str) -> int:
        """An integer of at most 63 bits; longer ones are a slip, and slow to read."""
        try:
            number = int(digits, 0) if len(digits) <= 80 else 2**64
        except ValueError as error:  # such as 0x_
            raise self._error(node, f"`{node.value}` is not a number", "Write digits.") from error
        if abs(number) >= 2**63:
            raise self._error(node, f"`{digits[:20]}…` is too large", "Write a smaller number.")
        return number

    def _unknown_tag(self, node: yaml.Node) -> InputError:
        return self._error(
            node,
            f"the YAML tag `{node.tag.replace(_TAG, '!!')}` does not fit here",
            "Write plain values without `!` tags.",
        )

    def _error(self, node: yaml.Node, message: str, hint: str) -> InputError:
        return InputError(f"{self._path}:{_line(node)}: {message}", hint)


def _float(digits: str) -> float:
    """NaN for what only looks like a number, such as 0x10 under the tag !!float."""
    try:
        return float(digits)
    except ValueError:
        return math.nan


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _child(node: Node, step: str | int) -> Node | None:
    """What `node` holds under `step`; the file may write hyphens for a key's underscores."""
    if isinstance(step, int):
        items = node.value if isinstance(node.value, list) else []
        return items[step] if 0 <= step < len(items) else None
    if step in node.items:
        return node.items[step]
    return next((n for name, n in node.items.items() if name.replace("-", "_") == step), None)


def _hint(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    if "\\t" in problem:
        return "Indent with spaces; YAML allows no tabs."
    if "levels" in problem:
        return "A space file needs only a few."
    if "undefined alias" in problem:
        return "Put a value that contains `*` into quotes."
    return (
        "Look for a missing colon, quote or bracket, or a wrong indentation, there or just above."
    )
