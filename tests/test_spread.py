"""One load over several processes is the same load, and leaves none of them behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tuner.errors import EnvironmentProblem
from tuner.load.request import Request
from tuner.load.running import Pace
from tuner.load.shares import shares
from tuner.load.spread import SpreadLoad, Target
from tuner.load.wire import PackedRequests, record_of, row_of
from tuner.types import RequestRecord, RequestStatus

LIMIT_S = 20.0
TOKENS = 3


def requests(count: int, after: dict[int, int] | None = None) -> list[Request]:
    after = after or {}
    return [Request(i, (1, i), 2, TOKENS, True, after=after.get(i)) for i in range(count)]


# --- shares ------------------------------------------------------------------------------


def test_shares_give_each_request_to_one_process_in_order() -> None:
    parts = shares(requests(10), Pace(concurrency=7), 3)
    indices = [[request.index for request in part] for part, _ in parts]
    assert indices == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert [pace.concurrency for _, pace in parts] == [3, 2, 2]


def test_shares_keep_conversations_together() -> None:
    turns = requests(8, after={2: 0, 3: 1, 6: 2, 7: 3})
    parts = shares(turns, Pace(concurrency=4), 2)
    assert [[r.index for r in part] for part, _ in parts] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_shares_of_a_schedule_keep_each_requests_time() -> None:
    parts = shares(requests(5), Pace(due_s=(0.0, 0.1, 0.2, 0.3, 0.4)), 2)
    assert [pace for _, pace in parts] == [Pace(due_s=[0.0, 0.2, 0.4]), Pace(due_s=[0.1, 0.3])]


@pytest.mark.parametrize(
    ("count", "pace", "processes"),
    [(2, Pace(concurrency=8), 2), (8, Pace(concurrency=3), 3), (0, Pace(concurrency=3), 1)],
)
def test_shares_are_no_more_than_there_is_work_for(count: int, pace: Pace, processes: int) -> None:
    assert len(shares(requests(count), pace, 64)) == processes


# --- what the processes tell each other --------------------------------------------------


@pytest.mark.parametrize("status", RequestStatus)
def test_records_cross_the_wire(status: RequestStatus) -> None:
    record = RequestRecord(7, status, 1.5, 2.5, 3, 4, (1.75, 2.25), "why", (1, 3), 1.25)
    assert record_of(row_of(record)) == record
    least = RequestRecord(7, status, 1.5, 2.5)
    assert record_of(row_of(least)) == least


def test_requests_cross_the_wire() -> None:
    sent = [Request(0, "text é", None, 5, False), Request(1, (7, 150_000), 2, 5, True, after=0)]
    packed = PackedRequests(PackedRequests.pack(sent))
    assert len(packed) == 2
    assert list(packed) == sent
    assert list(packed[1:]) == sent[1:]


# --- the load ----------------------------------------------------------------------------


class Server:
    """Streams `TOKENS` tokens, `step_s` apart."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.prompts: list[tuple[int, ...]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.prompts.append(tuple((await request.json())["prompt"]))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(TOKENS):
                await asyncio.sleep(self.step_s)
                choice = {"index": 0, "text": " a", "finish_reason": None}
                await response.write(event({"choices": [choice]}))
            usage = {"prompt_tokens": 2, "completion_tokens": TOKENS, "total_tokens": 2 + TOKENS}
            await response.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
            return response
        finally:
            self.in_flight -= 1


def event(message: object) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


@asynccontextmanager
async def serving(step_s: float = 0.005) -> AsyncIterator[Server]:
    served = Server(step_s)
    app = web.Application()
    app.router.add_post("/v1/completions", served.answer)
    async with TestServer(app) as server:
        served.url = str(server.make_url("")).rstrip("/")
        yield served


def spread(server: Server, count: int, pace: Pace, processes: int = 2) -> SpreadLoad:
    return SpreadLoad(Target(server.url, "m", 30.0), requests(count), pace, processes)


def workers() -> list[psutil.Process]:
    return workers_of(psutil.Process())


def workers_of(parent: psutil.Process) -> list[psutil.Process]:
    return [child for child in parent.children() if "tuner.load.worker" in child.cmdline()]


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 20 s")


async def test_spread_closed_loop_sends_each_request_once_and_tells_all() -> None:
    async with serving() as server, spread(server, 40, Pace(concurrency=6)) as load:
        entered_s = time.perf_counter()
        assert len(workers()) == 2
        # In a session of their own no Ctrl-C of the terminal reaches them.
        assert os.getsid(0) not in {os.getsid(worker.pid) for worker in workers()}
        assert await load.ended(LIMIT_S)
        assert load.all_sent
        assert load.sent == 40
        client = load.health()
    assert Counter(server.prompts) == Counter((1, index) for index in range(40))
    assert server.most_in_flight <= 6
    assert sorted(record.index for record in load.records) == list(range(40))
    assert {record.status for record in load.records} == {RequestStatus.OK}
    for record in load.records:
        assert len(record.token_times_s) == record.output_tokens == TOKENS
        assert entered_s < record.send_s < record.token_times_s[0] <= record.end_s
        assert record.end_s < time.perf_counter()
    assert client.processes == 2
    assert 0 < client.cpu_share <= 1
    assert workers() == []


async def test_spread_open_loop_keeps_one_schedule() -> None:
    due_s = [0.02 * place for place in range(30)]
    async with serving() as server, spread(server, 30, Pace(due_s=due_s)) as load:
        assert await load.ended(LIMIT_S)
    by_index = sorted(load.records, key=lambda record: record.index)
    first_s = by_index[0].intended_s
    assert first_s is not None
    assert [r.intended_s for r in by_index] == pytest.approx([first_s + s for s in due_s])
    for record in by_index:
        assert record.intended_s is not None
        assert -1e-3 <= record.send_s - record.intended_s < 2.0


async def test_spread_stopped_lets_what_is_in_flight_end() -> None:
    async with serving(0.05) as server, spread(server, 500, Pace(concurrency=4)) as load:
        await eventually(lambda: len(load.records) >= 4)
        assert not load.all_sent
        load.stop()
        assert load.all_sent
        assert await load.ended(LIMIT_S)
        assert 4 <= len(load.records) == load.sent < 100
    assert {record.status for record in load.records} == {RequestStatus.OK}


async def test_spread_cut_off_has_figures_and_leaves_no_process() -> None:
    async with serving(0.05) as server, spread(server, 500, Pace(concurrency=4)) as load:
        await eventually(lambda: len(load.records) >= 8)
        load.stop()
        client = load.health()
    assert workers() == []
    assert 0 < load.sent - len(load.records) <= 4
    assert 0 < client.cpu_share <= 1
    assert 0 < client.loop_lag_p99_s < 2


async def test_spread_keeps_what_is_printed_out_of_what_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import asyncio\nrun = asyncio.run\n"
        "def noisy(main):\n    print('noise', flush=True)\n    return run(main)\n"
        "asyncio.run = noisy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    async with serving() as server, spread(server, 6, Pace(concurrency=2)) as load:
        assert await load.ended(LIMIT_S)
    assert len(load.records) == 6


# --- processes that end ------------------------------------------------------------------


async def test_spread_tells_at_once_that_a_process_was_killed() -> None:
    async with serving(60.0) as server, spread(server, 8, Pace(concurrency=4)) as load:
        await eventually(lambda: server.in_flight == 4)
        killed_s = time.monotonic()
        os.kill(workers()[0].pid, signal.SIGKILL)
        with pytest.raises(EnvironmentProblem, match="was killed by signal 9"):
            await load.ended(60.0)
        assert time.monotonic() - killed_s < 10
    assert workers() == []


async def test_spread_tells_that_a_process_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with serving() as server:
        with pytest.raises(EnvironmentProblem, match="ended with 7"):
            async with spread(server, 8, Pace(concurrency=4)):
                pass
    assert workers() == []


async def test_spread_tells_what_a_process_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    async with serving(60.0) as server, spread(server, 80, Pace(concurrency=80)) as load:
        with pytest.raises(EnvironmentProblem, match="no further connection") as raised:
            await load.ended(LIMIT_S)
    assert "ulimit -n" in raised.value.hint
    assert workers() == []


async def test_spread_cancelled_leaves_no_process() -> None:
    async def run(server: Server) -> None:
        async with spread(server, 8, Pace(concurrency=4)) as load:
            await load.ended(60.0)

    async with serving(60.0) as server:
        running = asyncio.create_task(run(server))
        await eventually(lambda: server.in_flight == 4)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert workers() == []
        await eventually(lambda: server.in_flight == 0)


PARENT = """
import asyncio, sys
from tuner.load.request import Request
from tuner.load.running import Pace
from tuner.load.spread import SpreadLoad, Target

async def main():
    requests = [Request(i, (1, i), 2, 3, True) for i in range(8)]
    target = Target(sys.argv[1], "m", 600.0)
    async with SpreadLoad(target, requests, Pace(concurrency=4), 2) as load:
        await load.ended(600)

asyncio.run(main())
"""


async def test_spread_processes_end_with_a_killed_parent() -> None:
    async with serving(60.0) as server:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        parent = subprocess.Popen([sys.executable, "-c", PARENT, server.url], env=environment)  # noqa: ASYNC220
        try:
            await eventually(lambda: server.in_flight == 4)
            left = workers_of(psutil.Process(parent.pid))
            assert len(left) == 2
        finally:
            parent.kill()
            parent.wait()
        await eventually(lambda: not any(is_alive(process) for process in left))
        await eventually(lambda: server.in_flight == 0)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
