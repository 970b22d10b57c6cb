"""Rows of JSON: one a line, or the items of one list; never the whole file in memory.

Of an object that names a key twice the last value counts, as everywhere with JSON.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import TypeAlias

from tuner.errors import InputError
from tuner.load.traces.opening import LONGEST_LINE, TextFile
from tuner.load.traces.trace import Reason
from tuner.types import JsonValue

JsonObject: TypeAlias = dict[str, JsonValue]
JsonRow: TypeAlias = tuple[int, JsonObject | Reason]

_PIECE = 2**18
_LIST_HINT = "Give a JSON list of objects, `[{...}, {...}]`, or one object a line."


def json_rows(file: TextFile) -> Iterator[JsonRow]:
    """Line and object of each row, or why it is none. Blank lines are no rows.

    Raises:
        InputError: the file cannot be read to its end, or its list is damaged: what follows
            the damage cannot be told apart.
    """
    return _list_rows(file) if file.next_character() == b"[" else _line_rows(file)


def _line_rows(file: TextFile) -> Iterator[JsonRow]:
    for line in file.lines():
        if line.strip():
            yield file.line, _parsed(line)


def _parsed(line: bytes) -> JsonObject | Reason:
    try:
        value: JsonValue = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Reason.NOT_UTF8
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, too deep
        return Reason.NOT_JSON
    return value if isinstance(value, dict) else Reason.NOT_OBJECT


def _list_rows(file: TextFile) -> Iterator[JsonRow]:
    window = _Window(file)
    window.skip_character()  # the bracket that was seen
    first = True
    while (character := window.next_character()) != "]":
        if not first:
            if character != ",":
                raise window.problem("expected `,` or `]` after an item of the list")
            window.skip_character()
            window.next_character()
        line = window.line
        value = window.item()
        yield line, value if isinstance(value, dict) else Reason.NOT_OBJECT
        first = False
    window.skip_character()
    if window.next_character():
        raise window.problem("has more after the end of its list")


class _Window:
    """The part of a JSON list that is being read."""

    def __init__(self, file: TextFile) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._ended = False
        self.line = file.line + 1

    def problem(self, message: str) -> InputError:
        """What is wrong at the current line."""
        if self._ended and self._at >= len(self._text):
            message = "ends within its list: it is cut off"
        return self._file.problem(f"is not one JSON document: {message}", _LIST_HINT, self.line)

    def next_character(self) -> str:
        """The next one that is no white space, unread; empty at the end."""
        while True:
            rest = self._text[self._at : self._at + 1]
            if rest and not rest.isspace():
                return rest
            if not rest:
                if not self._more():
                    return ""
                continue
            self.skip_character()

    def skip_character(self) -> None:
        """Go on by one."""
        if self._at >= len(self._text):
            self._more()
        self.line += self._text.startswith("\n", self._at)
        self._at += 1

    def item(self) -> JsonValue:
        """The value that begins here.

        A value that the window's end cuts looks like a wrong one, so that more is read until
        it is whole, or until more text does not change what is wrong with it.
        """
        seen: tuple[int, str] | None = None
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                wrong = (error.pos - self._at, error.msg)
                cut = wrong != seen or error.msg.startswith("Unterminated string")
                too_long = len(self._text) - self._at > LONGEST_LINE
                if not cut or too_long or not self._more():
                    if self._ended and self._at + wrong[0] >= len(self._text.rstrip()):
                        self._at = len(self._text)
                    raise self.problem(error.msg) from error
                seen = wrong
            except RecursionError as error:
                raise self.problem("it is nested too deeply") from error
            except ValueError as error:  # a number of thousands of digits
                raise self.problem(str(error)) from error
            else:
                length = end - self._at
                if end < len(self._text) or not self._more():  # else a number may go on
                    item: JsonValue = value
                    self.line += self._text.count("\n", self._at, self._at + length)
                    self._at += length
                    return item

    def _more(self) -> bool:
        """Read on, dropping what was used; False at the end."""
        kept = self._text[self._at :]
        # As much again as is kept: an item of n characters is tried log(n) times.
        piece = self._file.read(max(_PIECE, len(kept)))
        try:
            text = self._decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            line = self.line + kept.count("\n") + piece.count(b"\n", 0, error.start)
            raise self._file.problem("not UTF-8 text", _LIST_HINT, line) from error
        self._text, self._at = kept + text, 0
        self._ended = not piece
        return bool(piece)
