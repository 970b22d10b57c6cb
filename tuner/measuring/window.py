"""The part of a load that is steady: without ramp-up and ramp-down.

A load begins with an empty server and ends with one that empties. Neither is what a server in
production does, and a short measurement is mostly that. The window begins when the first
generation of requests has ended and what followed has settled, and ends when the last request
was sent.

Settled is what MSER finds (White 1997): it cuts where the standard error of what is left is
least. That is also the second half of warming up: the warm-up requests compile and capture what
the first answers need, and what of it still slows the first seconds of the load is cut here, up
to half of what was seen so far. A server that warms up for longer than that is measured warming
up; its interval is wide then, because the blocks differ.

Requests that started together go on in step for long, above all where all are of one length: the
server computes prompts for a while, then tokens for a while. What part of that a window begins
and ends with would be chance. A window therefore lasts a whole number of times as long as a
request takes, and so does each of its blocks.

A load of a few generations, such as all requests sent at once, has no steady part: then
everything counts, from the first send to the last end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.metrics.serving import Span
from tuner.types import RequestRecord

Floats = NDArray[np.float64]

GENERATIONS = 3
"""A window shorter than so many generations of requests is not steady: all of it is taken."""

FEWEST_ENDS = 16
"""Requests that end in a window, at least: its edges fall where requests end, and count less the
more there are."""

FEWEST_BLOCKS = 8
"""Below, the standard error is itself too uncertain for its t quantile to mend."""

MOST_BLOCKS = 32

SHORTEST_BLOCK_S = 0.5
"""Twice the distance of two looks at the counters: what is shorter is their interpolation."""

ENDED_A_BLOCK = 4
"""Requests that end in a block, at least: fewer are chance."""

_SETTLING_BINS = 40
_WORTH_A_CUT = 0.5


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a window is cut.

    Attributes:
        span: of all of them together.
        count: how many, of equal length; 0 where it is too short for `FEWEST_BLOCKS`.
        whole: each is at least as long as a request takes.
    """

    span: Span
    count: int
    whole: bool

    @property
    def edges_s(self) -> Floats:
        """From the first to the last."""
        return np.linspace(self.span.start_s, self.span.end_s, self.count + 1)


def in_blocks(span: Span, request_s: float, ended: int) -> Blocks:
    """Cut a window, from its end on; what is left over at its start is left out.

    A block is as long as a request takes, or a whole number of times that. In a young window
    that would be too few of them: then halves or quarters, which tell clear cases.

    Args:
        request_s: mean seconds a request takes.
        ended: requests that ended in the window.
    """
    shortest_s = max(
        SHORTEST_BLOCK_S, span.length_s / MOST_BLOCKS, ENDED_A_BLOCK * span.length_s / ended
    )
    block_s = request_s * math.ceil(shortest_s / request_s)
    for _ in range(2):
        if span.length_s < FEWEST_BLOCKS * block_s and block_s / 2 >= shortest_s:
            block_s /= 2
    count = int(span.length_s / block_s)
    length_s = block_s * count if count >= FEWEST_BLOCKS else span.length_s
    if count < FEWEST_BLOCKS and span.length_s >= request_s:
        length_s = request_s * int(span.length_s / request_s)
    start_s = max(span.start_s, span.end_s - length_s)
    if count < FEWEST_BLOCKS:
        return Blocks(Span(start_s, span.end_s), 0, whole=False)
    return Blocks(Span(start_s, span.end_s), count, whole=block_s >= request_s)


def first_generation_s(ends_s: Floats, in_flight: int) -> float:
    """When as many requests have ended as run at a time; infinite while they have not."""
    if len(ends_s) < in_flight:
        return float("inf")
    return float(np.partition(ends_s, in_flight - 1)[in_flight - 1])


def steady(ends_s: Floats, tokens: Floats, in_flight: int, until_s: float) -> Span | None:
    """The steady part of a load; None where there is none worth the name.

    Args:
        ends_s: when requests ended, in any order.
        tokens: how many each of them got.
        in_flight: how many run at a time: a closed loop's concurrency, the mean of an open one.
        until_s: when the last request was sent; now, while they are still being sent.
    """
    if len(ends_s) < (GENERATIONS + 1) * in_flight:
        return None
    start_s = first_generation_s(ends_s, in_flight)
    if until_s <= start_s:
        return None
    rates, edges_s = np.histogram(
        ends_s, bins=_SETTLING_BINS, range=(start_s, until_s), weights=tokens
    )
    start_s = float(edges_s[least_error_cut(np.asarray(rates, dtype=np.float64))])
    inside = int(np.count_nonzero((start_s < ends_s) & (ends_s <= until_s)))
    return Span(start_s, until_s) if inside >= max(FEWEST_ENDS, GENERATIONS * in_flight) else None


def mean_in_flight(sends_s: Floats, ends_s: Floats) -> int:
    """Requests at a time, by Little's law: arrivals a second times seconds in the system."""
    if not len(ends_s):
        return 1
    whole_s = float(ends_s.max() - sends_s.min())
    return max(1, round(float((ends_s - sends_s).sum()) / whole_s)) if whole_s > 0 else 1


def after_first_generation(
    records: Sequence[RequestRecord], concurrency: int | None
) -> Sequence[RequestRecord]:
    """The requests that met a loaded server: sent once the first generation had ended.

    An open loop begins with a server that idles, which flatters; a closed one with all its
    requests at once, which does the opposite.

    Args:
        concurrency: of a closed loop; None for an open one.
    """
    sends_s = np.array([record.send_s for record in records], dtype=np.float64)
    ends_s = np.array([record.end_s for record in records], dtype=np.float64)
    loaded = met_a_loaded_server(sends_s, ends_s, concurrency)
    return [record for record, counts in zip(records, loaded, strict=True) if counts]


def met_a_loaded_server(
    sends_s: Floats, ends_s: Floats, concurrency: int | None
) -> NDArray[np.bool_]:
    """The same for requests in columns: which of them count."""
    start_s = first_generation_s(ends_s, concurrency or mean_in_flight(sends_s, ends_s))
    return sends_s >= start_s


def least_error_cut(values: Floats) -> int:
    """How many leading values to leave out so that the mean of the rest is surest (MSER).

    None unless that halves the error's square: less is chance, and would leave out bursts rather
    than ramps, because they come with the largest variance.
    """
    count = len(values)
    errors = [
        float(((rest := values[cut:]) - rest.mean()) @ (rest - rest.mean())) / len(rest) ** 2
        for cut in range(count // 2 + 1)
    ]
    best = int(np.argmin(errors))
    return best if errors[best] < _WORTH_A_CUT * errors[0] else 0
