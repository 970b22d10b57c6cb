"""What the server counted: vLLM's Prometheus page at both ends of the load and in between.

Two requests measure the same thing at different prices. On vLLM 0.32 a full page takes its
API server some 10 ms, in which no token is streamed to anybody: sampled often, that shows
in the latencies being measured. `/metrics/` (with the slash) reaches prometheus_client's own
handler, which knows `name[]` and answers in a fraction of that. Where it is not there,
or leaves out what is needed, the full page is read, less often.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tuner.types import ServerCounters

FULL_PAGE_INTERVAL_S = 0.5
"""Shortest pause between samples of a full page: two a second still catch a peak of the KV
cache, which fills over many steps."""

_SCRAPE_TIMEOUT_S = 10.0
_HTTP_OK = 200

# By meaning, newest name first: a page may carry two of them for a release or two.
# KV usage was renamed in 0.9-0.12, the prefix cache's counters likewise; `_total` is what
# the text format adds to a counter's name, which a few old versions did not follow.
PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions")
PROMPT_TOKENS = ("vllm:prompt_tokens_total", "vllm:prompt_tokens")
GENERATION_TOKENS = ("vllm:generation_tokens_total", "vllm:generation_tokens")
PREFIX_QUERIES = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries",
)
PREFIX_HITS = (
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_hits",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits",
)
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
RUNNING = ("vllm:num_requests_running",)
WAITING = ("vllm:num_requests_waiting",)
PROCESS_START = ("process_start_time_seconds",)

_COUNTERS = (PREEMPTIONS, PROMPT_TOKENS, GENERATION_TOKENS, PREFIX_QUERIES, PREFIX_HITS)
_WANTED = frozenset(
    name for names in (*_COUNTERS, KV_USAGE, RUNNING, WAITING, PROCESS_START) for name in names
)

Series = Mapping[tuple[tuple[str, str], ...], float]
"""Values of one metric by its labels: one for each engine."""


class ScrapeError(Exception):
    """The server's /metrics cannot be read, or lacks what a measurement needs."""


class CounterReset(ScrapeError):
    """A counter went backwards or the process is another: the measurement is void."""


_ABSURD = 2.0**53
"""No count of tokens or requests comes near, and floats stop counting there."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One reading of the page: each wanted metric's values by labels.

    Engines are summed for counters and queue lengths; KV usage, a share, is their mean.
    """

    metrics: Mapping[str, Series]

    def series(self, names: Sequence[str]) -> Series:
        """The values under the first of `names` that the page has; empty if none."""
        return next((self.metrics[name] for name in names if name in self.metrics), {})

    @property
    def kv_usage_mean(self) -> float:
        """Share of the KV cache in use, mean over engines."""
        values = self.series(KV_USAGE).values()
        return fmean(values) if values else 0.0

    @property
    def kv_usage_peak(self) -> float:
        """Share of the KV cache in use, of the fullest engine."""
        return max(self.series(KV_USAGE).values(), default=0.0)

    @property
    def running(self) -> float:
        """Requests being worked on, all engines together."""
        return math.fsum(self.series(RUNNING).values())

    @property
    def waiting(self) -> float:
        """Requests in the queue, all engines together."""
        return math.fsum(self.series(WAITING).values())


def parse(page: str) -> Snapshot:
    """Read a page of the Prometheus text format.

    Only lines of wanted metrics reach the parser: a whole page of vLLM's, 100 kB of
    histograms, would keep it busy for 15 ms.

    Raises:
        ScrapeError: a wanted line is malformed or not a number.
    """
    prefixes = tuple(_WANTED)
    lines = [line for line in page.split("\n") if line.startswith(prefixes)]
    metrics: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                if sample.name not in _WANTED:  # such as vllm:num_preemptions_created
                    continue
                if not abs(sample.value) < _ABSURD:  # nor is it NaN
                    raise ScrapeError(f"/metrics: {sample.name} is {sample.value}")
                labels = tuple(sorted(sample.labels.items()))
                metrics.setdefault(sample.name, {})[labels] = sample.value
    except (ValueError, IndexError, KeyError) as problem:
        raise ScrapeError(f"/metrics is malformed: {problem}") from problem
    return Snapshot(metrics)


def difference(start: Snapshot, end: Snapshot, names: Sequence[str]) -> int:
    """How far a counter went from `start` to `end`, all engines together.

    A series that appears in between counted from 0.

    Raises:
        CounterReset: it went backwards, or a series is gone.
    """
    before, after = start.series(names), end.series(names)
    for labels, value in before.items():
        if after.get(labels, -1.0) < value:
            raise CounterReset(
                f"the server's counter {names[0]} went from {value:g} back to "
                f"{after.get(labels, 0.0):g}: it was restarted while it was measured"
            )
    return round(math.fsum(after.values()) - math.fsum(before.values()))


def counters(start: Snapshot, samples: Sequence[Snapshot], end: Snapshot) -> ServerCounters:
    """Sum up a window from its two ends and the samples in between.

    A window too short for a sample is judged by its ends.

    Raises:
        CounterReset: the server is not the one it was at the start.
        ScrapeError: it does not count preemptions.
    """
    for snapshot in (start, end):
        if not snapshot.series(PREEMPTIONS):
            raise ScrapeError(
                f"the server's /metrics has no {PREEMPTIONS[0]}; is --disable-log-stats set?"
            )
    if start.series(PROCESS_START) != end.series(PROCESS_START):
        raise CounterReset("the server process was replaced while it was measured")
    seen = samples or (start, end)
    return ServerCounters(
        preemptions=difference(start, end, PREEMPTIONS),
        prompt_tokens=difference(start, end, PROMPT_TOKENS),
        generation_tokens=difference(start, end, GENERATION_TOKENS),
        prefix_cache_queries_tokens=difference(start, end, PREFIX_QUERIES),
        prefix_cache_hits_tokens=difference(start, end, PREFIX_HITS),
        kv_cache_usage_mean=fmean(sample.kv_usage_mean for sample in seen),
        kv_cache_usage_peak=max(sample.kv_usage_peak for sample in seen),
        running_mean=fmean(sample.running for sample in seen),
        running_peak=max(sample.running for sample in seen),
        waiting_mean=fmean(sample.waiting for sample in seen),
        waiting_peak=max(sample.waiting for sample in seen),
    )


class MetricsWatcher:
    """Watches one server's /metrics while a load runs::

        async with MetricsWatcher(server.base_url) as watcher:
            records = await drive(...)
            figures = await watcher.finish()

    Entering reads the page once and starts sampling; `finish` reads it a last time.

    Args:
        base_url: without a trailing slash.
        interval_s: from sample to sample; `FULL_PAGE_INTERVAL_S` at least where it has to be the
            full page. A sample costs this process 1 to 1.5 ms: well below 1 % of a core.

    Raises:
        ScrapeError: on entering, if the page cannot be read or counts no preemptions.
    """

    def __init__(self, base_url: str, interval_s: float = 0.25) -> None:
        self._full_url = f"{base_url}/metrics"
        self._narrow_url = f"{base_url}/metrics/"
        self._interval_s = interval_s
        self._narrow = True
        self._samples: list[Snapshot] = []
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> MetricsWatcher:
        async with contextlib.AsyncExitStack() as stack:
            self._session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=_SCRAPE_TIMEOUT_S),
                    headers={"Accept-Encoding": "identity"},
                )
            )
            self._start = await self._first()
            self._sampling = asyncio.create_task(self._sample())
            stack.push_async_callback(self._stop_sampling)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._exit.aclose()

    async def finish(self) -> ServerCounters:
        """End the window now.

        Raises:
            CounterReset: the measurement is void.
            ScrapeError: the page cannot be read.
        """
        await self._stop_sampling()
        return counters(self._start, self._samples, await self._read())

    async def _first(self) -> Snapshot:
        """Read the start of the window and settle which of the two pages to read."""
        try:
            start = await self._read()
            if start.series(PREEMPTIONS):
                return start
        except ScrapeError:
            pass  # no such page here; if the server is broken, the full page says how
        self._narrow = False
        start = await self._read()
        counters(start, (), start)
        return start

    async def _sample(self) -> None:
        while True:
            at_least_s = 0.0 if self._narrow else FULL_PAGE_INTERVAL_S
            await asyncio.sleep(max(self._interval_s, at_least_s))
            with contextlib.suppress(ScrapeError):  # one reading less
                self._samples.append(await self._read())

    async def _stop_sampling(self) -> None:
        self._sampling.cancel()
        await asyncio.wait([self._sampling])
        if not self._sampling.cancelled():
            self._sampling.result()  # it ends by itself only through a defect: show it

    async def _read(self) -> Snapshot:
        url = self._narrow_url if self._narrow else self._full_url
        params = [("name[]", name) for name in sorted(_WANTED)] if self._narrow else None
        try:
            async with self._session.get(url, params=params, allow_redirects=False) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as problem:
            raise ScrapeError(f"/metrics: {type(problem).__name__}: {problem}") from problem
        if response.status != _HTTP_OK:
            raise ScrapeError(f"/metrics: HTTP {response.status}")
        try:
            return parse(content.decode())
        except UnicodeDecodeError as problem:
            raise ScrapeError("/metrics is not UTF-8 text") from problem
