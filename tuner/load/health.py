"""Whether the client itself keeps up: a load that it cannot drive is not measured.

A client that is short of CPU sends late, and that looks like a slow server where its lateness
is within the latencies, and like a fast one where its own pace hides the queue. Three signs:
in how much of the time the event loop's thread runs, how late requests are sent, how late the
loop runs what is due. When tokens arrived is the kernel's to say (`tuner.load.arrivals`): a
loop that is late to read them does no harm to their times.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import numpy as np

from tuner.types import ClientHealth, RequestRecord

TICK_S = 0.02
"""From one look at the event loop to the next."""

BUSY_SPAN_S = 1.0
"""The busy share is taken of spans of this length, so that no idle tail dilutes it."""

SHORTEST_BUSY_S = 2 * BUSY_SPAN_S
"""A load shorter than this is mostly its start, which is busy: its busy share tells nothing."""

BUSY_PERCENTILE = 90
"""Busy spans count once they are a tenth of the load: more than its start, when all
connections are opened and all prompts written at once."""

BUSY = 0.9
"""Busy share from which on the client may have set the pace. A loop that has no time left is
at 1.0, or a little less, because reading pauses for `tuner.load.arrivals.PAUSE_S` at a time; at
0.9 what comes in waits for some five steps of the loop (M/D/1), well below a millisecond."""

LATE_SHARE = 0.25
"""Requests that are sent late by this share of the time to first token falsify it."""

SLACK_S = 0.1
"""Lateness and lag up to this are a scheduler's doing and no lack of a client's: on two cores
with ten other processes ready to run, requests of a client that was idle for four fifths of the
time were sent 63 ms late (p99), and its loop was 68 ms late."""


class LoopWatch:
    """Watches the event loop that it is made in, and the loop's thread, until `stop`.

    Attributes:
        lags_s: how late something would have run, for each `TICK_S` since the start. A loop that
            stands still for a second counts with all of that second.
    """

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self._shares: list[float] = []
        self._span_start_s = time.perf_counter()
        self._span_busy_s = _busy_s()
        self._last_share: float | None = None
        self._ticking = asyncio.create_task(self._tick())

    @property
    def busy_share(self) -> float:
        """Share of the time that the loop's thread ran.

        Of each `BUSY_SPAN_S` its own, of these the `BUSY_PERCENTILE` (rounded down); of a load
        that is shorter, its own. To be asked in the loop's thread.
        """
        if self._shares:
            return float(np.percentile(self._shares, BUSY_PERCENTILE, method="lower"))
        return self._share() if self._last_share is None else self._last_share

    def stop(self) -> None:
        """Watch no more."""
        if self._last_share is None:
            self._last_share = self._share()
        self._ticking.cancel()

    def _share(self) -> float:
        """Of the span that has begun."""
        elapsed_s = time.perf_counter() - self._span_start_s
        return min(1.0, (_busy_s() - self._span_busy_s) / elapsed_s) if elapsed_s > 0 else 0.0

    async def _tick(self) -> None:
        due_s = time.perf_counter() + TICK_S
        while True:
            await asyncio.sleep(due_s - time.perf_counter())
            now_s = time.perf_counter()
            while due_s <= now_s:
                self.lags_s.append(now_s - due_s)
                due_s += TICK_S
            self._end_span(now_s)

    def _end_span(self, now_s: float) -> None:
        spans = int((now_s - self._span_start_s) / BUSY_SPAN_S)
        if spans:
            self._shares += [self._share()] * spans
            self._span_start_s, self._span_busy_s = now_s, _busy_s()


def health(
    lags_s: Sequence[float], busy_shares: Sequence[float], records: Sequence[RequestRecord]
) -> ClientHealth:
    """The figures of one load; of several processes the busiest counts.

    Percentiles are rounded down to a value that occurred, so that of a short load the worst
    moment does not count.
    """
    lateness_s = [r.send_s - r.intended_s for r in records if r.intended_s is not None]
    return ClientHealth(
        loop_lag_p99_s=_p99(lags_s),
        lateness_p99_s=max(0.0, _p99(lateness_s)),
        cpu_share=max(busy_shares, default=0.0),
        processes=max(1, len(busy_shares)),
    )


def bottleneck(
    client: ClientHealth,
    typical_request_s: float,
    ttft_p99_s: float | None = None,
    load_s: float = math.inf,
) -> str:
    """Why the client and not the server may have set the pace; empty if it did not.

    - It was busy (`BUSY`), in a load of `SHORTEST_BUSY_S` and more.
    - Requests of an open loop were sent late by `LATE_SHARE` of what is measured from when they
      were due.
    - Its loop stood still for as long as a typical request takes. The server then idles up to
      half of the time of such standstills in a closed loop; shorter ones cost less by their
      share of a request. Latencies of a closed loop bear them: they count from the sending.

    The latter two only beyond `SLACK_S`, because a machine that is busy is not a client that is.

    Args:
        typical_request_s: median E2E latency of the served requests; 0 where none was served:
            such a load is void for reasons of its own.
        ttft_p99_s: of the served requests; None leaves lateness to be compared with
            `typical_request_s`.
        load_s: how long the load lasted.
    """
    if typical_request_s <= 0:
        return ""
    processes = "its process" if client.processes == 1 else f"one of its {client.processes}"
    if client.cpu_share >= BUSY and load_s >= SHORTEST_BUSY_S:
        return f"{processes} was busy {client.cpu_share:.0%} of the time"
    compared_s = typical_request_s if ttft_p99_s is None else ttft_p99_s
    if client.lateness_p99_s > max(SLACK_S, LATE_SHARE * compared_s):
        return f"requests were sent up to {client.lateness_p99_s * 1000:.0f} ms late (p99)"
    if client.loop_lag_p99_s > max(SLACK_S, typical_request_s):
        return f"its event loop was up to {client.loop_lag_p99_s * 1000:.0f} ms late (p99)"
    return ""


def _busy_s() -> float:
    """Seconds that this thread has run.

    Not those that it waited for a core: on a busy machine a thread that runs a tenth of the time
    waits for most of the rest, a few milliseconds at a time. What that does to a load, lateness
    and lag tell.
    """
    return time.thread_time()


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99, method="lower")) if values else 0.0
