"""How a load is divided among the processes that drive it."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.load.request import Request
from tuner.load.running import Pace


def shares(
    requests: Sequence[Request], pace: Pace, processes: int
) -> list[tuple[list[Request], Pace]]:
    """What each process sends, and how: every n-th conversation, so that all have the same mix.

    A request that follows no other is a conversation of its own. Each process has its part of
    the schedule, or an equal part of the concurrency; there are no more processes than
    conversations, or than requests in flight.
    """
    first_of: dict[int, int] = {}
    for request in requests:
        before = request.after
        first_of[request.index] = request.index if before is None else first_of.get(before, before)
    order = {first: place for place, first in enumerate(dict.fromkeys(first_of.values()))}
    processes = max(1, min(processes, len(order), pace.concurrency or len(order)))
    parts: list[list[int]] = [[] for _ in range(processes)]
    for place, request in enumerate(requests):
        parts[order[first_of[request.index]] % processes].append(place)
    return [
        ([requests[place] for place in part], _share_of(pace, part, number, processes))
        for number, part in enumerate(parts)
    ]


def _share_of(pace: Pace, part: Sequence[int], number: int, processes: int) -> Pace:
    if pace.due_s is not None:
        return Pace(due_s=[pace.due_s[place] for place in part])
    concurrency = pace.concurrency or 1
    return Pace(concurrency=concurrency // processes + (number < concurrency % processes))
