"""Pages of several vLLM versions, and a watcher on a server that can misbehave."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from tuner.metrics import page as metrics_page
from tuner.metrics import scrape
from tuner.metrics.page import WANTED, counters, difference, parse
from tuner.metrics.scrape import CounterReset, MetricsWatcher, ScrapeError, Stalled
from tuner.types import ServerCounters


def page_now(
    preemptions: float = 0,
    kv: float = 0.0,
    running: float = 0,
    waiting: float = 0,
    tokens: float = 0,
    started: float = 1.7e9,
) -> str:
    """As vLLM 0.32 writes it, shortened."""
    labels = '{engine="0",model_name="s4"}'
    return f"""\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds {started!r}
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{labels} {running}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{labels} {waiting}
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{{engine="0",model_name="s4",reason="capacity"}} 99.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{labels} {kv}
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{labels} {tokens * 2}
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{labels} 1.7961045e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{labels} {tokens / 2}
# TYPE vllm:external_prefix_cache_queries_total counter
vllm:external_prefix_cache_queries_total{labels} 77.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{labels} {preemptions}
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{labels} 1.7961045e+09
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{labels} {tokens * 3}
vllm:prompt_tokens_by_source_total{{engine="0",model_name="s4",source="local_compute"}} 5.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{labels} {tokens}
# TYPE vllm:request_num_preemptions histogram
vllm:request_num_preemptions_bucket{{engine="0",le="1.0",model_name="s4"}} 8.0
vllm:request_num_preemptions_count{labels} 8.0
vllm:request_num_preemptions_sum{labels} 12.0
"""


PAGE_0_8 = """\
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{model_name="m"} 5.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
# TYPE vllm:gpu_prefix_cache_queries counter
vllm:gpu_prefix_cache_queries_total{model_name="m"} 640.0
# TYPE vllm:gpu_prefix_cache_hits counter
vllm:gpu_prefix_cache_hits_total{model_name="m"} 64.0
vllm:prompt_tokens_total{model_name="m"} 1000.0
vllm:generation_tokens_total{model_name="m"} 2.5e+03
vllm:num_requests_running{model_name="m"} 4.0
vllm:num_requests_waiting{model_name="m"} 2.0
"""

# Both generations of names at once, two engines.
PAGE_0_10 = """\
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_total{engine="1",model_name="m"} 3.0
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:gpu_cache_usage_perc{engine="1",model_name="m"} 0.6
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.6
vllm:gpu_prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:gpu_prefix_cache_queries_total{engine="1",model_name="m"} 100.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 10.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 20.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 7.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 8.0
vllm:generation_tokens_total{engine="0",model_name="m"} 30.0
vllm:generation_tokens_total{engine="1",model_name="m"} 40.0
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
"""

ZERO = "".join(
    f"{line.rpartition(' ')[0]} 0.0\n" if not line.startswith("#") else line
    for line in PAGE_0_8.splitlines(keepends=True)
)


# --- pages -----------------------------------------------------------------------------


def test_counters_of_a_current_page() -> None:
    found = counters(
        parse(page_now(preemptions=10, tokens=100)),
        [
            parse(page_now(preemptions=12, tokens=150, kv=0.25, running=8, waiting=2)),
            parse(page_now(preemptions=30, tokens=250, kv=0.75, running=16, waiting=0)),
        ],
        parse(page_now(preemptions=35, tokens=300)),
    )
    assert found == ServerCounters(
        preemptions=25,
        prompt_tokens=600,
        generation_tokens=200,
        prefix_cache_queries_tokens=400,
        prefix_cache_hits_tokens=100,
        kv_cache_usage_mean=0.5,
        kv_cache_usage_peak=0.75,
        running_mean=12,
        running_peak=16,
        waiting_mean=1,
        waiting_peak=2,
    )


def test_counters_of_a_page_with_the_old_names() -> None:
    found = counters(parse(ZERO), [parse(PAGE_0_8)], parse(PAGE_0_8))
    assert (found.preemptions, found.prompt_tokens, found.generation_tokens) == (5, 1000, 2500)
    assert (found.prefix_cache_queries_tokens, found.prefix_cache_hits_tokens) == (640, 64)
    assert found.kv_cache_usage_peak == 0.5
    assert (found.running_peak, found.waiting_peak) == (4, 2)


def test_counters_sum_engines_and_take_one_of_two_names() -> None:
    start = parse(PAGE_0_10.replace("_total{engine", "_total{zero").replace("zero", "engine"))
    end = parse(PAGE_0_10.replace("} 30.0", "} 130.0").replace("} 3.0", "} 6.0"))
    found = counters(start, [end], end)
    assert found.preemptions == 3
    assert found.generation_tokens == 100
    assert found.prefix_cache_queries_tokens == 0
    assert found.kv_cache_usage_mean == pytest.approx(0.4)
    assert found.kv_cache_usage_peak == pytest.approx(0.6)
    assert found.running_peak == 11  # 6 + 5
    assert found.waiting_mean == 1


def test_parse_takes_the_value_of_each_engine() -> None:
    snapshot = parse(PAGE_0_10)
    assert sorted(snapshot.series(metrics_page.PREEMPTIONS).values()) == [2.0, 3.0]
    assert sum(snapshot.series(metrics_page.PREFIX_QUERIES).values()) == 200


def test_parse_leaves_out_what_only_begins_like_a_wanted_name() -> None:
    assert set(parse(page_now()).metrics) == {
        "process_start_time_seconds",
        "vllm:generation_tokens_total",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prompt_tokens_total",
    }


def test_counters_count_an_engine_that_appears_in_between_from_zero() -> None:
    one = "".join(line for line in PAGE_0_10.splitlines(keepends=True) if '"1"' not in line)
    assert counters(parse(one), (), parse(PAGE_0_10)).preemptions == 3


def test_counters_of_a_window_too_short_for_a_sample_use_its_ends() -> None:
    found = counters(parse(page_now(kv=0.0)), (), parse(page_now(kv=0.5)))
    assert found.kv_cache_usage_mean == 0.25
    assert found.kv_cache_usage_peak == 0.5


def test_counters_that_go_backwards_are_a_reset() -> None:
    with pytest.raises(CounterReset, match=r"preemptions_total went from 7 back to 3"):
        counters(parse(page_now(preemptions=7)), (), parse(page_now(preemptions=3)))


def test_counters_that_go_backwards_on_one_engine_only_are_a_reset() -> None:
    end = PAGE_0_10.replace('"0",model_name="m"} 2.0', '"0",model_name="m"} 1.0')
    end = end.replace('"1",model_name="m"} 3.0', '"1",model_name="m"} 30.0')
    with pytest.raises(CounterReset):
        counters(parse(PAGE_0_10), (), parse(end))


def test_counters_of_an_engine_that_is_gone_are_a_reset() -> None:
    one = "".join(line for line in PAGE_0_10.splitlines(keepends=True) if '"1"' not in line)
    with pytest.raises(CounterReset):
        counters(parse(PAGE_0_10), (), parse(one))


def test_counters_of_another_process_are_a_reset() -> None:
    with pytest.raises(CounterReset, match="replaced"):
        counters(parse(page_now(started=1.0)), (), parse(page_now(started=2.0)))


def test_counters_notice_a_restart_that_was_made_up_for_before_the_end() -> None:
    """The counter has come past where it was: the two ends alone look healthy."""
    start, end = parse(page_now(tokens=100)), parse(page_now(tokens=300))
    between = [parse(page_now(tokens=150)), parse(page_now(tokens=20))]
    assert counters(start, between[:1], end).generation_tokens == 200
    with pytest.raises(CounterReset, match=r"generation_tokens_total went from 150 back to 20"):
        counters(start, between, end)


def test_counters_notice_another_process_that_was_there_for_a_while() -> None:
    ours, other = parse(page_now(started=1.0)), parse(page_now(started=2.0))
    with pytest.raises(CounterReset, match="replaced"):
        counters(ours, [ours, other, ours], ours)


def test_progress_moves_with_everything_that_a_step_of_the_engine_moves() -> None:
    page = page_now(preemptions=1, kv=0.5, running=3, waiting=2, tokens=7) + (
        'vllm:iteration_tokens_total_count{engine="0"} 4.0\n'
        'vllm:request_success_total{engine="0",finished_reason="stop"} 1.0\n'
    )
    still = parse(page).progress
    for name in (
        "vllm:num_preemptions_total",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:iteration_tokens_total_count",
        "vllm:request_success_total",
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    ):
        moved = re.sub(rf"^({name}{{.*}}) (.*)$", r"\1 9\2", page, flags=re.MULTILINE)
        assert moved != page
        assert parse(moved).progress != still, name
    for name in ("process_start_time_seconds", "vllm:prefix_cache_hits_total"):
        other = re.sub(rf"^({name}.*) (.*)$", r"\1 9\2", page, flags=re.MULTILINE)
        assert other != page
        assert parse(other).progress == still, name


def test_counters_without_preemptions_name_the_flag_that_hides_them() -> None:
    with pytest.raises(ScrapeError, match="--disable-log-stats"):
        counters(parse("python_info 1\n"), (), parse("python_info 1\n"))


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_preemptions_total{engine="0"} many',
        'vllm:num_preemptions_total{engine="0"}',
        'vllm:num_preemptions_total{engine="0" 3.0',
        "vllm:num_preemptions_total{engine=0} 3.0",
        "vllm:num_preemptions_total{} NaN",
        "vllm:num_preemptions_total +Inf",
        "vllm:num_preemptions_total",
    ],
)
def test_parse_of_a_malformed_line_is_an_error(line: str) -> None:
    with pytest.raises(ScrapeError):
        parse(line + "\n")


def test_parse_does_not_mind_what_it_does_not_need() -> None:
    assert parse("<html>{{{\nvllm:other{ nonsense\n").metrics == {}


wanted_names = st.sampled_from(sorted(WANTED))


hostile_lines = st.builds(
    lambda name, rest: name + rest,
    wanted_names,
    st.text("{}\"\\=,0.eN #a\t'", max_size=12),
)


@given(st.lists(hostile_lines | st.text(max_size=20), max_size=6))
def test_parse_of_any_text_gives_a_snapshot_or_a_scrape_error(lines: list[str]) -> None:
    try:
        parse("\n".join(lines))
    except ScrapeError:
        return


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=5), st.integers(0, 10**6))
def test_difference_is_exact_over_engines(starts: list[int], gain: int) -> None:
    def page(add: int) -> str:
        return "".join(
            f'vllm:num_preemptions_total{{engine="{engine}"}} {float(value + add)!r}\n'
            for engine, value in enumerate(starts)
        )

    assert difference(parse(page(0)), parse(page(gain)), metrics_page.PREEMPTIONS) == gain * len(
        starts
    )


# --- the watcher -----------------------------------------------------------------------


class FakeServer:
    """Serves `page`; `narrow` says whether `/metrics/` knows `name[]`, as vLLM's does."""

    def __init__(self, narrow: bool) -> None:
        self.narrow = narrow
        self.page = page_now()
        self.status = 200
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.asked: list[str] = []
        self.names: list[str] = []

    async def full(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        await self.speaks.wait()
        return web.Response(status=self.status, text=self.page)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def restricted(self, request: web.Request) -> web.Response:
        self.names = request.query.getall("name[]", [])
        return await self.full(request)

    async def asked_again(self, times: int) -> None:
        target = len(self.asked) + times
        for _ in range(2000):
            if len(self.asked) >= target:
                return
            await asyncio.sleep(0.005)
        raise AssertionError("not asked within 10 s")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/metrics", self.full)
        app.router.add_get("/health", self.health)
        if self.narrow:
            app.router.add_get("/metrics/", self.restricted)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")


@pytest.mark.parametrize("narrow", [True, False])
async def test_watcher_measures_between_entering_and_asking(
    narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "FULL_PAGE_INTERVAL_S", 0.01)
    fake = FakeServer(narrow)
    fake.page = page_now(preemptions=3, tokens=10)
    async with fake.running() as url, MetricsWatcher(url, interval_s=0.01) as watcher:
        fake.page = page_now(preemptions=5, tokens=20, kv=0.5, running=7, waiting=1)
        await fake.asked_again(3)
        fake.page = page_now(preemptions=8, tokens=40)
        found = await watcher.window()
    assert found.preemptions == 5
    assert found.generation_tokens == 30
    assert found.kv_cache_usage_peak == 0.5
    assert found.running_peak == 7
    assert found.running_mean > 0
    assert fake.asked[-1] == ("/metrics/" if narrow else "/metrics")


async def test_watcher_asks_only_for_what_it_wants_where_it_can() -> None:
    fake = FakeServer(narrow=True)
    async with fake.running() as url, MetricsWatcher(url) as watcher:
        await watcher.window()
    assert set(fake.names) == WANTED
    assert set(fake.asked) == {"/metrics/"}


async def test_watcher_takes_the_full_page_where_the_narrow_one_lacks_preemptions() -> None:
    fake = FakeServer(narrow=False)

    async def empty(request: web.Request) -> web.Response:
        return web.Response(text="")

    app = web.Application()
    app.router.add_get("/metrics", fake.full)
    app.router.add_get("/metrics/", empty)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        async with MetricsWatcher(url) as watcher:
            fake.page = page_now(preemptions=2)
            assert (await watcher.window()).preemptions == 2


async def test_watcher_skips_a_sample_that_fails() -> None:
    fake = FakeServer(narrow=True)
    async with fake.running() as url, MetricsWatcher(url, interval_s=0.01) as watcher:
        fake.page = page_now(kv=0.5)
        await fake.asked_again(3)
        fake.status = 500
        await fake.asked_again(3)
        fake.status, fake.page = 200, "vllm:num_preemptions_total nonsense\n"
        await fake.asked_again(3)
        fake.page = page_now(preemptions=1)
        found = await watcher.window()
    assert found.preemptions == 1
    assert found.kv_cache_usage_peak == 0.5


async def test_watcher_of_a_server_that_cannot_be_read_at_the_end_is_an_error() -> None:
    fake = FakeServer(narrow=True)
    async with fake.running() as url, MetricsWatcher(url) as watcher:
        fake.status = 503
        with pytest.raises(ScrapeError, match="HTTP 503"):
            await watcher.window()


async def test_watcher_tells_a_reset_from_a_page_it_cannot_read() -> None:
    fake = FakeServer(narrow=True)
    fake.page = page_now(preemptions=3)
    async with fake.running() as url, MetricsWatcher(url) as watcher:
        fake.page = page_now(preemptions=0)
        with pytest.raises(CounterReset):
            await watcher.window()


async def test_watcher_refuses_a_server_without_preemptions() -> None:
    fake = FakeServer(narrow=True)
    fake.page = "python_info 1.0\n"
    async with fake.running() as url:
        with pytest.raises(ScrapeError, match="--disable-log-stats"):
            async with MetricsWatcher(url):
                pass


async def test_watcher_refuses_a_server_that_is_not_there() -> None:
    async with FakeServer(narrow=True).running() as url:
        pass
    with pytest.raises(ScrapeError, match="Connect"):
        async with MetricsWatcher(url):
            pass


async def test_watcher_that_is_cancelled_leaves_no_task_behind() -> None:
    fake = FakeServer(narrow=True)
    async with fake.running() as url:
        before = asyncio.all_tasks()

        async def watch() -> None:
            async with MetricsWatcher(url, interval_s=0.01):
                await asyncio.sleep(60)

        task = asyncio.create_task(watch())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ours = {
            leftover.get_name()
            for leftover in asyncio.all_tasks() - before
            if "MetricsWatcher" in repr(leftover)
        }
    assert ours == set()


async def test_watcher_reads_the_full_page_less_often() -> None:
    fake = FakeServer(narrow=False)
    async with fake.running() as url, MetricsWatcher(url, interval_s=0.001):
        await asyncio.sleep(0.6)
    assert len(fake.asked) <= 5


# --- a server that is not worth a load any more -----------------------------------------


async def forever() -> None:
    await asyncio.sleep(3600)


async def test_guard_gives_what_the_load_gives() -> None:
    async def load() -> int:
        return 7

    fake = FakeServer(narrow=True)
    async with fake.running() as url, MetricsWatcher(url) as watcher:
        assert await watcher.guard(load()) == 7


async def test_guard_passes_on_what_the_load_raises() -> None:
    async def load() -> None:
        raise LookupError("no such prompt")

    fake = FakeServer(narrow=True)
    async with fake.running() as url, MetricsWatcher(url) as watcher:
        with pytest.raises(LookupError, match="no such prompt"):
            await watcher.guard(load())


async def test_guard_ends_the_load_when_the_server_was_restarted() -> None:
    fake, ended = FakeServer(narrow=True), asyncio.Event()
    fake.page = page_now(tokens=100)

    async def load() -> None:
        try:
            await forever()
        finally:
            ended.set()

    async with fake.running() as url, MetricsWatcher(url, interval_s=0.01) as watcher:
        loading = asyncio.create_task(watcher.guard(load()))
        await fake.asked_again(2)
        fake.page = page_now(tokens=3)
        with pytest.raises(CounterReset, match="from 100 back to 3"):
            await asyncio.wait_for(loading, 10)
        assert ended.is_set()
        with pytest.raises(CounterReset):  # also for who did not guard
            await watcher.window()


async def test_guard_ends_the_load_when_another_process_answers() -> None:
    fake = FakeServer(narrow=True)
    async with fake.running() as url, MetricsWatcher(url, interval_s=0.01) as watcher:
        fake.page = page_now(started=1.8e9, tokens=500)
        with pytest.raises(CounterReset, match="replaced"):
            await asyncio.wait_for(watcher.guard(forever()), 10)


async def test_guard_that_is_cancelled_ends_the_load() -> None:
    fake, ended = FakeServer(narrow=True), asyncio.Event()

    async def load() -> None:
        try:
            await forever()
        finally:
            ended.set()

    async with fake.running() as url, MetricsWatcher(url) as watcher:
        loading = asyncio.create_task(watcher.guard(load()))
        await asyncio.sleep(0.05)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
    assert ended.is_set()


@pytest.mark.parametrize("narrow", [True, False])
async def test_guard_ends_a_load_that_hangs(narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "FULL_PAGE_INTERVAL_S", 0.01)
    fake = FakeServer(narrow)
    fake.page = page_now(tokens=100, running=2, waiting=5)
    async with (
        fake.running() as url,
        MetricsWatcher(url, 0.01, hang_after_s=0.6, in_flight=lambda: 7) as watcher,
    ):
        with pytest.raises(Stalled) as stalled:
            await asyncio.wait_for(watcher.guard(forever()), 10)
    assert stalled.value.standstill.lasted_s >= 0.6
    assert str(stalled.value) == (
        "no token for 1 s while 2 requests run and 5 wait; /health still answers 200"
    )


async def test_guard_ends_a_load_on_a_server_that_does_not_answer_any_more() -> None:
    fake = FakeServer(narrow=True)
    async with (
        fake.running() as url,
        MetricsWatcher(url, 0.01, hang_after_s=2.0, in_flight=lambda: 7) as watcher,
    ):
        fake.speaks.clear()
        with pytest.raises(Stalled, match=r"no answer from /metrics for [23] s with 7 requests"):
            await asyncio.wait_for(watcher.guard(forever()), 20)
        fake.speaks.set()


async def test_guard_does_not_mind_a_server_without_requests() -> None:
    fake = FakeServer(narrow=True)
    fake.page = page_now(tokens=100, running=3)
    async with (
        fake.running() as url,
        MetricsWatcher(url, 0.01, hang_after_s=0.3) as watcher,
    ):
        await watcher.guard(asyncio.sleep(1.0))
        assert watcher.standstill.lasted_s == 0
        await watcher.window()


async def test_window_takes_a_load_that_ended_while_nothing_moved() -> None:
    fake = FakeServer(narrow=True)
    async with (
        fake.running() as url,
        MetricsWatcher(url, 0.01, hang_after_s=0.3, in_flight=lambda: 1) as watcher,
    ):
        await asyncio.sleep(1.0)
        assert (await watcher.window()).preemptions == 0


async def test_begin_leaves_out_what_was_before() -> None:
    fake = FakeServer(narrow=True)
    fake.page = page_now(preemptions=1, kv=1.0)
    async with fake.running() as url, MetricsWatcher(url, interval_s=0.01) as watcher:
        await fake.asked_again(2)
        fake.page = page_now(preemptions=5, kv=0.25)
        await watcher.begin()
        fake.page = page_now(preemptions=7, kv=0.5)
        await fake.asked_again(2)
        found = await watcher.window()
    assert found.preemptions == 2
    assert found.kv_cache_usage_peak == 0.5


async def test_begin_after_a_restart_is_an_error() -> None:
    fake = FakeServer(narrow=True)
    fake.page = page_now(preemptions=5)
    async with fake.running() as url, MetricsWatcher(url, interval_s=60) as watcher:
        fake.page = page_now(preemptions=0)
        with pytest.raises(CounterReset):
            await watcher.begin()
