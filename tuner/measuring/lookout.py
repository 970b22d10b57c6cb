"""What is known of a load, in columns and in blocks: while it runs, and at its end.

How requests ended is in their records. Tokens are as the server counted them: those of requests
that are still under way are in no record yet, so that the last moments of a load that goes on,
or was cut off, would look idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tuner.measuring import window
from tuner.measuring.blocks import (
    Block,
    Curve,
    Events,
    cut,
)
from tuner.metrics.page import (
    GENERATION_TOKENS,
    PREEMPTIONS,
    PROMPT_TOKENS,
    Snapshot,
    counters,
)
from tuner.metrics.serving import Span
from tuner.metrics.slo import meets
from tuner.types import RequestRecord, RequestStatus, ServerCounters, SloLimit


@dataclass(frozen=True, slots=True)
class Seen:
    """A load at one moment.

    Attributes:
        now_s: on the clock of records and samples.
        elapsed_s: since the load began.
        sent: requests so far; those of them without a record are in flight.
        records, samples: as they became known; a later moment's begin with an earlier one's.
    """

    now_s: float
    elapsed_s: float
    sent: int
    records: Sequence[RequestRecord]
    samples: Sequence[Snapshot]

    @property
    def known_until_s(self) -> float:
        """Up to when the server's counters are known; minus infinity before they were read."""
        return min(self.now_s, self.samples[-1].at_s) if self.samples else float("-inf")


@dataclass(slots=True)
class Lookout:
    """Follows one load, moment by moment; each record and sample is looked at once.

    A look every second at all of a million tokens would keep the client from its work.

    Args:
        concurrency: of a closed loop; None for an open one.
    """

    slo: Sequence[SloLimit]
    concurrency: int | None
    _sends_s: list[float] = field(default_factory=list)
    _ends_s: list[float] = field(default_factory=list)
    _tokens: list[float] = field(default_factory=list)
    _served: list[float] = field(default_factory=list)
    _good: list[float] = field(default_factory=list)
    _times_s: list[float] = field(default_factory=list)
    _counts: dict[Sequence[str], list[float]] = field(
        default_factory=lambda: {PREEMPTIONS: [], GENERATION_TOKENS: [], PROMPT_TOKENS: []}
    )

    def see(self, records: Sequence[RequestRecord], samples: Sequence[Snapshot]) -> None:
        """Take in what is new."""
        for record in records[len(self._ends_s) :]:
            is_served = record.status is RequestStatus.OK
            self._sends_s.append(record.send_s)
            self._ends_s.append(record.end_s)
            self._tokens.append(float(record.output_tokens))
            self._served.append(is_served)
            self._good.append(is_served and meets(record, self.slo))
        for sample in samples[len(self._times_s) :]:
            self._times_s.append(sample.at_s)
            for names, values in self._counts.items():
                values.append(sum(sample.series(names).values()))

    def steady_blocks(self, until_s: float) -> window.Blocks | None:
        """The steady part of what was seen."""
        sends_s, ends_s = np.asarray(self._sends_s), np.asarray(self._ends_s)
        in_flight = self.concurrency or window.mean_in_flight(sends_s, ends_s)
        span = window.steady(ends_s, np.asarray(self._tokens), in_flight, until_s)
        if span is None:
            return None
        inside = (span.start_s < ends_s) & (ends_s <= span.end_s)
        request_s = float((ends_s - sends_s)[inside].mean())
        return window.in_blocks(span, max(request_s, 1e-6), int(np.count_nonzero(inside)))

    def counted(self, names: Sequence[str]) -> Curve:
        """One of the server's counters over time."""
        return Curve(self._times_s, self._counts[names])

    def blocks(self, cuts: window.Blocks) -> list[Block]:
        """What came in each block."""
        if not cuts.count:
            return []
        ends_s = np.asarray(self._ends_s)
        return cut(
            cuts.edges_s,
            output=self.counted(GENERATION_TOKENS),
            prompts=self.counted(PROMPT_TOKENS),
            ended=Events(ends_s, np.ones(len(ends_s))),
            served=Events(ends_s, np.asarray(self._served, dtype=np.float64)),
            good=Events(ends_s, np.asarray(self._good, dtype=np.float64)),
            preemptions=self.counted(PREEMPTIONS),
        )


def counters_within(samples: Sequence[Snapshot], span: Span) -> ServerCounters:
    """What the server counted between the readings nearest to both ends of a window.

    Raises:
        CounterReset, ScrapeError: see `tuner.metrics.page.counters`.
    """
    first, last = (
        min(range(len(samples)), key=lambda place: abs(samples[place].at_s - at_s))
        for at_s in (span.start_s, span.end_s)
    )
    return counters(samples[first], samples[first + 1 : last], samples[max(first, last)])
