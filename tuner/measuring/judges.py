"""Who looks at a running load and says when enough was seen: for a score, or for an SLO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tuner.measuring.blocks import estimate
from tuner.measuring.ending import LOOKS, SURE, Look, ending, is_saturated
from tuner.measuring.lookout import Lookout, Seen
from tuner.measuring.proportions import at_least, at_most
from tuner.measuring.window import met_a_loaded_server
from tuner.metrics.slo import keeps
from tuner.types import MeasureEnd, MeasureSpec, Metric, ObjectiveSpec, SloLimit


class Judge(Protocol):
    """Asked every second.

    Attributes:
        known: what is known so far, for the person at the keyboard; empty while nothing is.
    """

    known: str

    def end(self, seen: Seen) -> MeasureEnd | None:
        """Why to stop now, or None to go on."""


class TimeJudge:
    """For a load that changes by itself, a ramp or a trace: any part of it is another load, so
    that it counts only as a whole."""

    def __init__(self, measure: MeasureSpec) -> None:
        self.known = ""
        self._measure = measure

    def end(self, seen: Seen) -> MeasureEnd | None:
        """See `Judge`."""
        return _time(seen, self._measure)


class ScoreJudge:
    """For a throughput or goodput: until its interval is narrow, or hopeless.

    A queue that only grows ends the measurement of a throughput, which is the server's capacity
    then. Goodput goes on falling while it grows, and is measured to the end.

    Args:
        concurrency: of a closed loop; None for an open one.
        incumbent: see `tuner.measuring.ending.ending`.
    """

    def __init__(
        self,
        measure: MeasureSpec,
        objective: ObjectiveSpec,
        concurrency: int | None,
        incumbent: float | None,
    ) -> None:
        self.known = ""
        self._measure = measure
        self._objective = objective
        self._incumbent = incumbent
        self._lookout = Lookout(objective.slo, concurrency)
        self._can_saturate = concurrency is None and objective.maximize is not Metric.GOODPUT
        self._queue = _Queue()

    def end(self, seen: Seen) -> MeasureEnd | None:
        """See `Judge`."""
        return ending(self.look(seen), self._measure, self._incumbent)

    def look(self, seen: Seen) -> Look:
        """What is known by now."""
        self._lookout.see(seen.records, seen.samples)
        if self._can_saturate:
            self._queue.see(seen)
        cuts = self._lookout.steady_blocks(seen.known_until_s)
        blocks = self._lookout.blocks(cuts) if cuts is not None else []
        found = estimate(blocks, self._objective)
        look = Look(
            seen.elapsed_s,
            interval=found.interval(self._measure.confidence, LOOKS) if found else None,
            sure=found.interval(SURE) if found else None,
            settled=cuts is not None and cuts.whole,
            blocks=len(blocks),
            queue=self._queue.waiting,
            sent=self._queue.sent,
        )
        if look.interval is not None and found is not None:
            self.known = f"score {found.score:.1f} ±{look.interval.half_width:.1%}"
        return look


class SloJudge:
    """For one load of a search: until it is sure whether it meets the SLO.

    Only requests that met a loaded server count. What is in flight may yet fail: it counts as
    missed for the answer yes, and not at all for the answer no.
    """

    def __init__(
        self, slo: Sequence[SloLimit], measure: MeasureSpec, concurrency: int | None
    ) -> None:
        self.known = ""
        self._slo = slo
        self._measure = measure
        self._concurrency = concurrency
        self._queue = _Queue()
        self._sends_s: list[float] = []
        self._ends_s: list[float] = []
        self._kept: list[list[bool]] = []

    def end(self, seen: Seen) -> MeasureEnd | None:
        """See `Judge`: PRECISE means that it surely meets the SLO, WORSE that it does not."""
        in_flight = seen.sent - len(seen.records)
        if (known := self._answer(seen, in_flight)) is not None:
            return known
        if self._concurrency is None:
            self._queue.see(seen)
            look = Look(
                seen.elapsed_s, None, None, queue=self._queue.waiting, sent=self._queue.sent
            )
            if is_saturated(look):
                return MeasureEnd.SATURATED
        return _time(seen, self._measure)

    def _answer(self, seen: Seen, in_flight: int) -> MeasureEnd | None:
        for record in seen.records[len(self._ends_s) :]:
            self._sends_s.append(record.send_s)
            self._ends_s.append(record.end_s)
            self._kept.append([keeps(record, limit) for limit in self._slo])
        loaded = met_a_loaded_server(
            np.asarray(self._sends_s), np.asarray(self._ends_s), self._concurrency
        )
        count = int(loaded.sum())
        if not count:
            return None
        needed = [limit.percentile / 100 for limit in self._slo]
        kept = np.asarray(self._kept)[loaded].sum(axis=0).tolist()
        scarcest = min(good / count / share for good, share in zip(kept, needed, strict=True))
        self.known = f"{scarcest:.0%} of the SLO"
        pairs = list(zip(kept, needed, strict=True))
        if any(at_most(good, count, SURE) < share for good, share in pairs):
            return MeasureEnd.WORSE
        if all(at_least(good, count + in_flight, SURE) >= share for good, share in pairs):
            return MeasureEnd.PRECISE
        return None


@dataclass(slots=True)
class _Queue:
    """What waited within the server, and what had been sent, at each look."""

    waiting: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def see(self, seen: Seen) -> None:
        self.waiting.append(seen.samples[-1].waiting if seen.samples else 0.0)
        self.sent.append(seen.sent)


def _time(seen: Seen, measure: MeasureSpec) -> MeasureEnd | None:
    is_over = measure.time_s is not None and seen.elapsed_s >= measure.time_s
    return MeasureEnd.TIME if is_over else None
