"""A client that is the bottleneck is told from a machine that is busy."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from tuner.load import health as health_module
from tuner.load.health import (
    BUSY,
    BUSY_SPAN_S,
    SHORTEST_BUSY_S,
    TICK_S,
    LoopWatch,
    bottleneck,
    health,
)
from tuner.types import ClientHealth, RequestRecord, RequestStatus


def record(late_s: float | None) -> RequestRecord:
    intended_s = None if late_s is None else 1.0
    send_s = 1.0 + (late_s or 0.0)
    return RequestRecord(0, RequestStatus.OK, send_s, 9.0, intended_s=intended_s)


def client(
    lag_s: float = 0.005, lateness_s: float = 0.001, busy: float = 0.3, processes: int = 1
) -> ClientHealth:
    return ClientHealth(lag_s, lateness_s, busy, processes)


# --- the watch ---------------------------------------------------------------------------


async def test_loop_watch_counts_all_of_a_standstill() -> None:
    watch = LoopWatch()
    await asyncio.sleep(0.1)
    time.sleep(0.5)  # noqa: ASYNC251 (the loop is to stand still)
    await asyncio.sleep(0.05)
    watch.stop()
    assert max(watch.lags_s) > 0.4
    assert sum(lag_s > 0.1 for lag_s in watch.lags_s) >= 0.9 * 0.35 / TICK_S


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the loop's thread is said to have run; set its only item."""
    seconds = [0.0]
    monkeypatch.setattr(health_module, "_busy_s", lambda: seconds[0])
    return seconds


async def test_loop_watch_tells_busy_from_idle(ran: list[float]) -> None:
    busy = LoopWatch()
    await asyncio.sleep(0.1)
    ran[0] += 3600.0
    busy.stop()
    idle = LoopWatch()
    await asyncio.sleep(0.1)
    idle.stop()
    assert busy.busy_share == 1.0
    assert idle.busy_share == 0.0


@dataclass
class Spans:
    """A watch on a clock of its own, whose spans end when they are told to."""

    ran: list[float]
    now_s: float = 1000.0

    def perf_counter(self) -> float:
        return self.now_s

    def begin(self) -> None:
        self.watch = LoopWatch()
        self.watch._ticking.cancel()

    def pass_by(self, spans: float, *, busy: bool) -> None:
        self.now_s += spans * BUSY_SPAN_S
        self.ran[0] += spans * BUSY_SPAN_S * busy
        self.watch._end_span(self.now_s)


@pytest.fixture
async def spans(monkeypatch: pytest.MonkeyPatch, ran: list[float]) -> Spans:
    made = Spans(ran)
    monkeypatch.setattr(health_module, "time", made)
    made.begin()
    return made


async def test_loop_watch_is_not_diluted_by_an_idle_tail(spans: Spans) -> None:
    for busy in (True,) * 4 + (False,) * 6:
        spans.pass_by(1, busy=busy)
    assert spans.watch.busy_share == 1.0


async def test_loop_watch_forgives_a_busy_start(spans: Spans) -> None:
    for busy in (True,) + (False,) * 20:
        spans.pass_by(1, busy=busy)
    assert spans.watch.busy_share == 0.0


async def test_loop_watch_counts_a_span_that_ends_late_as_all_that_it_was(spans: Spans) -> None:
    for _ in range(8):
        spans.pass_by(1, busy=False)
    spans.pass_by(4.5, busy=True)
    assert spans.watch.busy_share == 1.0


async def test_loop_watch_stopped_is_not_diluted_by_what_follows(ran: list[float]) -> None:
    watch = LoopWatch()
    await asyncio.sleep(0.05)
    ran[0] += 3600.0
    watch.stop()
    share, lags = watch.busy_share, len(watch.lags_s)
    await asyncio.sleep(0.1)
    assert watch.busy_share == share == 1.0
    assert len(watch.lags_s) == lags


def test_busy_time_is_that_of_the_thread_alone() -> None:
    before_s = health_module._busy_s()
    while time.thread_time() - before_s < 0.05:
        pass
    assert health_module._busy_s() - before_s >= 0.05


# --- the figures -------------------------------------------------------------------------


def test_health_takes_the_busiest_process_and_all_lags() -> None:
    lags_s = [0.001] * 190 + [0.4] * 10
    found = health(lags_s, [0.2, 0.7, 0.1], [record(0.01), record(0.02), record(None)])
    assert found.cpu_share == 0.7
    assert found.processes == 3
    assert found.loop_lag_p99_s == 0.4
    assert found.lateness_p99_s == pytest.approx(0.01)


def test_health_leaves_out_the_one_worst_request_of_a_short_load() -> None:
    found = health([], [0.1], [record(0.001)] * 30 + [record(0.5)])
    assert found.lateness_p99_s == pytest.approx(0.001)
    many = health([], [0.1], [record(0.001)] * 300 + [record(0.5)] * 10)
    assert many.lateness_p99_s == pytest.approx(0.5)


def test_health_of_a_load_that_was_not_seen_is_sane() -> None:
    assert health([], [], []) == ClientHealth(0.0, 0.0, 0.0, 1)


# --- the verdict -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "request_s", "ttft_p99_s"),
    [
        (client(), 1.0, 0.2),
        (client(busy=BUSY - 0.01), 1.0, 0.2),
        (client(lateness_s=0.09), 1.0, 0.01),  # a scheduler's doing
        (client(lateness_s=0.4), 5.0, 2.0),  # a fifth of the time to first token
        (client(lateness_s=0.4), 5.0, None),
        (client(lag_s=0.09), 0.01, 0.005),
        (client(lag_s=0.9), 1.0, 0.2),
        (client(busy=1.0, lag_s=9.0, lateness_s=9.0), 0.0, None),  # no request was served
    ],
)
def test_bottleneck_is_not_a_client_that_is_a_little_late(
    seen: ClientHealth, request_s: float, ttft_p99_s: float | None
) -> None:
    assert bottleneck(seen, request_s, ttft_p99_s) == ""


def test_bottleneck_forgives_a_load_that_is_mostly_its_start() -> None:
    busy = client(busy=1.0)
    assert bottleneck(busy, 0.1, 0.05, SHORTEST_BUSY_S - 0.1) == ""
    assert "was busy 100%" in bottleneck(busy, 0.1, 0.05, SHORTEST_BUSY_S)
    late = client(busy=1.0, lag_s=2.5)
    assert "event loop was up to 2500 ms late" in bottleneck(late, 0.1, 0.05, 1.0)


@pytest.mark.parametrize(
    ("seen", "request_s", "ttft_p99_s", "why"),
    [
        (client(busy=0.97), 1.0, 0.2, "its process was busy 97% of the time"),
        (client(busy=0.97, processes=4), 1.0, 0.2, "one of its 4 was busy"),
        (client(lateness_s=0.12), 5.0, 0.2, "sent up to 120 ms late"),
        (client(lateness_s=0.3), 5.0, 1.0, "sent up to 300 ms late"),
        (client(lateness_s=1.5), 5.0, None, "sent up to 1500 ms late"),
        (client(lag_s=0.15), 0.1, 0.05, "event loop was up to 150 ms late"),
        (client(lag_s=2.5), 2.0, 0.1, "event loop was up to 2500 ms late"),
    ],
)
def test_bottleneck_says_what_the_client_could_not_do(
    seen: ClientHealth, request_s: float, ttft_p99_s: float | None, why: str
) -> None:
    assert why in bottleneck(seen, request_s, ttft_p99_s)
