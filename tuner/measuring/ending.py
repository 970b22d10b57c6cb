"""Whether a measurement has seen enough: pure functions of what was seen so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.types import Interval, MeasureEnd, MeasureSpec

SURE = 0.999
"""Confidence with which a configuration is given up: one that would have won is lost for
good, and the question is asked many times in a measurement."""

GIVEN_UP_AT = 0.97
"""Of the incumbent's score: what comes closer may yet be as good, and is measured in full."""

CLEARLY_WORSE_AT = 0.8
"""The same while blocks are shorter than requests, so that their interval may be too narrow."""

NARROW_FOR = 0.03
"""Share of the time so far for which the interval must have been narrow. Asked every second, it
is too narrow by chance sooner or later: of intervals that ended a measurement at the first look,
83 % held the truth, with this 92 % (`tests/bench/measuring.py`; 95 % are meant)."""

_QUEUE_LOOKS = 12
_QUEUE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of a running measurement.

    Attributes:
        interval: of the score at the confidence that was asked for; None so far.
        sure: the same at `SURE`.
        settled: the blocks are long enough for the interval to be taken at its word, not only
            for a clear case.
        narrow_s: for how long by now the interval has been as narrow as is asked for.
        queue: requests that wait within the server, at even distances in time; open loop only.
        sent: requests so far, at the same times.
    """

    elapsed_s: float
    interval: Interval | None
    sure: Interval | None
    settled: bool = True
    narrow_s: float = 0.0
    queue: Sequence[float] = ()
    sent: Sequence[int] = ()


def ending(look: Look, measure: MeasureSpec, incumbent: float | None) -> MeasureEnd | None:
    """Why to stop now, or None to go on.

    Args:
        incumbent: the low end of the best score so far; None without one.
    """
    if measure.time_s is not None and look.elapsed_s >= measure.time_s:
        return MeasureEnd.TIME
    if is_saturated(look):
        return MeasureEnd.SATURATED
    if measure.stop_worse and _is_worse(look, incumbent):
        return MeasureEnd.WORSE
    if is_narrow(look, measure) and look.narrow_s >= NARROW_FOR * look.elapsed_s:
        return MeasureEnd.PRECISE
    return None


def _is_worse(look: Look, incumbent: float | None) -> bool:
    return incumbent is not None and worse_than(look) <= incumbent


def worse_than(look: Look) -> float:
    """The lowest score of an incumbent for which a configuration is given up."""
    share = GIVEN_UP_AT if look.settled else CLEARLY_WORSE_AT
    return look.sure.high / share if look.sure is not None else float("inf")


def is_narrow(look: Look, measure: MeasureSpec) -> bool:
    """Whether the interval is, at this look, as narrow as is asked for."""
    if look.interval is None or not look.settled or measure.precision <= 0:
        return False
    return look.interval.half_width <= measure.precision


def is_saturated(look: Look) -> bool:
    """Whether requests of an open loop come faster than they are served, and only wait longer.

    What waits has grown all through the second half of the time so far, in the end of it still
    half as fast as in its beginning, and by a tenth and more of the requests that came.
    The queue within the server is looked at, and not what is in flight: that also grows while
    an empty server fills.
    """
    count = len(look.queue)
    if count < _QUEUE_LOOKS or look.sent[-1] == 0:
        return False
    marks = [round(place) for place in np.linspace(count // 2, count - 1, 5)]
    queue = np.asarray([look.queue[mark] for mark in marks], dtype=np.float64)
    arrived = look.sent[-1] - look.sent[marks[0]]
    rising = bool(np.all(np.diff(queue) > 0))
    goes_on = bool(queue[4] - queue[2] >= (queue[2] - queue[0]) / 2)
    return rising and goes_on and bool(queue[4] - queue[0] >= _QUEUE_SHARE * arrived)
