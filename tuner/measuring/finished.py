"""From a load that is over to its figures.

What a stop does to them:

- Once the score is known well enough no more is sent, and what is in flight is waited for. The
  window ends with the stop, so that throughputs and preemptions are those of the full load.
  Latencies are of the requests that were due in the window: the last generation of them ends on
  a server that empties, and is a little too quick.
- Where it is cut off (worse, saturated, out of time) requests in flight have no record. Tokens
  are then as the server counted them; latencies are of the requests that ended, among the last
  ones the short ones. Both are an estimate.

The interval is of one launch: how much another launch of the same configuration differs (where
memory lies, which clock the device runs at) no single measurement can know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.load.workload import Request
from tuner.measuring.blocks import estimate
from tuner.measuring.ending import LOOKS
from tuner.measuring.lookout import Lookout, counters_within
from tuner.metrics.page import GENERATION_TOKENS, PROMPT_TOKENS, Snapshot
from tuner.metrics.serving import Span, measurement
from tuner.objective import score
from tuner.types import (
    ArrivalKind,
    DeviceUse,
    Interval,
    MeasureEnd,
    Measurement,
    MeasureSpec,
    MemoryFacts,
    Metric,
    ObjectiveSpec,
    RequestRecord,
    RequestStatus,
    ServerCounters,
    WorkloadSpec,
)

CUT_OFF = frozenset({MeasureEnd.WORSE, MeasureEnd.SATURATED, MeasureEnd.TIME})
"""Ends that do not wait for the requests in flight."""

_CHOSEN = frozenset({MeasureEnd.PRECISE, MeasureEnd.WORSE})
"""Ends at a moment that the interval itself chose, among many: it is wider then."""

WRONG_LENGTH = 0.05
"""The mean length of the answers may be off what was asked for by this share."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a load left.

    Attributes:
        samples: of the server's counters, from its begin to its end; `counters` sums them up.
        until_s: when it was stopped; None where it ended by itself: its last part is then the
            ramp-down, from the last request that was sent.
    """

    records: Sequence[RequestRecord]
    samples: Sequence[Snapshot]
    counters: ServerCounters
    end: MeasureEnd
    until_s: float | None = None

    @property
    def was_cut(self) -> bool:
        """Whether requests in flight were cut off; they are in no record."""
        return self.end in CUT_OFF


def figures(
    load: Finished,
    spec: WorkloadSpec,
    objective: ObjectiveSpec,
    measure: MeasureSpec,
    memory: MemoryFacts,
    device: DeviceUse,
) -> tuple[Measurement, Span | None]:
    """The measurement, and the steady part that it is of; None where all of the load counts.

    Raises:
        CounterReset, ScrapeError: see `tuner.metrics.page.counters`.
    """
    lookout = Lookout(objective.slo, spec.concurrency)
    lookout.see(load.records, load.samples)
    cuts = None
    if load.records and is_even(spec):
        last_send_s = max(record.send_s for record in load.records)
        cuts = lookout.steady_blocks(last_send_s if load.until_s is None else load.until_s)
    span = cuts.span if cuts is not None else None
    counters = load.counters if span is None else counters_within(load.samples, span)
    found = measurement(load.records, counters, memory, device, span=span, slo=objective.slo)
    if load.was_cut:
        found = _as_counted(found, lookout, span or _whole(load.samples))
    sure = None if cuts is None else estimate(lookout.blocks(cuts), objective)
    if sure is not None and objective.maximize is not Metric.MAX_RATE:
        looks = LOOKS if load.end in _CHOSEN else 1
        interval = _around(score(found, objective), sure.interval(measure.confidence, looks))
        found = replace(found, interval=interval, blocks=sure.blocks)
    return replace(found, end=load.end), span


def is_even(spec: WorkloadSpec) -> bool:
    """Whether any part of the load is like any other; not of a ramp, or a trace as recorded."""
    even = (ArrivalKind.POISSON, ArrivalKind.CONSTANT)
    return spec.concurrency is not None or spec.arrivals in even


def wrong_length(records: Sequence[RequestRecord], requests: Sequence[Request]) -> str:
    """Why the answers are not of the length that was asked for; empty if they are.

    Only of requests that ask for an exact length.
    """
    asked = {request.index: request.output_tokens for request in requests if request.ignore_eos}
    told = (RequestStatus.OK, RequestStatus.WRONG_LENGTH)
    ended = [r for r in records if r.index in asked and r.status in told]
    wanted = sum(asked[record.index] for record in ended)
    if not wanted:
        return ""
    got = sum(record.output_tokens for record in ended)
    if abs(got - wanted) <= WRONG_LENGTH * wanted:
        return ""
    return (
        f"answers have {got / len(ended):.1f} tokens on average, {wanted / len(ended):.1f} were "
        "asked for: the server does not heed ignore_eos, or max-model-len cuts them short"
    )


def typical_s(records: Sequence[RequestRecord]) -> float:
    """Median seconds a served request took; 0 where none was."""
    taken_s = sorted(r.end_s - r.send_s for r in records if r.status is RequestStatus.OK)
    return taken_s[len(taken_s) // 2] if taken_s else 0.0


def _around(value: float, interval: Interval) -> Interval:
    """The same width, as a share, around `value`: tokens are the client's in the score, and the
    server's in the blocks, where a client that is served in bursts makes no difference."""
    width = interval.half_width
    return Interval(max(0.0, value * (1 - width)), value * (1 + width), interval.confidence)


def _as_counted(found: Measurement, lookout: Lookout, span: Span) -> Measurement:
    """Throughputs in tokens as the server counted them."""
    if span.length_s <= 0:
        return found
    output, prompts = (
        float(lookout.counted(names).rises(np.array([span.start_s, span.end_s]))[0])
        for names in (GENERATION_TOKENS, PROMPT_TOKENS)
    )
    return replace(
        found,
        output_throughput_tokens_per_s=output / span.length_s,
        input_throughput_tokens_per_s=prompts / span.length_s,
    )


def _whole(samples: Sequence[Snapshot]) -> Span:
    return Span(samples[0].at_s, samples[-1].at_s)
