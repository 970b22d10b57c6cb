"""A server that can always be ended, with everything it has started.

Each server has a supervisor (`tuner.engine.supervisor`), which lives on if the tuner is
killed, and that has a guardian (`tuner.engine.guardian`). What even they leave behind, when all
are killed at once, `reap` ends on the next run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from tuner.engine.reap import (
    KILL_LIMIT_S,
    SUPERVISOR_LIMIT_S,
    cannot_end,
    descendants,
    reap,
    resume,
    session,
)
from tuner.engine.spawn import SPAWN_LIMIT_S, Started, bury, kill_supervisor, start
from tuner.engine.supervisor import SETTLE_S, Report
from tuner.errors import EnvironmentProblem
from tuner.metrics.device import host_memory_gib

__all__ = ["SupervisedProcess", "free_port", "reap"]

T = TypeVar("T")

_MARGIN_S = 10.0
"""What a busy machine may add to the supervisor's own time limits."""


class SupervisedProcess:
    """A running server command with its supervisor; made by `spawn`.

    If the tuner dies, however that comes, the server is ended as by `stop`.
    """

    def __init__(self, started: Started, grace_s: float) -> None:
        self.record = started.record
        self._started = started
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._survivors: list[str] | None = None
        self._problem: EnvironmentProblem | None = None
        for report in started.early:
            self._take(report)
        os.set_blocking(self._started.lines.fd, False)
        self._loop.add_reader(self._started.lines.fd, self._on_reports)

    @classmethod
    async def spawn(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        log_path: Path,
        grace_s: float = 5.0,
    ) -> SupervisedProcess:
        """Start `argv` in its own session, with a supervisor and a private TMPDIR.

        Args:
            env: the command's whole environment; TMPDIR is set on top of it.
            cwd: its working folder, None for the tuner's.
            log_path: gets its output, appended; created readable by the user alone.
            grace_s: from TERM to KILL in `stop`.

        Raises:
            EnvironmentProblem: the command cannot be executed, or the log not be written.
        """
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(None, start, list(argv), dict(env), cwd, log_path, grace_s)
        limit_s = SPAWN_LIMIT_S + SUPERVISOR_LIMIT_S + _MARGIN_S
        cancelled = await _outlast(starting, limit_s)
        if cancelled and starting.done() and starting.exception() is not None:
            raise asyncio.CancelledError
        process = cls(await starting, grace_s)
        if cancelled:
            await process.stop()
            raise asyncio.CancelledError
        return process

    @property
    def exit_code(self) -> int | None:
        """Of the command: minus the signal that ended it, None while it runs.

        If its supervisor was killed, the command is killed too and this is -9.
        """
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """Return the exit code as soon as the command has ended; its children may live on."""
        return await asyncio.shield(self._exited)

    async def stop(self) -> None:
        """End the command and every process that comes from it; safe to call more than once.

        TERM to the group, `grace_s`, KILL to all; shared memory and the private TMPDIR are
        removed. A cancellation is held back until this is done, which is bounded.

        Raises:
            EnvironmentProblem: a process, which it names, outlives KILL.
        """
        self._started.control.close()  # the end of its stdin is the supervisor's signal
        if not self._done.done():
            resume(self.record.pid)  # harmless if it just ended and another got its id
        limit_s = self._grace_s + SETTLE_S + KILL_LIMIT_S + _MARGIN_S
        cancelled = await _outlast(self._done, limit_s)
        if not self._done.done():
            kill_supervisor(self._started)
            limit_s = SUPERVISOR_LIMIT_S + KILL_LIMIT_S + _MARGIN_S
            cancelled = await _outlast(self._done, limit_s) or cancelled
        if cancelled:
            raise asyncio.CancelledError
        if not self._done.done():
            raise cannot_end([f"{self.record.pid} (supervisor)"])
        if self._problem is not None:
            raise self._problem

    def descendants(self) -> list[psutil.Process]:
        """The server's living processes; takes some milliseconds."""
        if self._done.done():
            return []
        guardian = self.record.pid  # its session is the supervisor's, and nobody else's
        return [found for found in descendants(guardian) if session(found.pid) != guardian]

    def host_memory_gib(self) -> float | None:
        """See `tuner.metrics.device.host_memory_gib`, of all its processes."""
        return host_memory_gib(self.descendants())

    def _on_reports(self) -> None:
        try:
            reports = self._started.lines.read()
        except BlockingIOError:
            return
        if reports is None:  # the supervisor has ended, well or not
            self._loop.remove_reader(self._started.lines.fd)
            burial = self._loop.run_in_executor(None, bury, self._started, self._survivors)
            burial.add_done_callback(self._on_buried)
            return
        for report in reports:
            self._take(report)

    def _take(self, report: Report) -> None:
        if report["event"] == "exited" and not self._exited.done():
            self._exited.set_result(report["code"])
        elif report["event"] == "gone":
            self._survivors = report["survivors"]

    def _on_buried(self, burial: asyncio.Future[EnvironmentProblem | None]) -> None:
        if not self._exited.done():
            self._exited.set_result(-signal.SIGKILL)
        self._done.set_result(None)
        self._problem = burial.result()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on now; another program may still take it."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


async def _outlast(future: asyncio.Future[T], limit_s: float) -> bool:
    """Wait for `future` for up to `limit_s`, also when cancelled; tells whether that happened."""
    deadline = time.monotonic() + limit_s
    cancelled = False
    while not future.done() and time.monotonic() < deadline:
        try:
            await asyncio.wait([future], timeout=deadline - time.monotonic())
        except asyncio.CancelledError:
            cancelled = True
    return cancelled
