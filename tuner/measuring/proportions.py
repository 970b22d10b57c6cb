"""How sure a share is of which some were seen: one-sided Clopper-Pearson bounds."""

from __future__ import annotations

from scipy import stats


def at_least(kept: int, count: int, confidence: float) -> float:
    """The lower bound of a share of which `kept` of `count` were seen."""
    if kept <= 0:
        return 0.0
    return float(stats.beta.ppf(1 - confidence, kept, count - kept + 1))


def at_most(kept: int, count: int, confidence: float) -> float:
    """The upper bound."""
    if kept >= count:
        return 1.0
    return float(stats.beta.ppf(confidence, kept + 1, count - kept))
