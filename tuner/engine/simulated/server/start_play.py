"""A start as it passes: lines of the log at their times, and what delays or ends it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from tuner.engine.simulated.log_format import LogEntry
from tuner.engine.simulated.server.faults import Faults
from tuner.engine.simulated.server.kills import kill
from tuner.engine.simulated.server.log_output import GARBAGE, Log
from tuner.types import FailureCause, Stage

_WATCH_S = 0.05
_FOREVER_S = 3600.0

_PASSED = (
    Stage.LAUNCH,
    Stage.LOADING,
    Stage.COMPILING,
    Stage.PROFILING,
    Stage.KV_ALLOCATION,
    Stage.GRAPH_CAPTURE,
    Stage.WARMUP,
    Stage.READY,
    Stage.LOAD,
)
"""The stages in the order of a start."""


class EngineLost(Exception):
    """The engine's process died while the server started.

    Attributes:
        exit_code: of that process; negative for a signal.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class StartPlay:
    """Writes the lines of a start, each when it is due.

    Args:
        begin_s: of the launch, `time.monotonic`.
        speed: seconds of the start's in a second.

    Attributes:
        engine_pid: the engine's process, watched from when it is set.
        lose_worker: lets the engine kill its worker.
    """

    def __init__(self, log: Log, faults: Faults, begin_s: float, speed: float) -> None:
        self.engine_pid: int | None = None
        self.lose_worker: Callable[[], None] = lambda: None
        self._log = log
        self._faults = faults
        self._begin_s = begin_s
        self._speed = speed
        self._late_s = 0.0
        slow = faults.get("slow_start")
        self._slow_after = None if slow is None else slow.stage
        self._slow_s = 0.0 if slow is None else slow.number("seconds")
        self._hang_after = _hang_stage(faults)
        self._kill = faults.kill_in_start()

    def noise(self) -> None:
        """What is printed before anything else, on demand."""
        if self._faults.has("garbage_log"):
            self._log.raw(GARBAGE)
        if (huge := self._faults.get("huge_log")) is not None:
            self._log.noise(huge.number("mib"))

    def until_ready(self, entries: Sequence[LogEntry]) -> list[LogEntry]:
        """Write the lines before the server is ready; those that come then are returned.

        Raises:
            EngineLost: the engine's process has died.
        """
        for at, entry in enumerate(entries):
            if entry.stage is Stage.READY:
                self._pass_to(Stage.READY)
                return list(entries[at:])
            self._pass_to(entry.stage)
            self._wait_until(self._begin_s + entry.after_s / self._speed + self._late_s)
            self._log.text(entry.text)
        return []

    def _pass_to(self, stage: Stage) -> None:
        if self._kill is not None and _is_past(stage, self._kill.stage):
            self._strike(self._kill.name)
        if self._hang_after is not None and _is_past(stage, self._hang_after):
            self._hang()
        if self._slow_after is not None and _is_past(stage, self._slow_after):
            self._slow_after = None
            self._wait_until(time.monotonic() + self._slow_s)
            self._late_s = self._slow_s

    def _strike(self, name: str) -> None:
        """Kill whom the fault names; a worker's death is told by the engine, which ends."""
        if self.engine_pid is not None:
            self._kill = None
            kill(name, self.engine_pid, self.lose_worker)
            self._hang()  # until the engine's end is noticed

    def _hang(self) -> NoReturn:
        while True:
            self._wait_until(time.monotonic() + _FOREVER_S)

    def _wait_until(self, due_s: float) -> None:
        while True:
            if self.engine_pid is not None:
                pid, status = os.waitpid(self.engine_pid, os.WNOHANG)
                if pid:
                    raise EngineLost(os.waitstatus_to_exitcode(status))
            left_s = due_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, _WATCH_S))


def _hang_stage(faults: Faults) -> Stage | None:
    """After which the start stands still, if it does."""
    if (hang := faults.get("hang_start")) is not None:
        return hang.stage
    failing = faults.of_cause(under_load=False)
    return failing.stage if failing and failing.cause is FailureCause.HANG else None


def _is_past(stage: Stage, other: Stage) -> bool:
    return _PASSED.index(stage) > _PASSED.index(other)
