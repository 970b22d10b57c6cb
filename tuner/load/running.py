"""A load on its way: requests are sent while others look at what came of them so far.

Closed loop: so many requests in flight, the next one sent when one is answered; they start in
the workload's order. Open loop: requests are sent when they are due, however the server fares,
so that a slow server meets a growing queue as it would in production; how late the client was
is in each record (`RequestRecord.intended_s`). In both, a turn of a conversation waits for the
answer before it.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

from tuner.errors import EnvironmentProblem
from tuner.load.health import LoopWatch, health
from tuner.load.request import Request
from tuner.types import ClientHealth, RequestRecord


class Sender(Protocol):
    """Who sends a request; `tuner.load.client.LoadClient` does."""

    async def send(self, request: Request) -> RequestRecord:
        """Send one request and follow it to its end, whatever that is."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How requests are sent: exactly one of the two is set.

    Attributes:
        concurrency: closed loop: requests in flight.
        due_s: open loop: when each request is due, seconds after the start, rising.
    """

    concurrency: int | None = None
    due_s: Sequence[float] | None = None


class Load(Protocol):
    """What can be seen of a load, and done to it; the process or processes that drive it."""

    @property
    def records(self) -> Sequence[RequestRecord]:
        """Of the requests that are known to have ended, in the order of becoming known."""

    @property
    def sent(self) -> int:
        """Requests sent so far; those of them that have no record are in flight."""

    @property
    def all_sent(self) -> bool:
        """Whether no more will be sent."""

    def stop(self) -> None:
        """Send no more; those in flight go on."""

    async def ended(self, within_s: float) -> bool:
        """Wait so long at most for the last answer; whether none is in flight any more."""

    def health(self) -> ClientHealth:
        """Whether the client kept up so far."""


class RunningLoad:
    """A load driven by this process; implements `Load`.

    An async context manager: leaving it cancels what is still in flight.

    Attributes:
        start_s: when the load begins, on `time.perf_counter`; None, the default, is at once.
            To be set before it is entered.

    Raises:
        ValueError: a schedule has not one time for each request.
    """

    def __init__(self, sender: Sender, requests: Sequence[Request], pace: Pace) -> None:
        if pace.due_s is not None and len(pace.due_s) != len(requests):
            raise ValueError(f"{len(requests)} requests, {len(pace.due_s)} times to send them")
        self.records: list[RequestRecord] = []
        self.sent = 0
        self.start_s: float | None = None
        self._sender = sender
        self._requests = requests
        self._pace = pace
        self._stopped = asyncio.Event()
        self._after = [request.after for request in requests]
        self._unanswered = {request.index for request in requests}.intersection(
            after for after in self._after if after is not None
        )
        self._waiting: defaultdict[int, list[tuple[int, float | None]]] = defaultdict(list)
        self._ready: list[int] = []

    async def __aenter__(self) -> RunningLoad:
        self._watch = LoopWatch()
        self._tasks = asyncio.TaskGroup()
        self._driving = asyncio.create_task(self._drive())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watch.stop()
        self._driving.cancel()
        await asyncio.gather(self._driving, return_exceptions=True)

    @property
    def all_sent(self) -> bool:
        """See `Load`."""
        return self._stopped.is_set() or self.sent == len(self._requests)

    def stop(self) -> None:
        """See `Load`."""
        self._stopped.set()

    async def ended(self, within_s: float) -> bool:
        """See `Load`.

        Raises:
            EnvironmentProblem: the sender has no means to go on (`tuner.load.pool`).
            BaseExceptionGroup: of what else went wrong within the client itself.
        """
        done, _ = await asyncio.wait({self._driving}, timeout=within_s)
        if done:
            try:
                await self._driving
            except BaseExceptionGroup as group:
                raise _expected(group) or group from None
        return bool(done)

    def health(self) -> ClientHealth:
        """See `Load`."""
        return health(self._watch.lags_s, [self._watch.busy_share], self.records)

    @property
    def watch(self) -> LoopWatch:
        """What `health` rests on, for those who put several loads together."""
        return self._watch

    async def _drive(self) -> None:
        start_s = time.perf_counter() if self.start_s is None else self.start_s
        try:
            await self._pause(start_s - time.perf_counter())
            async with self._tasks:
                if self._pace.due_s is not None:
                    await self._open_loop(self._pace.due_s, start_s)
                else:
                    self._closed_loop()
        finally:
            self._watch.stop()

    def _closed_loop(self) -> None:
        for place in range(len(self._requests)):
            if not self._waits(place, None):
                self._ready.append(place)  # rising, so a heap
        self._fill()

    async def _open_loop(self, due_s: Sequence[float], start_s: float) -> None:
        for place, offset_s in enumerate(due_s):
            intended_s = start_s + offset_s
            # Also where it is overdue: the pause lets the requests before it leave.
            await self._pause(intended_s - time.perf_counter())
            if self._stopped.is_set():
                return
            if not self._waits(place, intended_s):
                self._launch(place, intended_s)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not past `stop`."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            pass

    def _waits(self, place: int, intended_s: float | None) -> bool:
        """Put a request aside whose turn before is not answered; whether it was."""
        after = self._after[place]
        if after is None or after not in self._unanswered:
            return False
        self._waiting[after].append((place, intended_s))
        return True

    def _fill(self) -> None:
        """Closed loop: send as many as there may be."""
        concurrency = self._pace.concurrency or 1
        while self._ready and self.sent - len(self.records) < concurrency:
            if self._stopped.is_set():
                return
            self._launch(heapq.heappop(self._ready), None)

    def _launch(self, place: int, intended_s: float | None) -> None:
        self.sent += 1
        self._tasks.create_task(self._follow(self._requests[place], intended_s))

    async def _follow(self, request: Request, intended_s: float | None) -> None:
        record = await self._sender.send(request)
        if intended_s is not None:
            record = replace(record, intended_s=intended_s)
        self.records.append(record)
        self._unanswered.discard(request.index)
        for place, due_s in self._waiting.pop(request.index, ()):
            if due_s is None:
                heapq.heappush(self._ready, place)
            elif not self._stopped.is_set():
                # A turn is due no sooner than the answer that it follows.
                self._launch(place, max(due_s, record.end_s))
        if self._pace.due_s is None:
            self._fill()


def _expected(group: BaseExceptionGroup[BaseException]) -> EnvironmentProblem | None:
    """The first problem of this machine in a group of nothing else."""
    found, rest = group.split(EnvironmentProblem)
    if found is None or rest is not None:
        return None
    problem: BaseException = found
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return problem if isinstance(problem, EnvironmentProblem) else None
