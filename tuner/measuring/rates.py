"""The highest load that meets an SLO, from probes whose answers are noisy.

Whether a load meets the SLO is a monotone question with noisy answers: of two probes the higher
may by chance do better. The search brackets the answer by doubling (or halving), then bisects by
ratio. At the end all probes are taken together: attainment is made monotone in the load by
isotonic regression weighted by requests, and the answer is where it crosses 1. The interval
reaches from the highest load that surely met the SLO to the lowest that surely did not, where
the requests of neighbouring probes count together: what met it at a higher load would at a
lower one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
from scipy import optimize

from tuner.measuring.proportions import at_least, at_most
from tuner.types import Interval, RateProbe, RateSearch

FACTOR = 2.0
"""From one probe to the next while the answer is not bracketed."""

NARROW = 1.06
"""Ratio of the bracket's ends at which the search ends: noise allows no finer answer."""

MOST_PROBES = 12


class RateFinder:
    """Says which load to probe next.

    Args:
        start: the first load.
        least, most: bounds; whole numbers only where `whole` (concurrencies).
        needed: share of requests that the scarcest limit asks for, such as 0.99.
    """

    def __init__(
        self,
        start: float,
        *,
        least: float,
        most: float,
        needed: float,
        whole: bool = False,
        confidence: float = 0.95,
    ) -> None:
        self._start = start
        self._least, self._most = least, most
        self._needed = needed
        self._whole = whole
        self._confidence = confidence
        self.probes: list[RateProbe] = []
        self._undriven = float("inf")
        self._why = ""

    def next_load(self) -> float | None:
        """The next load to probe; None when the answer is known as well as it can be."""
        if len(self.probes) >= MOST_PROBES:
            return None
        low, high = self._bracket()
        load = self._between(low, high)
        if load is not None and load >= self._undriven:
            load = self._lower() if not self.probes else None
        tried = any(probe.load == load for probe in self.probes)
        return None if load is None or tried else load

    def tell(self, probe: RateProbe) -> None:
        """What came of a load."""
        self.probes.append(probe)

    def cannot_drive(self, load: float, why: str) -> None:
        """The client cannot offer `load`: neither it nor a higher one will be asked for."""
        if load < self._undriven:
            self._undriven, self._why = load, why

    def result(self) -> RateSearch:
        """The answer from all probes; a load of 0 where none met the SLO."""
        probes = sorted(self.probes, key=lambda probe: probe.load)
        load = crossing(probes)
        failed = min((probe.load for probe in probes if not probe.met), default=float("inf"))
        is_limited = self._undriven < failed
        if is_limited:
            probes = [probe for probe in probes if probe.load < self._undriven]
            load = crossing(probes)
        low = max((x for x in self._surely_met(probes) if x <= load), default=0.0)
        missed = [x for x in self._surely_missed(probes) if x >= load]
        high = self._undriven if is_limited else min(missed, default=self._not_surely(failed))
        interval = Interval(low, high, self._confidence)
        why = self._why if is_limited else ""
        return RateSearch(load, interval, tuple(self.probes), why)

    def _not_surely(self, failed: float) -> float:
        """Where nothing surely missed: the lowest that did by what was seen, or the bound."""
        return failed if failed < float("inf") else self._most

    def _lower(self) -> float | None:
        """Where to begin instead of at a load that cannot be driven."""
        load = self._rounded(self._undriven / FACTOR)
        return load if self._least <= load < self._undriven else None

    def _surely_met(self, probes: Sequence[RateProbe]) -> list[float]:
        return [
            probe.load
            for first, probe in enumerate(probes)
            if any(
                self._bound(probes[first : last + 1], upper=False) >= self._needed
                for last in range(first, len(probes))
            )
        ]

    def _surely_missed(self, probes: Sequence[RateProbe]) -> list[float]:
        return [
            probe.load
            for last, probe in enumerate(probes)
            if any(
                self._bound(probes[first : last + 1], upper=True) < self._needed
                for first in range(last + 1)
            )
        ]

    def _bracket(self) -> tuple[float | None, float | None]:
        """The highest load below every failed probe that met the SLO, and the lowest that
        failed."""
        failed = min((p.load for p in self.probes if not p.met), default=None)
        met = [p.load for p in self.probes if p.met and (failed is None or p.load < failed)]
        return max(met, default=None), failed

    def _between(self, low: float | None, high: float | None) -> float | None:
        if low is None and high is None:
            return self._rounded(min(max(self._start, self._least), self._most))
        if high is None:
            assert low is not None
            return None if low >= self._most else self._rounded(min(low * FACTOR, self._most))
        if low is None:
            return None if high <= self._least else self._rounded(max(high / FACTOR, self._least))
        narrow = high - low <= 1 if self._whole else high / low <= NARROW
        return None if narrow else self._rounded(sqrt(low * high))

    def _rounded(self, load: float) -> float:
        return float(round(load)) if self._whole else load

    def _bound(self, probes: Sequence[RateProbe], *, upper: bool) -> float:
        """Of the share of requests that met the SLO in these probes together."""
        requests = sum(probe.requests for probe in probes)
        kept = sum(round(min(1.0, p.attained * self._needed) * p.requests) for p in probes)
        bound = at_most if upper else at_least
        return bound(kept, requests, self._confidence)


def crossing(probes: Sequence[RateProbe]) -> float:
    """The load at which attainment, made monotone, falls below 1.

    Args:
        probes: by rising load.

    Returns:
        Interpolated between the last load that met and the first that did not; the highest
        load if all met, 0 if none did.
    """
    if not probes:
        return 0.0
    loads = np.array([probe.load for probe in probes])
    fitted = optimize.isotonic_regression(
        [probe.attained for probe in probes],
        weights=[max(1, probe.requests) for probe in probes],
        increasing=False,
    ).x
    met = fitted >= 1.0 - 1e-9
    if not met.any():
        return 0.0
    last = int(np.nonzero(met)[0][-1])
    if last == len(loads) - 1:
        return float(loads[-1])
    over, under = fitted[last] - 1.0, 1.0 - fitted[last + 1]
    share = over / (over + under) if over + under > 0 else 0.0
    return float(loads[last] * (loads[last + 1] / loads[last]) ** share)
