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
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from tuner.metrics.histograms import NAMES as HISTOGRAMS
from tuner.metrics.histograms import Histograms, latencies
from tuner.metrics.histograms import parse as parse_histograms
from tuner.metrics.page import (
    PREEMPTIONS,
    WANTED,
    CounterReset,
    ScrapeError,
    Snapshot,
    counters,
    must_be_one_life,
    parse,
)
from tuner.metrics.stall import GAP_SHARE, Look, StallWatch, Standstill
from tuner.types import ServerCounters, ServerLatencies

__all__ = ["CounterReset", "MetricsWatcher", "ScrapeError", "Stalled"]

T = TypeVar("T")

FULL_PAGE_INTERVAL_S = 0.5
"""Shortest pause between samples of a full page: two a second still catch a peak of the KV
cache, which fills over many steps."""

_SCRAPE_TIMEOUT_S = 10.0
_SAMPLE_SHARE = 1 / 4
"""Longest wait for a sample, as a share of the time after which silence is a hang: short enough
that four of them in a row are told from a pause of this program."""
_HEALTH_TIMEOUT_S = 5.0
_HTTP_OK = 200


class Stalled(ScrapeError):
    """The server had requests, and nothing of it has moved for too long.

    Attributes:
        standstill: for how long, and who waits.
    """

    def __init__(self, standstill: Standstill, health: str = "") -> None:
        super().__init__("; ".join(filter(None, (standstill.words(), health))))
        self.standstill = standstill


class MetricsWatcher:
    """Watches one server's /metrics while a load runs::

        async with MetricsWatcher(server.base_url) as watcher:
            await watcher.begin()
            records = await watcher.guard(some_load())
            figures = await watcher.window()

    Entering reads the page once and starts sampling. `begin` moves the start of the window,
    past a warm-up or to the next load.

    Args:
        base_url: without a trailing slash.
        interval_s: from sample to sample; `FULL_PAGE_INTERVAL_S` at least where it has to be the
            full page. A sample costs this process 1 to 1.5 ms: well below 1 % of a core.
        hang_after_s: with requests in flight and no counter moving for so long, the server
            hangs; None: never.
        in_flight: how many requests are under way now.

    Raises:
        ScrapeError: on entering, if the page cannot be read or counts no preemptions.
    """

    def __init__(
        self,
        base_url: str,
        interval_s: float = 0.25,
        *,
        hang_after_s: float | None = None,
        in_flight: Callable[[], int] = lambda: 0,
    ) -> None:
        self._base_url = base_url
        self._interval_s = interval_s
        self._hang_after_s = math.inf if hang_after_s is None else hang_after_s
        self._in_flight = in_flight
        self._stall = StallWatch(self._hang_after_s * GAP_SHARE)
        self._narrow = True
        self._samples: list[Snapshot] = []
        self._histograms: Histograms = {}
        self._one_at_a_time = asyncio.Lock()  # an older page must not pass for a newer one
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> MetricsWatcher:
        async with contextlib.AsyncExitStack() as stack:
            self._session = await stack.enter_async_context(
                aiohttp.ClientSession(headers={"Accept-Encoding": "identity"})
            )
            self._start = self._latest = await self._first()
            self._samples = [self._start]
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

    @property
    def standstill(self) -> Standstill:
        """For how long nothing has moved at the longest in this window, with requests in
        flight."""
        return self._stall.longest

    async def guard(self, load: Coroutine[Any, Any, T]) -> T:
        """Run `load`, but no longer than the server is worth it; else it is cancelled.

        Raises:
            CounterReset: the server was restarted.
            Stalled: it hangs.
        """
        loading = asyncio.create_task(load)
        try:
            await asyncio.wait({loading, self._sampling}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                raise self._sampling.result()
            return await loading
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def begin(self) -> None:
        """Begin the window now; what was sampled before is dropped.

        Raises:
            CounterReset: the server was restarted since the last look.
            ScrapeError: the page cannot be read.
        """
        self._histograms = await self._read_histograms()
        self._start = await self._look(_SCRAPE_TIMEOUT_S)
        self._samples = [self._start]
        self._stall.forget()

    @property
    def samples(self) -> Sequence[Snapshot]:
        """The readings of the window so far, its start first."""
        return self._samples

    async def window(self) -> ServerCounters:
        """What the server counted from the window's start to now.

        Raises:
            CounterReset: the measurement is void.
            ScrapeError: the page cannot be read.
        """
        if self._sampling.done() and isinstance(self._sampling.result(), CounterReset):
            raise self._sampling.result()
        end = await self._look(_SCRAPE_TIMEOUT_S)
        self._samples.append(end)
        return counters(self._start, self._samples[1:-1], end)

    async def latencies(self) -> ServerLatencies:
        """The server's own histograms over the window; empty where it has none."""
        return latencies(self._histograms, await self._read_histograms())

    async def _first(self) -> Snapshot:
        """Read the start of the window and settle which of the two pages to read."""
        try:
            start = await self._read(_SCRAPE_TIMEOUT_S)
            if start.series(PREEMPTIONS):
                return start
        except ScrapeError:
            pass  # no such page here; if the server is broken, the full page says how
        self._narrow = False
        start = await self._read(_SCRAPE_TIMEOUT_S)
        counters(start, (), start)
        return start

    async def _sample(self) -> ScrapeError:
        """Look again and again, until the server is found to be worth no further look: why."""
        at_least_s = 0.0 if self._narrow else FULL_PAGE_INTERVAL_S
        limit_s = min(_SCRAPE_TIMEOUT_S, self._hang_after_s * _SAMPLE_SHARE)
        while True:
            await asyncio.sleep(max(self._interval_s, at_least_s))
            snapshot: Snapshot | None = None
            try:
                snapshot = await self._look(limit_s)
                self._samples.append(snapshot)
            except CounterReset as reset:
                return reset
            except ScrapeError:
                pass  # one reading less
            standstill = self._stall.saw(time.monotonic(), self._as_look(snapshot))
            if standstill.lasted_s >= self._hang_after_s:
                return Stalled(standstill, await self._health())

    def _as_look(self, snapshot: Snapshot | None) -> Look:
        if snapshot is None:
            return Look(None, in_flight=self._in_flight())
        running, waiting = round(snapshot.running), round(snapshot.waiting)
        return Look(snapshot.progress, running, waiting, self._in_flight())

    async def _stop_sampling(self) -> None:
        self._sampling.cancel()
        await asyncio.wait([self._sampling])
        if not self._sampling.cancelled():
            self._sampling.result()  # it raises only through a defect: show it

    async def _look(self, limit_s: float) -> Snapshot:
        """Read the page and hold it against the one before."""
        async with self._one_at_a_time:
            snapshot = await self._read(limit_s)
            must_be_one_life(self._latest, snapshot)
            self._latest = snapshot
        return snapshot

    async def _read(self, limit_s: float) -> Snapshot:
        at_s = time.perf_counter()
        return parse(await self._page(WANTED, limit_s), at_s)

    async def _read_histograms(self) -> Histograms:
        try:
            return parse_histograms(await self._page(HISTOGRAMS, _SCRAPE_TIMEOUT_S))
        except ScrapeError:
            return {}  # a check is missing, no more

    async def _page(self, names: Iterable[str], limit_s: float) -> str:
        url = f"{self._base_url}/metrics/" if self._narrow else f"{self._base_url}/metrics"
        params = [("name[]", name) for name in sorted(names)] if self._narrow else None
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._session.get(
                url, params=params, allow_redirects=False, timeout=timeout
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as problem:
            raise ScrapeError(f"/metrics: {type(problem).__name__}: {problem}") from problem
        if response.status != _HTTP_OK:
            raise ScrapeError(f"/metrics: HTTP {response.status}")
        try:
            return content.decode()
        except UnicodeDecodeError as problem:
            raise ScrapeError("/metrics is not UTF-8 text") from problem

    async def _health(self) -> str:
        """What /health says of a server that hangs; on vLLM mostly that all is well."""
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        try:
            async with self._session.get(f"{self._base_url}/health", timeout=timeout) as response:
                still = "still " if response.status == _HTTP_OK else ""
                return f"/health {still}answers {response.status}"
        except (aiohttp.ClientError, OSError):
            return "/health does not answer"
