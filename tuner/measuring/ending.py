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

LOOKS = 3
"""An interval that may end a measurement is looked at every second, and is too narrow by chance
sooner or later. It is therefore taken at a stricter level, that of one of so many independent
looks (Bonferroni: 98.3 % for 95 %; Pocock's constant for three looks, Biometrika 1977, is 97.8 %).
They are that few because a look has little news before the time has doubled: means over a time
and over twice that have a correlation of 0.7. Three are 16, 32 and 64 blocks' worth of time.
Of 400 measurements 98 % hold the truth so, and 92 to 100 % in each case that ends early
(`tests/bench/measuring.py`; 95 % are meant)."""

FEWEST_TO_END = 16
"""Blocks before an interval may end a measurement. Of fewer, neither their spread nor what they
pass on to each other is known well enough for a choice of the moment at which both look small."""

_QUEUE_LOOKS = 12
_QUEUE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of a running measurement.

    Attributes:
        interval: of the score at the confidence that was asked for, after `LOOKS` looks; None
            so far.
        sure: of the score at `SURE`.
        settled: the blocks are long enough for the interval to be taken at its word, not only
            for a clear case.
        blocks: how many were seen, before any were joined.
        queue: requests that wait within the server, at even distances in time; open loop only.
        sent: requests so far, at the same times.
    """

    elapsed_s: float
    interval: Interval | None
    sure: Interval | None
    settled: bool = True
    blocks: int = 0
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
    if is_narrow(look, measure):
        return MeasureEnd.PRECISE
    return None


def _is_worse(look: Look, incumbent: float | None) -> bool:
    return incumbent is not None and worse_than(look) <= incumbent


def worse_than(look: Look) -> float:
    """The lowest score of an incumbent for which a configuration is given up."""
    share = GIVEN_UP_AT if look.settled else CLEARLY_WORSE_AT
    return look.sure.high / share if look.sure is not None else float("inf")


def is_narrow(look: Look, measure: MeasureSpec) -> bool:
    """Whether the interval is as narrow as is asked for, and can be believed."""
    if look.interval is None or not look.settled or measure.precision <= 0:
        return False
    if look.blocks < FEWEST_TO_END:
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
