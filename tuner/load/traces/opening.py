"""A path -> the lines or pieces of a text file, plain or gzip; anything else is refused.

What is wrong with the file as a whole ends in an `InputError` with file and line: no such
file, cut off, damaged, another kind of file. Memory is bounded by the longest line.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from tuner.errors import InputError

LONGEST_LINE = 64 * 2**20
"""Bytes. The longest prompt that a server takes (a million tokens) has a few MiB."""

_GZIP = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_OTHER_FILES = {
    b"\xff\xfe": ("UTF-16 text", "Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW."),
    b"\xfe\xff": ("UTF-16 text", "Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW."),
    b"PAR1": ("a Parquet file", "Write it as JSON lines first."),
    b"PK\x03\x04": ("a ZIP archive", "Unpack it first; .gz is read as it is."),
    b"BZh": ("compressed with bzip2", "Unpack it first; .gz is read as it is."),
    b"\xfd7zXZ": ("compressed with xz", "Unpack it first; .gz is read as it is."),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "Unpack it first; .gz is read as it is."),
    b"SQLite format 3": ("an SQLite database", "Write its rows as JSON lines or CSV first."),
}
_NUL_BYTES = "has NUL bytes: this is not a text file"
_TEXT_HINT = "Give a text file in UTF-8: CSV, JSON or JSON lines, plain or as .gz."


class TextFile:
    """An open file of text.

    Attributes:
        path: as the user gave it.
        line: number of the line that was read last, from 1; 0 before the first.
    """

    def __init__(self, path: Path, stream: BufferedReader) -> None:
        self.path = path
        self.line = 0
        self._stream = stream
        start = self._peek()
        if not start:
            raise self.problem("is empty", "Check the path.")
        for magic, (kind, hint) in _OTHER_FILES.items():
            if start.startswith(magic):
                raise self.problem(f"is {kind}", hint)
        if start.startswith(_UTF8_MARK):
            self._stream.read(len(_UTF8_MARK))

    def problem(self, message: str, hint: str = "", line: int | None = None) -> InputError:
        """The exception that says what is wrong at a line, the last one if none is given."""
        at = self.line if line is None else line
        where = f"{self.path}:{at}" if at else f"{self.path}"
        return InputError(f"{where}: {message}", hint)

    def lines(self) -> Iterator[bytes]:
        """Every line, without its end (LF or CRLF); `line` goes with it.

        Raises:
            InputError: the file cannot be read on, a line is over-long or has NUL bytes.
        """
        readline = self._stream.readline
        while True:
            try:
                line = readline(LONGEST_LINE)
            except _READ_ERRORS as error:
                raise self._cannot_read(error) from error
            if not line:
                return
            self.line += 1
            if len(line) >= LONGEST_LINE:
                raise self.problem(f"is longer than {LONGEST_LINE // 2**20} MiB", _TEXT_HINT)
            if b"\0" in line:
                raise self.problem(_NUL_BYTES, _TEXT_HINT)
            yield line.rstrip(b"\r\n")

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer only at the end: for files that are not made of lines.

        Raises:
            InputError: the file cannot be read on, or has NUL bytes.
        """
        try:
            piece = self._stream.read(size)
        except _READ_ERRORS as error:
            raise self._cannot_read(error) from error
        if b"\0" in piece:
            raise self.problem(_NUL_BYTES, _TEXT_HINT)
        return piece

    def next_character(self) -> bytes:
        """The next one that is no white space, unread; what comes before it is skipped."""
        while piece := self._peek():
            text = piece.lstrip()
            skipped = piece[: len(piece) - len(text)]
            self._stream.read(len(skipped))
            self.line += skipped.count(b"\n")
            if text:
                return text[:1]
        return b""

    def _peek(self) -> bytes:
        try:
            return self._stream.peek(16)
        except _READ_ERRORS as error:
            raise self._cannot_read(error) from error

    def _cannot_read(self, error: Exception) -> InputError:
        if isinstance(error, EOFError):
            return self.problem(
                f"its gzip data is cut off after line {self.line}", "Fetch the file again.", 0
            )
        if isinstance(error, gzip.BadGzipFile | zlib.error):
            return self.problem(
                f"its gzip data is damaged after line {self.line} ({error})",
                "Fetch the file again.",
                0,
            )
        return self.problem(f"cannot be read: {getattr(error, 'strerror', None) or error}", "", 0)


_READ_ERRORS = (EOFError, OSError, zlib.error)


@contextmanager
def open_text(path: Path) -> Iterator[TextFile]:
    """Open a file, through gzip if its content is that.

    Raises:
        InputError: it does not exist, cannot be opened, or is no text.
    """
    with _opened(path) as stream:
        yield TextFile(path, stream)


def _opened(path: Path) -> BufferedReader:
    try:
        if not path.is_file():  # a pipe could block for ever, and cannot be read twice
            problem = "is not a file" if path.exists() else "does not exist"
            raise InputError(f"{path}: {problem}.", "Check the path of the file.")
        with path.open("rb") as raw:
            magic = raw.read(2)
        if magic == _GZIP:
            # Buffered once more: lines are then cut in C.
            return BufferedReader(gzip.open(path, "rb"))
        if magic and path.suffix.lower() == ".gz":
            raise InputError(
                f"{path}: is not gzip, although its name says so.", "Rename or compress it."
            )
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}.") from error
