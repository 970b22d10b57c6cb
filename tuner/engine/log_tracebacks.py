"""Tracebacks in a log, kept apart by the process that writes them."""

from __future__ import annotations

import re
from collections import OrderedDict, deque

from tuner.engine.log_lines import LogLine

_FRAME = re.compile(r'^\s*(?:\^\s*)?File "(?P<file>[^"]+)", line \d+, in (?P<function>\S+)')
_TELLING_FILES = {"torch/cuda/graphs.py": "torch/cuda/graphs.py", "/model_loader/": "load_model"}
"""Parts of a path that say as much as a function's name."""

_MESSAGE = re.compile(r"(?<!raise )(?<![\w.])(?:[A-Za-z_]\w*\.)*[A-Z]\w+(?:Error|Exception)(?=: )")
"""What is left of a traceback whose line breaks were lost: the exception behind its frames."""

BEGIN = "Traceback (most recent call last)"

_MOST_FRAMES = 80
_MOST_PROCESSES = 256


class _Process:
    """What one process is in the middle of saying."""

    def __init__(self) -> None:
        self.frames: deque[str] = deque(maxlen=_MOST_FRAMES)
        self.in_frame = False


class Tracebacks:
    """Follows the tracebacks of all processes of a log."""

    def __init__(self) -> None:
        self._processes: OrderedDict[str, _Process] = OrderedDict()

    def frames(self, process: str) -> deque[str]:
        """Functions (and telling files) of the process' last traceback, outermost first."""
        return self._of(process).frames

    def message(self, line: LogLine) -> str | None:
        """What of the line is a message; None for a frame, and for the program's own text.

        `raise RepositoryNotFoundError(` is no message.
        """
        of = self._of(line.process)
        if match := _FRAME.match(line.text):
            of.frames.append(match["function"])
            of.frames += [n for part, n in _TELLING_FILES.items() if part in match["file"]]
            of.in_frame = True
            behind = _MESSAGE.search(line.text, match.end())
            return None if behind is None else line.text[behind.start() :]
        if line.text.startswith(BEGIN):
            of.frames.clear()
        of.in_frame = of.in_frame and line.text.startswith("    ")
        source = of.in_frame or line.text.startswith("    raise ")
        return None if source else line.text

    def _of(self, process: str) -> _Process:
        known = self._processes.get(process)
        if known is None:
            known = self._processes[process] = _Process()
            if len(self._processes) > _MOST_PROCESSES:
                self._processes.popitem(last=False)
        else:
            self._processes.move_to_end(process)
        return known
