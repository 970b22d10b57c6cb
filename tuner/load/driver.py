"""Sends a workload: so many requests at a time, or each when it is due.

Closed loop: `concurrency` clients, each sending its next request when its last is answered;
requests start in the workload's order. Open loop: requests are sent on schedule however the
server fares, so that a slow server meets a growing queue as it would in production.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Protocol

from tuner.load.workload import Request, Workload
from tuner.types import Progress, ProgressSink, RequestRecord, WorkloadSpec

PROGRESS_INTERVAL_S = 0.25


class Sender(Protocol):
    """Who sends a request; `tuner.load.client.LoadClient` does."""

    async def send(self, request: Request) -> RequestRecord:
        """Send one request and follow it to its end, whatever that is."""


async def drive(
    client: Sender, workload: Workload, spec: WorkloadSpec, on_progress: ProgressSink
) -> list[RequestRecord]:
    """Send the measured requests and wait for the last answer.

    When cancelled, all requests in flight are cancelled and their connections closed.

    Returns:
        A record for each request, in the workload's order.
    """
    tally = _Tally("measuring", len(workload.requests), on_progress)
    if workload.arrivals_s is not None:
        load = _open_loop(client, workload.requests, workload.arrivals_s, tally)
    else:
        load = _closed_loop(client, workload.requests, spec.concurrency or 1, tally)
    return await _run(load, tally)


async def warm_up(
    client: Sender,
    workload: Workload,
    concurrency: int,
    on_progress: ProgressSink = lambda _: None,
) -> list[RequestRecord]:
    """Send the warm-up requests in a closed loop and wait for the last answer."""
    tally = _Tally("warming up", len(workload.warmup), on_progress)
    return await _run(_closed_loop(client, workload.warmup, concurrency, tally), tally)


class _Tally:
    """Collects records and tells how far the load is."""

    def __init__(self, activity: str, expected: int, on_progress: ProgressSink) -> None:
        self.records: list[RequestRecord] = []
        self._activity = activity
        self._expected = expected
        self._on_progress = on_progress
        self._start_s = time.perf_counter()

    def report(self) -> None:
        self._on_progress(
            Progress(
                activity=self._activity,
                elapsed_s=time.perf_counter() - self._start_s,
                detail=f"{len(self.records)}/{self._expected} requests",
            )
        )

    async def report_regularly(self) -> None:
        while True:
            self.report()
            await asyncio.sleep(PROGRESS_INTERVAL_S)


async def _run(load: Awaitable[None], tally: _Tally) -> list[RequestRecord]:
    async with asyncio.TaskGroup() as group:
        ticker = group.create_task(tally.report_regularly())
        await load
        ticker.cancel()
    tally.report()
    return sorted(tally.records, key=lambda record: record.index)


async def _closed_loop(
    client: Sender, requests: Sequence[Request], concurrency: int, tally: _Tally
) -> None:
    queue = iter(requests)

    async def work() -> None:
        for request in queue:
            tally.records.append(await client.send(request))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work())


async def _open_loop(
    client: Sender, requests: Sequence[Request], arrivals_s: Sequence[float], tally: _Tally
) -> None:
    async def send(request: Request) -> None:
        tally.records.append(await client.send(request))

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for request, due_s in zip(requests, arrivals_s, strict=True):
            # Also where it is overdue: the sleep lets the requests before it leave.
            await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
            group.create_task(send(request))
