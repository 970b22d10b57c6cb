"""A load that one process cannot drive, spread over several (`tuner.load.worker`).

Each process drives its share (`tuner.load.shares`) and tells a few times a second what came of
it. Times of all of them are of one clock: `time.perf_counter` is the machine's monotonic clock
on Linux.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tuner.errors import EnvironmentProblem
from tuner.load.health import health
from tuner.load.request import Request
from tuner.load.running import Pace
from tuner.load.shares import shares
from tuner.load.wire import PackedRequests, frame, receive, record_of
from tuner.own_process import own_command, own_environment
from tuner.types import ClientHealth, RequestRecord

START_DELAY_S = 0.25
"""From the word to start to the start: all processes must have heard it."""

_READY_LIMIT_S = 60.0

_PROBLEM_PARTS = 2
"""A message and a hint: a process's last word, in place of what came of its load."""


@dataclass(frozen=True, slots=True)
class Target:
    """Which server, and how long an answer may take."""

    base_url: str
    model: str
    timeout_s: float


@dataclass(slots=True)
class _Worker:
    """A process, and what it told so far."""

    process: asyncio.subprocess.Process
    sent: int = 0
    lags_s: list[float] = field(default_factory=list)
    busy_share: float = 0.0
    reading: asyncio.Task[None] | None = None

    def send(self, message: Any) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(frame(message))

    async def receive(self) -> Any:
        assert self.process.stdout is not None
        try:
            return await receive(self.process.stdout)
        except asyncio.IncompleteReadError:
            raise _ended_early(await self.process.wait()) from None


class SpreadLoad:
    """A load driven by several processes; implements `tuner.load.running.Load`.

    What is seen of it is up to `tuner.load.worker.TELL_S` old. An async context manager:
    entering it takes until the processes are ready, leaving it ends them.

    Raises:
        EnvironmentProblem: on entering and in `ended`: a process ended before its load, or has
            no means to go on with it.
    """

    def __init__(
        self, target: Target, requests: Sequence[Request], pace: Pace, processes: int
    ) -> None:
        self.records: list[RequestRecord] = []
        self._target = target
        self._shares = shares(requests, pace, processes)
        self._count = len(requests)
        self._workers: list[_Worker] = []
        self._stopped = False

    async def __aenter__(self) -> SpreadLoad:
        try:
            for requests, pace in self._shares:
                self._workers.append(await self._spawn(requests, pace))
            async with asyncio.timeout(_READY_LIMIT_S):
                for worker in self._workers:
                    await worker.receive()
        except TimeoutError:
            await self._end()
            raise EnvironmentProblem(
                f"the load generator's processes were not ready within {_READY_LIMIT_S:.0f} s",
                "See what else keeps the machine busy, and run the same command again.",
            ) from None
        except BaseException:
            await self._end()
            raise
        start_s = time.perf_counter() + START_DELAY_S
        for worker in self._workers:
            worker.send(start_s)
            worker.reading = asyncio.create_task(self._read(worker))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._end()

    @property
    def sent(self) -> int:
        """See `tuner.load.running.Load`."""
        return sum(worker.sent for worker in self._workers)

    @property
    def all_sent(self) -> bool:
        """See `tuner.load.running.Load`."""
        return self._stopped or self.sent == self._count

    def stop(self) -> None:
        """See `tuner.load.running.Load`."""
        if not self._stopped:
            self._stopped = True
            for worker in self._workers:
                worker.send("stop")

    async def ended(self, within_s: float) -> bool:
        """See `tuner.load.running.Load`."""
        reading = [worker.reading for worker in self._workers if worker.reading is not None]
        done, pending = await asyncio.wait(
            reading, timeout=within_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in done:
            task.result()
        return not pending

    def health(self) -> ClientHealth:
        """See `tuner.load.running.Load`."""
        lags_s = [lag_s for worker in self._workers for lag_s in worker.lags_s]
        return health(lags_s, [worker.busy_share for worker in self._workers], self.records)

    async def _spawn(self, requests: Sequence[Request], pace: Pace) -> _Worker:
        try:
            process = await asyncio.create_subprocess_exec(
                *own_command("tuner.load.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=own_environment(),
                start_new_session=True,  # Ctrl-C is for this process, which ends the others
            )
        except OSError as problem:
            raise EnvironmentProblem(
                f"no process can be started to drive the load: {problem.strerror}",
                "See what uses up the machine's memory or its processes (`ulimit -u`).",
            ) from problem
        worker = _Worker(process)
        target = (self._target.base_url, self._target.model, self._target.timeout_s)
        due_s = None if pace.due_s is None else tuple(pace.due_s)
        worker.send((target, PackedRequests.pack(requests), pace.concurrency, due_s))
        return worker

    async def _read(self, worker: _Worker) -> None:
        """Take what a process tells, to its end."""
        is_done = False
        while not is_done:
            told = await worker.receive()
            if len(told) == _PROBLEM_PARTS:
                raise EnvironmentProblem(*told)
            worker.sent, rows, lags_s, worker.busy_share, is_done = told
            self.records += [record_of(row) for row in rows]
            worker.lags_s += lags_s

    async def _end(self) -> None:
        reading = [worker.reading for worker in self._workers if worker.reading is not None]
        for task in reading:
            task.cancel()
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()  # it has nothing to tidy up: its sockets go with it
        await asyncio.gather(
            *reading, *(worker.process.wait() for worker in self._workers), return_exceptions=True
        )


def _ended_early(exit_code: int) -> EnvironmentProblem:
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with {exit_code}"
    return EnvironmentProblem(
        f"a process of the load generator {how} before its load had ended",
        "The machine may be out of memory (`dmesg` tells). Run the same command again, or ask "
        "for less load.",
    )
