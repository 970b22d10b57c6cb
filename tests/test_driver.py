"""Closed and open loop against a client of known speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tuner.load.client import LoadClient
from tuner.load.driver import drive, warm_up
from tuner.load.workload import Request, Workload
from tuner.types import (
    LengthSpec,
    Progress,
    RequestRecord,
    RequestStatus,
    WorkloadKind,
    WorkloadSpec,
)


class SlowClient:
    """Answers each request after its own time and remembers what was in flight."""

    def __init__(self, seconds: float = 0.0, by_index: dict[int, float] | None = None) -> None:
        self.seconds = seconds
        self.by_index = by_index or {}
        self.started: list[int] = []
        self.sent_s: list[float] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.cancelled = 0

    async def send(self, request: Request) -> RequestRecord:
        self.started.append(request.index)
        send_s = time.perf_counter()
        self.sent_s.append(send_s)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.by_index.get(request.index, self.seconds))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        return RequestRecord(request.index, RequestStatus.OK, send_s, time.perf_counter())


def make_spec(concurrency: int | None = 2, rate: float | None = None) -> WorkloadSpec:
    return WorkloadSpec(
        kind=WorkloadKind.SYNTHETIC,
        path=None,
        input_tokens=LengthSpec(8),
        output_tokens=LengthSpec(4),
        requests=8,
        concurrency=concurrency,
        request_rate_per_s=rate,
        burstiness=1.0,
        warmup_requests=2,
        request_timeout_s=5.0,
        seed=0,
    )


def make_workload(count: int, arrivals_s: tuple[float, ...] | None = None) -> Workload:
    requests = tuple(Request(index, "hello", None, 4, True) for index in range(count))
    return Workload(requests, requests[:2], arrivals_s)


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 10 s")


def ignore(progress: Progress) -> None:
    pass


async def test_drive_closed_loop_keeps_so_many_in_flight_and_the_order() -> None:
    client = SlowClient(by_index={0: 0.1, 1: 0.01, 2: 0.01, 3: 0.05})
    records = await drive(client, make_workload(8), make_spec(concurrency=3), ignore)
    assert client.started == list(range(8))
    assert client.most_in_flight == 3
    assert [record.index for record in records] == list(range(8))


async def test_drive_closed_loop_of_more_clients_than_requests_sends_each_once() -> None:
    client = SlowClient(0.01)
    records = await drive(client, make_workload(3), make_spec(concurrency=64), ignore)
    assert client.started == [0, 1, 2]
    assert len(records) == 3


async def test_drive_open_loop_sends_on_schedule_however_slow_the_server() -> None:
    due_s = (0.0, 0.05, 0.06, 0.2)
    client = SlowClient(1.2)
    began_s = time.perf_counter()
    records = await drive(
        client, make_workload(4, due_s), make_spec(concurrency=None, rate=20), ignore
    )
    assert client.most_in_flight == 4
    assert [record.index for record in records] == [0, 1, 2, 3]
    for sent_s, due in zip(client.sent_s, due_s, strict=True):
        assert -0.001 <= sent_s - began_s - due < 1.0


async def test_drive_open_loop_sends_what_is_overdue_at_once_and_in_order() -> None:
    client = SlowClient(0.0)
    await drive(client, make_workload(50, (0.0,) * 50), make_spec(None, 1000), ignore)
    assert client.started == list(range(50))


async def test_drive_tells_progress_several_times_a_second() -> None:
    seen: list[Progress] = []
    await drive(SlowClient(0.15), make_workload(8), make_spec(concurrency=2), seen.append)
    assert {progress.activity for progress in seen} == {"measuring"}
    assert seen[0].detail == "0/8 requests"
    assert seen[-1].detail == "8/8 requests"
    assert 3 <= len(seen) <= seen[-1].elapsed_s / 0.25 + 3
    assert [progress.elapsed_s for progress in seen] == sorted(p.elapsed_s for p in seen)
    assert seen[-1].elapsed_s >= 0.6


@pytest.mark.parametrize("arrivals_s", [None, (0.0, 0.0, 0.0, 30.0)])
async def test_drive_cancelled_cancels_all_in_flight(arrivals_s: tuple[float, ...] | None) -> None:
    client = SlowClient(60.0)
    task = asyncio.create_task(
        drive(client, make_workload(4, arrivals_s), make_spec(concurrency=3), ignore)
    )
    await eventually(lambda: client.in_flight == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.cancelled == 3
    assert client.in_flight == 0
    assert len(client.started) == 3


async def test_drive_cancelled_closes_the_connections() -> None:
    open_streams = 0

    async def stall(request: web.Request) -> web.StreamResponse:
        nonlocal open_streams
        response = web.StreamResponse()
        await response.prepare(request)
        open_streams += 1
        try:
            while True:
                await asyncio.sleep(0.01)
                await response.write(b": ping\n\n")
        finally:
            open_streams -= 1

    app = web.Application()
    app.router.add_post("/v1/completions", stall)
    async with TestServer(app) as server:
        async with LoadClient(str(server.make_url("")).rstrip("/"), "m", 60.0) as client:
            task = asyncio.create_task(drive(client, make_workload(4), make_spec(4), ignore))
            await eventually(lambda: open_streams == 4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await eventually(lambda: open_streams == 0)


async def test_warm_up_sends_the_warmup_requests_only() -> None:
    client = SlowClient(0.01)
    records = await warm_up(client, make_workload(8), concurrency=4)
    assert client.started == [0, 1]
    assert [record.status for record in records] == [RequestStatus.OK, RequestStatus.OK]


async def test_warm_up_of_no_requests_returns() -> None:
    assert await warm_up(SlowClient(), Workload((), (), None), concurrency=4) == []
