"""Token lengths drawn from a distribution."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tuner.types import LengthBin, LengthKind, LengthSpec

LONGEST_TOKENS = 2**31 - 1


def draw(lengths: LengthSpec, count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` lengths: rounded, cut at the spec's bounds, at least 1.

    The first ones of a longer draw are those of a shorter one with the same generator.
    """
    low, high = max(1, lengths.minimum), lengths.maximum or LONGEST_TOKENS
    drawn = np.rint(_drawn(lengths, count, rng))
    return [int(length) for length in np.clip(drawn, low, high)]


def _drawn(lengths: LengthSpec, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    match lengths.kind:
        case LengthKind.NORMAL:
            return rng.normal(lengths.mean, lengths.stdev, count)
        case LengthKind.UNIFORM:
            low, high = lengths.minimum, lengths.maximum or lengths.minimum
            return _between(rng.random(count), np.full(count, low), np.full(count, high))
        case LengthKind.LOGNORMAL:
            mu, sigma = lognormal_parameters(lengths.mean, lengths.stdev)
            return rng.lognormal(mu, sigma, count)
        case LengthKind.HISTOGRAM:
            return _from_bins(lengths.bins, count, rng)


def lognormal_parameters(mean: float, stdev: float) -> tuple[float, float]:
    """Mean and deviation of the logarithm, from those of the lengths themselves.

    sigma^2 = ln(1 + stdev^2 / mean^2), mu = ln(mean) - sigma^2 / 2.
    """
    variance = math.log1p((stdev / mean) * (stdev / mean))
    return math.log(mean) - variance / 2, math.sqrt(variance)


def mean_of_bins(bins: tuple[LengthBin, ...]) -> float:
    """Expected length of a histogram."""
    total = math.fsum(bin_.weight for bin_ in bins)
    return math.fsum(bin_.weight * (bin_.low + bin_.high) / 2 for bin_ in bins) / total


def _from_bins(
    bins: tuple[LengthBin, ...], count: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    # Two numbers a length, side by side: a longer draw begins as a shorter one.
    chance = rng.random((count, 2))
    edges = np.cumsum([bin_.weight for bin_ in bins])
    places = np.searchsorted(edges / edges[-1], chance[:, 0], side="right")
    lows = np.array([bin_.low for bin_ in bins])[places]
    highs = np.array([bin_.high for bin_ in bins])[places]
    return _between(chance[:, 1], lows, highs)


def _between(
    chance: NDArray[np.float64], lows: NDArray[np.int64], highs: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Whole numbers from low to high, both included, equally likely."""
    return np.floor(lows + chance * (highs - lows + 1))
