"""The score's interval from one run, by batch means.

What happens under a load is correlated from one moment to the next, so that requests or tokens
are no independent samples. The window is therefore cut into blocks that are long against that
correlation, and the blocks are the samples (batch means: Law, Simulation Modeling and Analysis,
ch. 9). The score is a ratio of sums, so its interval is the jackknife's: each block is left out
once, and the spread of the scores without it gives the standard error (Miller 1974).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import stats

from tuner.measuring.window import FEWEST_BLOCKS, Floats
from tuner.objective import Figures, score_of
from tuner.types import Interval, ObjectiveSpec

_CORRELATED = 0.25
"""Lag-1 correlation of blocks from which two are joined to one."""

LEAST_ERROR = 0.006
"""Standard error as a share of the score below which blocks of one run prove nothing: where all
requests are alike, blocks are too, but the machine's pace wanders more slowly than they follow
each other, and runs differ by 0.7 % (`tests/bench/measuring.py`, fixed lengths: blocks of 10 s
had a correlation of 0.48, the next but one of 0.26, which some twenty blocks often do not show).
One run thus never promises more than some ±1.2 %."""

_MOST_PASSED_ON = 0.8
"""Of few blocks it cannot be told how much more it is."""


@dataclass(frozen=True, slots=True)
class Block:
    """What came of a piece of time; counts may be fractions at its edges.

    Attributes:
        ended: requests that ended, however; `served` of them with an answer, `good` within
            the SLO.
    """

    seconds: float
    output_tokens: float = 0.0
    input_tokens: float = 0.0
    ended: float = 0.0
    served: float = 0.0
    good: float = 0.0
    preemptions: float = 0.0

    def __add__(self, other: Block) -> Block:
        return Block(*(a + b for a, b in zip(self._values, other._values, strict=True)))

    def __sub__(self, other: Block) -> Block:
        return Block(*(a - b for a, b in zip(self._values, other._values, strict=True)))

    @property
    def _values(self) -> tuple[float, ...]:
        return (
            self.seconds,
            self.output_tokens,
            self.input_tokens,
            self.ended,
            self.served,
            self.good,
            self.preemptions,
        )


class Rising(Protocol):
    """Something that is counted."""

    def rises(self, edges_s: Floats) -> Floats:
        """How much came between each two edges: after the one, up to the other."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A counter as it was read: times in seconds, rising, and values.

    Between two readings it is taken to have risen evenly.
    """

    times_s: Sequence[float]
    values: Sequence[float]

    def rises(self, edges_s: Floats) -> Floats:
        """See `Rising`; 0 where it was never read."""
        if not self.times_s:
            return np.zeros(len(edges_s) - 1)
        return np.diff(np.interp(edges_s, self.times_s, self.values))


@dataclass(frozen=True, slots=True)
class Events:
    """What is known one by one: times in seconds, in any order, and how much each counts."""

    times_s: Floats
    weights: Floats

    def rises(self, edges_s: Floats) -> Floats:
        """See `Rising`."""
        places = np.searchsorted(edges_s, self.times_s, side="left") - 1
        inside = (places >= 0) & (places < len(edges_s) - 1)
        counts = np.bincount(
            places[inside], weights=self.weights[inside], minlength=len(edges_s) - 1
        )
        return np.asarray(counts, dtype=np.float64)


def cut(
    edges_s: Floats,
    *,
    output: Rising,
    prompts: Rising,
    ended: Rising,
    served: Rising,
    good: Rising,
    preemptions: Rising,
) -> list[Block]:
    """What came between `edges_s`, as blocks."""
    parts = (output, prompts, ended, served, good, preemptions)
    columns = (part.rises(edges_s).tolist() for part in parts)
    return [Block(*row) for row in zip(np.diff(edges_s).tolist(), *columns, strict=True)]


def total(blocks: Sequence[Block]) -> Block:
    """All of them as one."""
    return sum(blocks, start=Block(0.0))


def block_score(block: Block, objective: ObjectiveSpec) -> float:
    """The score as if this block were the measurement (`tuner.objective`)."""
    if block.seconds <= 0 or block.served <= 0:
        return 0.0
    figures = Figures(
        output_per_s=block.output_tokens / block.seconds,
        input_per_s=block.input_tokens / block.seconds,
        served_per_s=block.served / block.seconds,
        good_per_s=block.good / block.seconds,
        served=block.served,
        offered=block.ended,
        preemptions=block.preemptions,
    )
    return score_of(figures, objective)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The score of some blocks, with its standard error.

    Attributes:
        blocks: that it rests on, after those that hang together were joined.
    """

    score: float
    error: float
    blocks: int

    def interval(self, confidence: float, looks: int = 1) -> Interval:
        """Where the score lies.

        Args:
            looks: how many independent ones there were at it, of which any could have been the
                last: each has its part of the error that may be made (Bonferroni).
        """
        beyond = (1 - confidence) / looks / 2
        half = float(stats.t.isf(beyond, self.blocks - 1)) * self.error
        return Interval(max(0.0, self.score - half), self.score + half, confidence)


def estimate(blocks: Sequence[Block], objective: ObjectiveSpec) -> Estimate | None:
    """The score; None of fewer than `FEWEST_BLOCKS` blocks, or without any.

    Blocks that still hang together are joined first, so that the interval does not promise
    more than was seen; where they are too few to be joined, it is widened as for a process in
    which each block passes on a part of itself to the next (AR(1)).
    """
    blocks = list(blocks)
    if len(blocks) < FEWEST_BLOCKS:
        return None
    pseudo = _pseudo_values(blocks, objective)
    while len(blocks) >= 2 * FEWEST_BLOCKS and _passed_on(pseudo) > _CORRELATED:
        blocks = [a + b for a, b in zip(blocks[-2::-2], blocks[::-2], strict=False)][::-1]
        pseudo = _pseudo_values(blocks, objective)
    score = block_score(total(blocks), objective)
    if score <= 0:
        return None
    error = float(pseudo.std(ddof=1)) / len(blocks) ** 0.5
    passed_on = min(_MOST_PASSED_ON, max(0.0, _passed_on(pseudo)))
    error *= ((1 + passed_on) / (1 - passed_on)) ** 0.5
    return Estimate(score, max(error, LEAST_ERROR * score), len(blocks))


def _pseudo_values(blocks: Sequence[Block], objective: ObjectiveSpec) -> Floats:
    count, whole = len(blocks), total(blocks)
    all_in = block_score(whole, objective)
    return np.array(
        [count * all_in - (count - 1) * block_score(whole - block, objective) for block in blocks],
        dtype=np.float64,
    )


def _passed_on(values: Floats) -> float:
    """Correlation of each value with the next, in the long run.

    Taken around the values' own mean it comes out too low, by (1 + 4 r) / n (Marriott and Pope
    1954): of eight blocks with a correlation of a half, an eighth shows.
    """
    found = _lag_one(values)
    return found + (1 + 4 * found) / len(values)


def _lag_one(values: Floats) -> float:
    """Correlation of each value with the next; 0 where they are all the same."""
    centered = values - values.mean()
    spread = float(centered @ centered)
    return float(centered[:-1] @ centered[1:]) / spread if spread > 0 else 0.0
