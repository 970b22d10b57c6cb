"""The server's log: vLLM's lines on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import datetime

from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.log_format import LogEntry, LogWriter, Pids
from tuner.engine.simulated.words import VERSION, lines_of

_NOISE_LINE = (
    b"(EngineCore pid=4242) DEBUG 01-01 00:00:00 [core.py:1] a line that says nothing, over and "
    b"over, until the disk is full or the reader is tired of it: 0123456789abcdef\n"
)
_MIB = 2**20

GARBAGE = (
    b"\x00\x01\x02\xff\xfe\x80 \xc3\x28 \xf0\x28\x8c\xbc\r\x1b[31m\x1b[0m\x1b]0;title\x07\n"
    b"\r\r\r 50%|\xe2\x96\x88\xe2\x96\x88    | 1/2\r100%|\xe2\x96\x88\xe2\x96\x88| 2/2\n"
    b"no end of line: " + b"\xe2\x96" + b"x" * 100_000 + b"\n"
)
"""Bytes that are no text, colours, progress bars, a long line; none of it means anything."""


class Log:
    """Writes lines at once, so that two processes can share the output.

    Args:
        version: in place of the model's plain one.
    """

    def __init__(self, pids: Pids, version: str) -> None:
        self.pids = pids
        self._version = version

    def text(self, text: str) -> None:
        """Write text as it is, with an end of line."""
        shown = text if self._version == VERSION else text.replace(VERSION, self._version)
        self.raw(shown.encode(errors="replace") + b"\n")

    def raw(self, data: bytes) -> None:
        """Write bytes."""
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def lines(self, entries: Iterable[LogEntry]) -> None:
        """Write lines without regard to their times."""
        text = "\n".join(entry.text for entry in entries)
        if text:
            self.text(text)

    def say(self, where: str, text: str, *, level: str = "INFO") -> None:
        """Write a message of the API process' logger; `where` is like `launcher.py:254`."""
        writer = LogWriter(self.pids, datetime.now(), "")
        writer.say("api", where, text, level=level)
        self.lines(entry for _, entry in writer.entries)

    def obituary(self, failure: StartFailure) -> None:
        """Write what vLLM says when a server that has served fails."""
        self.lines(lines_of(failure, pids=self.pids, begun=datetime.now()))

    def noise(self, mib: float) -> None:
        """Write so many MiB of lines without meaning."""
        block = _NOISE_LINE * (_MIB // len(_NOISE_LINE))
        for _ in range(round(mib * _MIB / len(block))):
            self.raw(block)
