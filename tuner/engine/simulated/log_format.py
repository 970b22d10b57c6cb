"""Lines of a log with vLLM's prefixes: process, level, date, file."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import IntEnum

from tuner.types import Stage


@dataclass(frozen=True, slots=True)
class Pids:
    """Process ids for the log's prefixes.

    Attributes:
        engine: also of the worker where one process is both (a single GPU).
    """

    api: int = 100
    engine: int = 200
    worker: int = 300


class Point(IntEnum):
    """How far a start has come, finer than `Stage`, in the order of a start."""

    FLAGS = 0
    ENGINE = 1
    LOADING = 2
    LOADED = 3
    COMPILING = 4
    COMPILED = 5
    SIZED = 6
    ALLOCATED = 7
    CAPTURING = 8
    CAPTURED = 9
    WARMED_UP = 10
    READY = 11


STAGE_OF = {
    Point.FLAGS: Stage.LAUNCH,
    Point.ENGINE: Stage.LAUNCH,
    Point.LOADING: Stage.LOADING,
    Point.LOADED: Stage.PROFILING,
    Point.COMPILING: Stage.COMPILING,
    Point.COMPILED: Stage.PROFILING,
    Point.SIZED: Stage.KV_ALLOCATION,
    Point.ALLOCATED: Stage.KV_ALLOCATION,
    Point.CAPTURING: Stage.GRAPH_CAPTURE,
    Point.CAPTURED: Stage.WARMUP,
    Point.WARMED_UP: Stage.WARMUP,
    Point.READY: Stage.READY,
}


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A line of the log and when it is written.

    Attributes:
        stage: how far the server is once it has written this.
        after_s: seconds since the launch, never falling.
        text: one line without its end.
    """

    stage: Stage
    after_s: float
    text: str


class LogWriter:
    """Collects lines in the order in which they are written.

    Args:
        begun: when the server was launched, for the dates of its lines.

    Attributes:
        entries: so far, with the point each belongs to.
    """

    def __init__(self, pids: Pids, begun: datetime, worker_tag: str) -> None:
        self.entries: list[tuple[Point, LogEntry]] = []
        self._begun = begun
        self._tags = {
            "api": f"(APIServer pid={pids.api})",
            "engine": f"(EngineCore pid={pids.engine})",
            "worker": worker_tag,
        }
        self._point = Point.FLAGS
        self._after_s = 0.0

    def at(self, point: Point, after_s: float) -> None:
        """What follows is written at that point, not before `after_s`."""
        self._point = point
        self._after_s = max(self._after_s, after_s)

    def cut(self, last: Point) -> None:
        """Forget what comes after a point, and go on from there."""
        self.entries = [(point, entry) for point, entry in self.entries if point <= last]
        self._point = last
        self._after_s = self.entries[-1][1].after_s if self.entries else 0.0

    def say(self, who: str, where: str, text: str, *, level: str = "INFO") -> None:
        """A message of vLLM's logger, which repeats its prefix on each line.

        Args:
            who: "api", "engine" or "worker".
            where: file and line, such as `core.py:133`.
        """
        date = (self._begun + timedelta(seconds=self._after_s)).strftime("%m-%d %H:%M:%S")
        for line in text.split("\n"):
            self.plain(f"{self._tags[who]} {level} {date} [{where}] {line}")

    def plain(self, text: str) -> None:
        """Lines that something prints past the logger."""
        for line in text.split("\n"):
            entry = LogEntry(STAGE_OF[self._point], self._after_s, line)
            self.entries.append((self._point, entry))
