"""What the clients saw: throughput, latencies and goodput of a load.

Latencies are defined in `tuner.metrics.latency`, goodput in `tuner.metrics.slo`. Percentiles are
numpy's default (linear interpolation).

Throughputs count served requests only: work on requests that failed is not output. They are
taken over a window without ramp-up and ramp-down where the caller knows one
(`tuner.measuring.window`): tokens that arrived and requests that ended within it, over its
length. Else over everything, from the first send to the last end. Latencies, and whether the SLO
was kept, are then of the requests that were due within the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from tuner.metrics.latency import due_s, e2e_s, itl_s, token_arrivals, tpot_s, ttft_s
from tuner.metrics.slo import meets, promises
from tuner.types import (
    DeviceUse,
    Measurement,
    MemoryFacts,
    Percentiles,
    RequestRecord,
    RequestStatus,
    ServerCounters,
    SloLimit,
)


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when, in seconds on the client's clock.

    What happens at its start is not in it, what happens at its end is: a window often begins and
    ends with an answer, and both of them would be one more than came in its time.
    """

    start_s: float
    end_s: float

    def __contains__(self, at_s: float) -> bool:
        return self.start_s < at_s <= self.end_s

    @property
    def length_s(self) -> float:
        """From start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """A load in figures; see the module for definitions, `Measurement` for each of them."""

    window_s: float
    offered: int
    served: int
    rejected: int
    failed: int
    request_throughput_per_s: float
    output_throughput_tokens_per_s: float
    input_throughput_tokens_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    first_error: str = ""
    steady: bool = False
    statuses: Mapping[str, int] = field(default_factory=dict)
    goodput_per_s: float | None = None
    slo_kept: float | None = None
    slo_missed: Mapping[str, int] = field(default_factory=dict)
    slo_reached_s: Mapping[str, float] = field(default_factory=dict)


def summarise(
    records: Sequence[RequestRecord], span: Span | None = None, slo: Sequence[SloLimit] = ()
) -> ServingFigures:
    """Turn the records of all offered requests into figures.

    Args:
        span: the window; None where there is no steady part, and all of it counts.
    """
    window = span or whole_span(records)
    served = [record for record in records if record.status is RequestStatus.OK]
    unserved = [record for record in records if record.status is not RequestStatus.OK]
    rejected = sum(record.status is RequestStatus.REJECTED for record in records)
    ended = [record for record in served if record.end_s in window]
    due = [r for r in records if window.start_s <= due_s(r) <= window.end_s]
    observed = [r for r in due if r.status is RequestStatus.OK and r.token_times_s]
    first_unserved = min(unserved, key=lambda record: record.end_s, default=None)
    good = sum(meets(record, slo) for record in ended)
    told = promises(due, slo)
    return ServingFigures(
        window_s=window.length_s,
        offered=len(records),
        served=len(served),
        rejected=rejected,
        failed=len(unserved) - rejected,
        request_throughput_per_s=_rate(len(ended), window),
        output_throughput_tokens_per_s=_rate(_output_tokens(served, span), window),
        input_throughput_tokens_per_s=_rate(_input_tokens(served, span), window),
        ttft_s=percentiles(ttft_s(record) for record in observed),
        tpot_s=percentiles(tpot_s(record) for record in observed if record.output_tokens > 1),
        itl_s=percentiles(gap_s for record in observed for gap_s in itl_s(record)),
        e2e_s=percentiles(e2e_s(record) for record in observed),
        first_error=first_unserved.error if first_unserved else "",
        steady=span is not None,
        statuses=dict(sorted(Counter(record.status.value for record in records).items())),
        goodput_per_s=_rate(good, window) if slo else None,
        slo_kept=told.kept if told else None,
        slo_missed=told.missed if told else {},
        slo_reached_s=told.reached_s if told else {},
    )


def measurement(
    records: Sequence[RequestRecord],
    counters: ServerCounters,
    memory: MemoryFacts,
    device: DeviceUse,
    *,
    span: Span | None = None,
    slo: Sequence[SloLimit] = (),
) -> Measurement:
    """The figures of `records` with what was seen of the server meanwhile."""
    figures = summarise(records, span, slo)
    seen = {item.name: getattr(figures, item.name) for item in fields(figures)}
    return Measurement(counters=counters, memory=memory, device=device, **seen)


def percentiles(values_s: Iterable[float]) -> Percentiles | None:
    """Mean, p50, p90, p99 by linear interpolation (numpy's default); None of no values."""
    values = np.fromiter(values_s, dtype=np.float64)
    if values.size == 0:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Percentiles(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


def whole_span(records: Sequence[RequestRecord]) -> Span:
    """First send to last end; of no length without requests."""
    if not records:
        return Span(0.0, 0.0)
    start_s = min(due_s(record) for record in records)
    return Span(start_s, max(record.end_s for record in records))


def _output_tokens(served: Sequence[RequestRecord], span: Span | None) -> int:
    if span is None:
        return sum(record.output_tokens for record in served)
    return sum(n for r in served for at_s, n in token_arrivals(r) if at_s in span)


def _input_tokens(served: Sequence[RequestRecord], span: Span | None) -> int:
    """A prompt counts when its first token comes."""
    if span is None:
        return sum(record.prompt_tokens for record in served)
    first = (record for record in served if record.token_times_s)
    return sum(r.prompt_tokens for r in first if r.token_times_s[0] in span)


def _rate(amount: int, window: Span) -> float:
    return amount / window.length_s if window.length_s > 0 else 0.0
