"""A log's bytes, cut anywhere, as lines of bounded length."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

LONGEST_PIECE = 65536
"""Characters of a line without a break that are kept together; a log may have no breaks."""

REST_OF_LINE = "\0"
"""Begins a piece that is not the beginning of its line. No line holds it otherwise."""

_STAMP = re.compile(
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? "
    r"\[?[\w./<>-]+:\d+\]"
)
_TAG_BEFORE = re.compile(r"(?:\([A-Za-z][\w.<>: =-]{0,60}?pid=\d+[^()\n]{0,40}\) ){1,3}$")
_LONGEST_TAG = 200


def record_starts(text: str, begin: int = 0, end: int | None = None) -> Iterator[int]:
    """Where records of vLLM's own logger begin, their process tags included."""
    for match in _STAMP.finditer(text, begin, len(text) if end is None else end):
        start = match.start()
        tag = _TAG_BEFORE.search(text, max(begin, start - _LONGEST_TAG), start)
        yield start if tag is None else tag.start()


_BOMS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


class LogInput:
    """Decodes and splits; what it gives does not depend on where the input was cut.

    UTF-8, or UTF-16 with its mark; what is neither becomes replacement characters. Lines end
    with LF, CRLF, or CR as progress bars write it. NUL bytes, which a truncated log begins
    with, are dropped.
    """

    def __init__(self) -> None:
        self._head = b""
        self._decoder: codecs.IncrementalDecoder | None = None
        self._rest = ""
        self._within = False

    def feed(self, data: bytes | str) -> list[str]:
        """The lines that `data` completes."""
        return self._lines(data if isinstance(data, str) else self._decode(data))

    def finish(self) -> list[str]:
        """What is left; feeding may go on after it."""
        text = self._decode(b"", final=True)
        lines = self._lines(text)
        rest, self._rest = self._rest.rstrip("\r"), ""
        if rest:
            lines.append(self._marked(rest))
        self._within = False
        return lines

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        if self._decoder is None:
            data = self._head + data
            if len(data) < 2 and not final:
                self._head = data
                return ""
            self._head = b""
            encoding = _BOMS.get(data[:2], "utf-8")
            self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        return self._decoder.decode(data, final)

    def _lines(self, text: str) -> list[str]:
        if "\0" in text:
            text = text.replace("\0", "")
        text = self._rest + text
        held = ""
        if "\r" in text:
            if text.endswith("\r"):  # perhaps the first half of CRLF
                text, held = text[:-1], "\r"
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        lines = text.split("\n")
        rest = lines.pop()
        if self._within or max(map(len, lines), default=0) > LONGEST_PIECE:
            lines = [piece for line in lines for piece in self._pieces(line)]
        if len(rest) > LONGEST_PIECE:
            *pieces, rest = self._pieces(rest, ends=False)
            lines += pieces
        self._rest = rest + held
        return lines

    def _pieces(self, line: str, *, ends: bool = True) -> list[str]:
        """A line cut into bounded pieces, where records begin if possible."""
        pieces = []
        while len(line) > LONGEST_PIECE:
            half = LONGEST_PIECE // 2
            starts = list(record_starts(line, half, LONGEST_PIECE))
            cut = starts[-1] if starts else LONGEST_PIECE
            pieces.append(self._marked(line[:cut]))
            line, self._within = line[cut:], True
        pieces.append(self._marked(line) if ends else line)
        if ends:
            self._within = False
        return pieces

    def _marked(self, piece: str) -> str:
        return REST_OF_LINE + piece if self._within else piece
