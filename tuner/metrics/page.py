"""vLLM's Prometheus page: what of it is read, and what two readings say of the time between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families

from tuner.types import ServerCounters

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
STEPS = ("vllm:iteration_tokens_total_count",)  # of a histogram, despite its name
ENDED = ("vllm:request_success_total", "vllm:request_success")
PROCESS_START = ("process_start_time_seconds",)

_WORK = (GENERATION_TOKENS, PROMPT_TOKENS, PREEMPTIONS, STEPS, ENDED)
_GAUGES = (KV_USAGE, RUNNING, WAITING)
_COUNTERS = (*_WORK, PREFIX_QUERIES, PREFIX_HITS)
WANTED = frozenset(name for names in (*_COUNTERS, *_GAUGES, PROCESS_START) for name in names)
"""All names that are read; a page may be asked for these alone."""

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

    Attributes:
        at_s: when it was asked for, on `time.perf_counter`.
    """

    metrics: Mapping[str, Series]
    at_s: float = 0.0

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

    @property
    def progress(self) -> tuple[float, ...]:
        """Equal as long as no engine does anything for a request.

        The gauges are among it: they are of the scheduler's last step, and steps that prefill
        a part of a long prompt move no counter.
        """
        return tuple(math.fsum(self.series(names).values()) for names in (*_WORK, *_GAUGES))


def parse(page: str, at_s: float = 0.0) -> Snapshot:
    """Read a page of the Prometheus text format.

    Only lines of wanted metrics reach the parser: a whole page of vLLM's, 100 kB of
    histograms, would keep it busy for 15 ms.

    Raises:
        ScrapeError: a wanted line is malformed or not a number.
    """
    prefixes = tuple(WANTED)
    lines = [line for line in page.split("\n") if line.startswith(prefixes)]
    metrics: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                if sample.name not in WANTED:  # such as vllm:num_preemptions_created
                    continue
                if not abs(sample.value) < _ABSURD:  # nor is it NaN
                    raise ScrapeError(f"/metrics: {sample.name} is {sample.value}")
                labels = tuple(sorted(sample.labels.items()))
                metrics.setdefault(sample.name, {})[labels] = sample.value
    except (ValueError, IndexError, KeyError) as problem:
        raise ScrapeError(f"/metrics is malformed: {problem}") from problem
    return Snapshot(metrics, at_s)


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


def must_be_one_life(before: Snapshot, after: Snapshot) -> None:
    """Make sure that two readings, one after the other, are of one life of one server.

    Raises:
        CounterReset: the process is another, or a counter went backwards.
    """
    if before.series(PROCESS_START) != after.series(PROCESS_START):
        raise CounterReset("the server process was replaced while it was measured")
    for names in _COUNTERS:
        difference(before, after, names)


def counters(start: Snapshot, samples: Sequence[Snapshot], end: Snapshot) -> ServerCounters:
    """Sum up a window from its two ends and the samples in between.

    A window too short for a sample is judged by its ends.

    Raises:
        CounterReset: the server was restarted within the window, also where its counters have
            come past where they were before.
        ScrapeError: it does not count preemptions.
    """
    for snapshot in (start, end):
        if not snapshot.series(PREEMPTIONS):
            raise ScrapeError(
                f"the server's /metrics has no {PREEMPTIONS[0]}; is --disable-log-stats set?"
            )
    for before, after in pairwise((start, *samples, end)):
        must_be_one_life(before, after)
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
