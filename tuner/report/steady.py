"""Output that may be lost without ending a study: a closed terminal, `| head`, a full disk."""

from __future__ import annotations

from typing import TextIO


class SteadyStream:
    """Passes text on to a stream until that fails, then drops it.

    A study goes on for hours; what it prints is also in its database.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = False

    def write(self, text: str) -> int:
        """Write, or drop."""
        if not self._lost:
            try:
                self._stream.write(text)
            except (OSError, ValueError):  # ValueError: it was closed
                self._lost = True
        return len(text)

    def flush(self) -> None:
        """Flush, unless the stream is lost."""
        if not self._lost:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._lost = True

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The descriptor below."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        """Of the stream below."""
        return self._stream.encoding
