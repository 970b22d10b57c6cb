"""Closed and open loop against a server of known speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tuner.errors import EnvironmentProblem
from tuner.load.client import LoadClient
from tuner.load.request import Request
from tuner.load.running import Pace, RunningLoad
from tuner.types import RequestRecord, RequestStatus

LIMIT_S = 20.0


class SlowServer:
    """Answers each request after its own time and remembers what was in flight."""

    def __init__(self, seconds: float = 0.0, by_index: dict[int, float] | None = None) -> None:
        self.seconds = seconds
        self.by_index = by_index or {}
        self.started: list[int] = []
        self.sent_s: dict[int, float] = {}
        self.in_flight = 0
        self.most_in_flight = 0
        self.cancelled = 0

    async def send(self, request: Request) -> RequestRecord:
        self.started.append(request.index)
        send_s = self.sent_s[request.index] = time.perf_counter()
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


def requests(count: int, after: dict[int, int] | None = None) -> list[Request]:
    after = after or {}
    return [Request(i, "hello", None, 4, True, after=after.get(i)) for i in range(count)]


async def records_of(load: RunningLoad) -> list[RequestRecord]:
    async with load:
        assert await load.ended(LIMIT_S)
        return load.records


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 10 s")


# --- closed loop -------------------------------------------------------------------------


async def test_closed_loop_keeps_so_many_in_flight_and_the_order() -> None:
    server = SlowServer(by_index={0: 0.1, 1: 0.01, 2: 0.01, 3: 0.05})
    records = await records_of(RunningLoad(server, requests(8), Pace(concurrency=3)))
    assert server.started == list(range(8))
    assert server.most_in_flight == 3
    assert sorted(record.index for record in records) == list(range(8))
    assert {record.intended_s for record in records} == {None}


async def test_closed_loop_records_come_in_the_order_of_their_ends() -> None:
    server = SlowServer(by_index={0: 0.3, 1: 0.0})
    records = await records_of(RunningLoad(server, requests(2), Pace(concurrency=2)))
    assert [record.index for record in records] == [1, 0]


async def test_closed_loop_of_more_clients_than_requests_sends_each_once() -> None:
    server = SlowServer(0.01)
    records = await records_of(RunningLoad(server, requests(3), Pace(concurrency=64)))
    assert server.started == [0, 1, 2]
    assert len(records) == 3


async def test_closed_loop_fills_the_wait_for_an_answer_with_other_conversations() -> None:
    server = SlowServer(0.02)
    turns = requests(5, after={1: 0, 2: 1})
    records = await records_of(RunningLoad(server, turns, Pace(concurrency=2)))
    assert server.started == [0, 3, 1, 4, 2]
    ends_s = {record.index: record.end_s for record in records}
    assert server.sent_s[1] >= ends_s[0]
    assert server.sent_s[2] >= ends_s[1]


async def test_closed_loop_stopped_sends_no_more_and_lets_the_rest_end() -> None:
    server = SlowServer(0.2)
    async with RunningLoad(server, requests(50), Pace(concurrency=3)) as load:
        await eventually(lambda: server.in_flight == 3)
        assert not load.all_sent
        load.stop()
        assert load.all_sent
        assert load.sent - len(load.records) == 3
        assert await load.ended(LIMIT_S)
        assert [record.status for record in load.records] == [RequestStatus.OK] * 3
    assert len(server.started) == load.sent == 3


# --- open loop ---------------------------------------------------------------------------


async def test_open_loop_sends_on_schedule_however_slow_the_server() -> None:
    due_s = (0.0, 0.05, 0.06, 0.2)
    server = SlowServer(0.8)
    began_s = time.perf_counter()
    records = await records_of(RunningLoad(server, requests(4), Pace(due_s=due_s)))
    assert server.most_in_flight == 4
    assert server.started == [0, 1, 2, 3]
    by_index = sorted(records, key=lambda record: record.index)
    first_s = by_index[0].intended_s
    assert first_s is not None
    assert 0 <= first_s - began_s < 1.0
    assert [r.intended_s for r in by_index] == pytest.approx([first_s + s for s in due_s])
    for record in by_index:
        assert record.intended_s is not None
        assert -1e-3 <= record.send_s - record.intended_s < 1.0


async def test_open_loop_sends_what_is_overdue_at_once_and_in_order() -> None:
    server = SlowServer()
    await records_of(RunningLoad(server, requests(50), Pace(due_s=(0.0,) * 50)))
    assert server.started == list(range(50))


async def test_open_loop_of_a_late_client_keeps_the_intended_times() -> None:
    class Blocking(SlowServer):
        async def send(self, request: Request) -> RequestRecord:
            if request.index == 0:
                time.sleep(0.3)  # noqa: ASYNC251 (the client is to be late)
            return await super().send(request)

    load = RunningLoad(Blocking(), requests(2), Pace(due_s=(0.0, 0.05)))
    first, second = await records_of(load)
    assert first.intended_s is not None
    assert second.intended_s == pytest.approx(first.intended_s + 0.05)
    assert second.send_s - (second.intended_s or 0) >= 0.2
    assert load.health().lateness_p99_s >= 0.2


async def test_open_loop_turn_is_due_no_sooner_than_the_answer_before_it() -> None:
    server = SlowServer(by_index={0: 0.2})
    turns = requests(3, after={1: 0})
    records = await records_of(RunningLoad(server, turns, Pace(due_s=(0.0, 0.05, 0.06))))
    assert server.started == [0, 2, 1]
    ended = {record.index: record for record in records}
    assert ended[1].intended_s == ended[0].end_s
    assert server.sent_s[1] >= ended[0].end_s


async def test_open_loop_turn_that_is_due_after_the_answer_keeps_its_time() -> None:
    turns = requests(2, after={1: 0})
    load = RunningLoad(SlowServer(), turns, Pace(due_s=(0.0, 0.3)))
    first, second = await records_of(load)
    assert first.intended_s is not None
    assert second.intended_s == pytest.approx(first.intended_s + 0.3)


async def test_open_loop_stopped_waits_for_no_schedule_and_drops_turns_that_wait() -> None:
    server = SlowServer(0.3)
    turns = requests(3, after={1: 0})
    async with RunningLoad(server, turns, Pace(due_s=(0.0, 0.0, 3000.0))) as load:
        await eventually(lambda: server.in_flight == 1)
        load.stop()
        assert await load.ended(LIMIT_S)
    assert server.started == [0]
    assert load.sent == len(load.records) == 1


def test_running_load_refuses_a_schedule_of_another_length() -> None:
    with pytest.raises(ValueError, match="3 requests, 2 times"):
        RunningLoad(SlowServer(), requests(3), Pace(due_s=(0.0, 1.0)))


# --- both --------------------------------------------------------------------------------

BOTH = [Pace(concurrency=3), Pace(due_s=(0.0, 0.0, 0.0, 3000.0))]


@pytest.mark.parametrize("pace", BOTH)
async def test_running_load_begins_when_it_is_told_to(pace: Pace) -> None:
    server = SlowServer(60.0)
    load = RunningLoad(server, requests(4), pace)
    start_s = load.start_s = time.perf_counter() + 0.3
    async with load:
        await eventually(lambda: server.in_flight == 3)
    assert min(server.sent_s.values()) >= start_s - 1e-3


@pytest.mark.parametrize("pace", BOTH)
async def test_running_load_stopped_before_it_begins_sends_nothing(pace: Pace) -> None:
    server = SlowServer()
    load = RunningLoad(server, requests(4), pace)
    load.start_s = time.perf_counter() + 3000
    async with load:
        load.stop()
        assert await load.ended(LIMIT_S)
    assert server.started == []


@pytest.mark.parametrize("pace", BOTH)
async def test_running_load_left_cancels_all_in_flight(pace: Pace) -> None:
    server = SlowServer(60.0)
    async with RunningLoad(server, requests(4), pace) as load:
        await eventually(lambda: server.in_flight == 3)
        assert not await load.ended(0.01)
        assert load.sent - len(load.records) == 3
    assert server.cancelled == 3
    assert server.in_flight == 0
    assert len(server.started) == 3


@pytest.mark.parametrize("pace", [Pace(concurrency=4), Pace(due_s=())])
async def test_running_load_of_no_requests_has_ended(pace: Pace) -> None:
    async with RunningLoad(SlowServer(), [], pace) as load:
        assert await load.ended(LIMIT_S)
        assert load.all_sent
        assert load.health().lateness_p99_s == 0


@pytest.mark.parametrize("pace", [Pace(concurrency=2), Pace(due_s=(0.0, 0.0))])
async def test_running_load_sends_turns_of_which_the_one_before_is_not_in_it(pace: Pace) -> None:
    server = SlowServer()
    await records_of(RunningLoad(server, requests(2, after={1: 77}), pace))
    assert sorted(server.started) == [0, 1]


@pytest.mark.parametrize("pace", [Pace(concurrency=2), Pace(due_s=(0.0, 0.0))])
async def test_running_load_raises_what_goes_wrong_in_the_client(pace: Pace) -> None:
    class Broken(SlowServer):
        async def send(self, request: Request) -> RequestRecord:
            raise KeyError(request.index)

    with pytest.raises(ExceptionGroup) as raised:
        await records_of(RunningLoad(Broken(), requests(2), pace))
    assert raised.group_contains(KeyError)


@pytest.mark.parametrize("pace", [Pace(concurrency=2), Pace(due_s=(0.0, 0.0))])
async def test_running_load_raises_what_the_machine_lacks_as_it_is(pace: Pace) -> None:
    class Lacking(SlowServer):
        async def send(self, request: Request) -> RequestRecord:
            raise EnvironmentProblem("no more files")

    with pytest.raises(EnvironmentProblem, match="no more files"):
        await records_of(RunningLoad(Lacking(), requests(2), pace))


async def test_running_load_left_closes_the_connections() -> None:
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
    async with (
        TestServer(app) as server,
        LoadClient(str(server.make_url("")).rstrip("/"), "m", 60.0) as client,
    ):
        async with RunningLoad(client, requests(4), Pace(concurrency=4)):
            await eventually(lambda: open_streams == 4)
        await eventually(lambda: open_streams == 0)
