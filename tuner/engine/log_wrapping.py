"""Lines that a terminal broke at its width, put together again."""

from __future__ import annotations

import re

from tuner.engine.log_lines import clean, quotes_request, without_colours

_WIDEST_TERMINAL = 250
_NARROWEST_TERMINAL = 60
_LONGEST_JOINED = 4000
"""A record is closed there: no message is longer, and a log whose lines happen to be of one
width would never end one."""

_STAMPED = re.compile(
    r"\([A-Za-z][^()\n]{0,60}pid=\d|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: \d|:\s)|\[rank\d"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d |[\w./-]{1,120}\s{1,40}\| "
    r"|[A-Za-z][\w.-]{0,120}:\d+:\d+ \[\d|\[\s*\d+\.\d+\] "
    r'|\[pod/|\[resource\.|\{"|\[[WEI]\d{4} '
)
"""Begins with what stands before a message."""

_ANEW = re.compile(
    r"\s{2,}\S|Traceback \(most|(?:[a-z_]\w*\.)*[A-Z]\w+(?:Error|Exception)(?::|$)"
    r"|The above exception|During handling|Process [A-Z][\w-]*:|(?:Killed|Aborted)\b"
    r"|Segmentation fault|Bus error|terminate called|Loading |Capturing |usage: "
    r"|\S+: line \d+:|vllm.*: error: "
)
"""Begins as a message does."""


class Wrapping:
    """Joins lines that are as wide as the widest so far with the one after.

    A log that a terminal wrapped at W has no line wider than W, and every line that goes on in
    the next is W wide. A log with a line wider than any terminal was not wrapped.

    Attributes:
        possible: whether the log may be wrapped.
        grown: whether the last part was added to what `join` gave.
    """

    def __init__(self) -> None:
        self.possible = True
        self.grown = False
        self._widest = 0
        self._times = 0
        self._open: str | None = None

    def join(self, line: str) -> str | None:
        """All of the broken line of which `line` is a later part; None if it is a line itself."""
        visible = without_colours(line)
        width = len(visible)
        self.grown = False
        before, self._open = self._open, None
        if width > self._widest:
            self._widest, self._times = width, 0
            self.possible = width <= _WIDEST_TERMINAL
        joined = None
        if before is not None and _continues(before, visible):
            joined = self._joined(before, visible)
        if width == self._widest and width >= _NARROWEST_TERMINAL:
            self._times += 1
            self._open = joined or visible
        elif width == self._widest - 1 and self._times > 1:
            self._open = (joined or visible) + " "  # lost when it was copied
        return joined

    def _joined(self, before: str, visible: str) -> str | None:
        """None where it has become too long: what follows is a line for itself.

        But for a request: nothing in it is the server's own.
        """
        if len(before) < _LONGEST_JOINED:
            self.grown = True
            return before + visible
        return before if quotes_request(before) else None


def _continues(before: str, line: str) -> bool:
    if _STAMPED.match(line):
        return False
    if not _ANEW.match(line):
        return True
    if quotes_request(before):
        return True
    # Cut within what stands before the message, or within its first word.
    return re.fullmatch(r"[\w.]*", clean(before).text) is not None
