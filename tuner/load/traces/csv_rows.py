"""Rows of CSV: by the names in the header, never by position.

Commas, semicolons or tabs; names in any case, with spaces, `_` or `-` or none.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tuner.load.traces.opening import LONGEST_LINE, TextFile
from tuner.load.traces.trace import Reason

CsvRow: TypeAlias = tuple[int, list[str] | Reason]

_CSV_HINT = "Give CSV with a header line, in UTF-8."
_SHOWN_NAMES = 12

# The module's own limit (128 KiB a cell) is for the whole process, and short for a prompt.
csv.field_size_limit(LONGEST_LINE)


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a CSV file.

    Attributes:
        names: as written.
        places: plain name (see `plain`) to its position.
    """

    names: tuple[str, ...]
    places: Mapping[str, int]
    delimiter: str

    def __str__(self) -> str:
        more = ", …" if len(self.names) > _SHOWN_NAMES else ""
        return ", ".join(name[:40] for name in self.names[:_SHOWN_NAMES]) + more


def plain(name: str) -> str:
    """A column's name without case, spaces, `_` and `-`."""
    return re.sub(r"[\s_-]+", "", name).lower()


def read_header(file: TextFile) -> Header:
    """The names of the columns, from the first line that is not blank.

    Raises:
        InputError: it is JSON, no text, or names a column twice.
    """
    if not file.next_character():
        raise file.problem("has nothing but white space", _CSV_HINT, 0)
    line = next(file.lines())
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise file.problem("not UTF-8 text", _CSV_HINT) from error
    if text.lstrip().startswith(("{", "[")):
        raise file.problem("is JSON, where the header of a CSV file is expected", _CSV_HINT)
    if "\r" in text:
        raise file.problem("ends its lines with CR alone", "Convert the line ends to LF.")
    delimiter = max(",;\t", key=text.count)
    cells = _split(text, delimiter)
    if isinstance(cells, Reason):
        raise file.problem("is no header of a CSV file", _CSV_HINT)
    names = tuple(cell.strip() for cell in cells)
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        if name and plain(name) in places:
            raise file.problem(f"names the column {name[:40]!r} twice", _CSV_HINT)
        places[plain(name)] = place
    return Header(names, places, delimiter)


def require(file: TextFile, header: Header, *names: str) -> list[int]:
    """Positions of columns that must be there.

    Raises:
        InputError: one is not; the message lists those that are.
    """
    missing = [name for name in names if plain(name) not in header.places]
    if missing:
        raise file.problem(
            f"has no column {', '.join(map(repr, missing))}; its columns are: {header}",
            f"Give a CSV file whose header names {', '.join(map(repr, names))}.",
        )
    return [header.places[plain(name)] for name in names]


def simple_rows(file: TextFile, header: Header) -> Iterator[CsvRow]:
    """Rows of a file of numbers and words, one a line: a stray quote costs only its own.

    Raises:
        InputError: the file cannot be read to its end.
    """
    columns, delimiter = len(header.names), header.delimiter
    for line in file.lines():
        if not line or line.isspace():
            continue
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            yield file.line, Reason.NOT_UTF8
            continue
        cells = _split(text, delimiter)
        yield file.line, cells if isinstance(cells, Reason) else _fitted(cells, columns)


def text_rows(file: TextFile, header: Header) -> Iterator[CsvRow]:
    """Rows of a file whose quoted cells may go over several lines.

    Raises:
        InputError: the file cannot be read to its end, or a quote is never closed.
    """
    lines = _Decoded(file)
    reader = csv.reader(lines, delimiter=header.delimiter, strict=True)
    while True:
        begin = file.line + 1
        lines.start_row()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if lines.ended:
                raise file.problem("a quote is never closed", _CSV_HINT, begin) from error
            yield begin, Reason.NOT_CSV
            continue
        if lines.is_undecodable:
            yield begin, Reason.NOT_UTF8
        elif any(cell.strip() for cell in cells):
            yield begin, _fitted(cells, len(header.names))


class _Decoded:
    """Lines as text, for the csv module; remembers what it cannot be told."""

    def __init__(self, file: TextFile) -> None:
        self._lines = file.lines()
        self._size = 0
        self._file = file
        self.ended = False
        self.is_undecodable = False

    def start_row(self) -> None:
        self._size = 0
        self.is_undecodable = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines, None)
        if line is None:
            self.ended = True
            raise StopIteration
        self._size += len(line)
        if self._size > LONGEST_LINE:
            raise self._file.problem("a quoted cell has no end", _CSV_HINT)
        text = line.decode("utf-8", errors="replace")
        self.is_undecodable |= "\ufffd" in text and not _is_utf8(line)
        return text + "\n"


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _split(text: str, delimiter: str) -> list[str] | Reason:
    """Cells of one line; without quotes the csv module is not needed."""
    if '"' not in text:
        return text.split(delimiter)
    try:
        rows = list(csv.reader([text], delimiter=delimiter, strict=True))
    except csv.Error:
        return Reason.NOT_CSV
    return rows[0] if len(rows) == 1 else Reason.NOT_CSV


def _fitted(cells: list[str], columns: int) -> list[str] | Reason:
    """As many cells as there are columns; empty ones beyond are dropped."""
    if len(cells) == columns:
        return cells
    if len(cells) < columns or any(cell.strip() for cell in cells[columns:]):
        return Reason.WRONG_COLUMNS
    return cells[:columns]
