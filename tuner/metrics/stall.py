"""A server that stands still with work before it: a hang, seen from its own counters.

/health of a vLLM that hangs answers 200, and its log says nothing or repeats itself. What
moves with every step of the engine are its counters. Times here are seconds on one monotonic
clock, which the caller reads.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

GAP_SHARE = 1 / 3
"""Longest pause between two looks, as a share of the limit, of which anything can be said."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a server showed.

    Attributes:
        progress: equal exactly as long as the server does nothing; None where it did not tell.
        running, waiting: requests, as the server counts them. Its gauges keep what they had at
            the last step, also of requests whose clients have gone: they are for the message.
        in_flight: requests, as their sender counts them: what a hang can keep waiting.
    """

    progress: Hashable | None
    running: int = 0
    waiting: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Standstill:
    """How long nothing has moved, and what was waiting for it.

    Attributes:
        lasted_s: how long requests have waited without any progress.
        silent: the server's counters could not be read either.
        last: the latest look; running and waiting are the server's last word.
    """

    lasted_s: float = 0.0
    silent: bool = False
    last: Look = Look(None)

    def words(self) -> str:
        """Such as `no token for 120 s while 12 requests run and 52 wait`."""
        what = "no answer from /metrics" if self.silent else "no token"
        look = self.last
        if self.silent or not look.running + look.waiting:
            under_way = _requests(look.in_flight)
            return f"{what} for {self.lasted_s:.0f} s with {under_way} under way"
        runs = "runs" if look.running == 1 else "run"
        waits = "waits" if look.waiting == 1 else "wait"
        return (
            f"{what} for {self.lasted_s:.0f} s while {_requests(look.running)} {runs} "
            f"and {look.waiting} {waits}"
        )


class StallWatch:
    """Adds up the time in which a server had requests and nothing moved.

    Only time that was looked at counts: after a longer gap (this program was stopped, or the
    machine slept) nobody knows what the server would have done in it.

    Args:
        longest_gap_s: between two looks.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._seen_s: float | None = None
        self._progress: Hashable | None = None
        self._still = Standstill()
        self._longest = Standstill()

    @property
    def standstill(self) -> Standstill:
        """As of the last look."""
        return self._still

    @property
    def longest(self) -> Standstill:
        """The longest since `forget`, also where it is over: requests that ran out of time in
        it are under way no more."""
        return self._longest

    def forget(self) -> None:
        """What was before does not count any more in `longest`."""
        self._longest = self._still

    def saw(self, now_s: float, look: Look) -> Standstill:
        """Take a look into account; how long nothing has moved by now."""
        self._still = self._after(now_s, look)
        if self._still.lasted_s >= self._longest.lasted_s:
            self._longest = self._still
        return self._still

    def _after(self, now_s: float, look: Look) -> Standstill:
        gap_s = 0.0 if self._seen_s is None else now_s - self._seen_s
        self._seen_s = now_s
        moved = False
        if look.progress is None:
            last = self._still.last
            look = replace(look, running=last.running, waiting=last.waiting)
        else:
            moved, self._progress = look.progress != self._progress, look.progress
        if moved or not look.in_flight:
            return Standstill(last=look)
        counted_s = gap_s if gap_s <= self._longest_gap_s else 0.0
        lasted_s = self._still.lasted_s + counted_s
        return Standstill(lasted_s, silent=look.progress is None, last=look)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
