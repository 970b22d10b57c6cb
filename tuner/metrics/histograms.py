"""The server's own latency histograms, as a check of what the client saw.

vLLM counts each latency into buckets. Between two readings of the page the difference of the
counts is the window's; percentiles are interpolated evenly within a bucket, as Prometheus'
`histogram_quantile` does, so that they are as coarse as the buckets. Means are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families

from tuner.types import Percentiles, RequestRecord, RequestStatus, ServerLatencies

TTFT = ("vllm:time_to_first_token_seconds",)
E2E = ("vllm:e2e_request_latency_seconds",)
# A request's mean from 0.11 on; before, each gap under a name that says the same.
TPOT = ("vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds")

_SUFFIXES = ("_bucket", "_sum", "_count")

NAMES = tuple(f"{name}{suffix}" for name in (*TTFT, *E2E, *TPOT) for suffix in _SUFFIXES)
"""All names that are read; a page may be asked for these alone."""


@dataclass(slots=True)
class Histogram:
    """Counts up to each bound, all engines together."""

    buckets: dict[float, float] = field(default_factory=dict)
    total_s: float = 0.0
    count: float = 0.0

    def since(self, before: Histogram) -> Histogram:
        """What was counted after `before`."""
        buckets = {b: n - before.buckets.get(b, 0.0) for b, n in self.buckets.items()}
        return Histogram(buckets, self.total_s - before.total_s, self.count - before.count)

    def percentiles(self) -> Percentiles | None:
        """None of an empty one."""
        if self.count <= 0:
            return None
        p50, p90, p99 = (self._quantile(share) for share in (0.5, 0.9, 0.99))
        return Percentiles(self.total_s / self.count, p50, p90, p99)

    def _quantile(self, share: float) -> float:
        rank, low, below = share * self.count, 0.0, 0.0
        for bound, up_to in sorted(self.buckets.items()):
            if up_to >= rank:
                if math.isinf(bound):
                    return low  # all that is known of the last bucket is where it begins
                inside = up_to - below
                return low + (bound - low) * ((rank - below) / inside if inside > 0 else 1.0)
            low, below = bound, up_to
        return low


Histograms = Mapping[str, Histogram]


def parse(page: str) -> Histograms:
    """The histograms of a page by name; what cannot be read is left out: it is only a check."""
    found: dict[str, Histogram] = {}
    lines = [line for line in page.split("\n") if line.startswith(NAMES)]
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                _add(found, sample.name, sample.labels, sample.value)
    except (ValueError, IndexError, KeyError):
        return {}
    return found


def latencies(before: Histograms, after: Histograms) -> ServerLatencies:
    """What the server counted between two readings."""
    return ServerLatencies(
        ttft_s=_between(before, after, TTFT),
        tpot_s=_between(before, after, TPOT),
        e2e_s=_between(before, after, E2E),
    )


def with_clients_means(
    server: ServerLatencies, records: Sequence[RequestRecord]
) -> ServerLatencies:
    """The same, and the client's means beside it.

    From when requests were sent, not from when they were due: the server cannot know of a client
    that is late.
    """
    answered = [r for r in records if r.token_times_s and r.status is RequestStatus.OK]
    if not answered:
        return server
    return replace(
        server,
        client_ttft_mean_s=fmean(r.token_times_s[0] - r.send_s for r in answered),
        client_e2e_mean_s=fmean(r.token_times_s[-1] - r.send_s for r in answered),
    )


def _add(found: dict[str, Histogram], name: str, labels: Mapping[str, str], value: float) -> None:
    base, _, kind = name.rpartition("_")
    histogram = found.setdefault(base, Histogram())
    if kind == "bucket":
        bound = float(labels["le"])
        histogram.buckets[bound] = histogram.buckets.get(bound, 0.0) + value
    elif kind == "sum":
        histogram.total_s += value
    elif kind == "count":
        histogram.count += value


def _between(before: Histograms, after: Histograms, names: Sequence[str]) -> Percentiles | None:
    for name in names:
        if name in after:
            return after[name].since(before.get(name, Histogram())).percentiles()
    return None
