"""The energy that devices take, between any two times of a server's life.

Which part of a load was steady is known only when it is over, so that the devices' counter is
kept as it was at each look, and read in between: linearly, as if their power had not changed
from one look to the next (a second).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise


class EnergyMeter:
    """Remembers a counter of joules over time.

    Args:
        read: the counter now; None where there is none.
        clock: seconds; `time.perf_counter`, as records of requests have it.
    """

    def __init__(
        self,
        read: Callable[[], float | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read = read
        self._clock = clock
        self._seen: list[tuple[float, float]] = []

    def reset(self) -> None:
        """Forget what was seen."""
        self._seen = []

    def sample(self) -> None:
        """Look at the counter."""
        energy_j = self._read()
        if energy_j is not None:
            self._seen.append((self._clock(), energy_j))

    def between_j(self, start_s: float, end_s: float) -> float | None:
        """Joules taken between two times; looks once more first.

        None where the counter was not seen before `start_s` and after `end_s`, or was set back
        between (the driver was loaded again).
        """
        self.sample()
        if not self._seen or not self._seen[0][0] <= start_s <= end_s <= self._seen[-1][0]:
            return None
        first = bisect_right(self._seen, start_s, key=_time) - 1
        last = bisect_right(self._seen, end_s, key=_time)
        around = self._seen[first : last + 1]
        if any(later < earlier for (_, earlier), (_, later) in pairwise(around)):
            return None
        return self._at(end_s) - self._at(start_s)

    def _at(self, at_s: float) -> float:
        place = bisect_right(self._seen, at_s, key=_time)
        before_s, before_j = self._seen[place - 1]
        if place == len(self._seen):
            return before_j
        after_s, after_j = self._seen[place]
        return before_j + (after_j - before_j) * (at_s - before_s) / (after_s - before_s)


def _time(seen: tuple[float, float]) -> float:
    return seen[0]
