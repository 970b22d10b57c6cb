"""When a server with requests is said to stand still; times are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.metrics.stall import Look, StallWatch, Standstill


def watched(
    until_s: float,
    look: Callable[[float], Look],
    *,
    every_s: float = 0.25,
    watch: StallWatch | None = None,
    since_s: float = 0.0,
) -> StallWatch:
    """A watch that has looked regularly."""
    watch = watch or StallWatch(longest_gap_s=40.0)
    steps = round((until_s - since_s) / every_s)
    for step in range(steps + 1):
        now_s = since_s + step * every_s
        watch.saw(now_s, look(now_s))
    return watch


def busy(progress: float | None, in_flight: int = 3) -> Look:
    return Look(progress, running=2, waiting=1, in_flight=in_flight)


def test_stall_watch_adds_up_time_without_progress() -> None:
    watch = watched(120.0, lambda now_s: busy(7.0))
    assert watch.standstill.lasted_s == pytest.approx(120.0)


def test_stall_watch_counts_from_the_last_progress() -> None:
    watch = watched(100.0, lambda now_s: busy(min(now_s, 30.0)))
    assert watch.standstill.lasted_s == pytest.approx(70.0)


def test_stall_watch_of_a_slow_server_sees_no_standstill() -> None:
    watch = watched(600.0, lambda now_s: busy(now_s // 60))
    assert watch.standstill.lasted_s < 60


def test_stall_watch_does_not_mind_an_idle_server_between_arrivals() -> None:
    watch = watched(600.0, lambda now_s: Look(7.0, in_flight=0))
    assert watch.standstill.lasted_s == 0
    watched(610.0, lambda now_s: busy(7.0), watch=watch, since_s=600.25)
    assert watch.standstill.lasted_s == pytest.approx(10.0)


def test_stall_watch_does_not_believe_gauges_that_nobody_waits_behind() -> None:
    """vLLM's gauges keep what they had at the last step, also of clients that have gone."""
    left_behind = Look(7.0, running=4, waiting=9, in_flight=0)
    assert watched(600.0, lambda now_s: left_behind).standstill.lasted_s == 0


def test_stall_watch_does_not_count_the_time_in_which_this_program_was_stopped() -> None:
    watch = watched(10.0, lambda now_s: busy(7.0))
    watch.saw(10_000.0, busy(7.0))
    assert watch.standstill.lasted_s == pytest.approx(10.0)
    watched(10_005.0, lambda now_s: busy(7.0), watch=watch, since_s=10_000.0)
    assert watch.standstill.lasted_s == pytest.approx(15.0)


def test_stall_watch_counts_silence_while_requests_are_under_way() -> None:
    watch = watched(10.0, lambda now_s: busy(7.0))
    standstill = watch.saw(20.0, Look(None, in_flight=3))
    assert standstill.lasted_s == pytest.approx(20.0)
    assert standstill.silent
    assert (standstill.last.running, standstill.last.waiting) == (2, 1)
    assert watch.saw(30.0, Look(None, in_flight=0)).lasted_s == 0


def test_stall_watch_goes_on_counting_when_a_silent_server_speaks_and_has_not_moved() -> None:
    watch = watched(10.0, lambda now_s: busy(7.0))
    watch.saw(20.0, Look(None, in_flight=3))
    assert watch.saw(30.0, busy(7.0)) == Standstill(30.0, silent=False, last=busy(7.0))
    assert watch.saw(31.0, busy(8.0)).lasted_s == 0


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.sampled_from([None, 1.0, 2.0]), st.integers(0, 3)),
        max_size=30,
    )
)
def test_stall_watch_never_claims_more_than_the_time_since_it_last_moved(
    looks: list[tuple[float, float | None, int]],
) -> None:
    watch = StallWatch(longest_gap_s=40.0)
    now_s, idle_s, told = 0.0, 0.0, None
    for gap_s, progress, in_flight in looks:
        now_s += gap_s
        if not in_flight or (progress is not None and progress != told):
            idle_s = now_s
        told = told if progress is None else progress
        standstill = watch.saw(now_s, Look(progress, in_flight=in_flight))
        assert 0 <= standstill.lasted_s <= now_s - idle_s + 1e-6


def test_stall_watch_keeps_the_longest_standstill_until_told_to_forget_it() -> None:
    watch = StallWatch(longest_gap_s=20.0)
    for now_s in (0.0, 10.0, 20.0):
        watch.saw(now_s, Look(5.0, in_flight=3))
    watch.saw(30.0, Look(5.0, in_flight=0))  # all of them ran out of time
    assert watch.standstill.lasted_s == 0.0
    assert watch.longest.lasted_s == pytest.approx(20.0)
    watch.forget()
    assert watch.longest.lasted_s == 0.0


@pytest.mark.parametrize(
    ("standstill", "words"),
    [
        (
            Standstill(120.2, last=Look(1.0, running=12, waiting=52, in_flight=64)),
            "no token for 120 s while 12 requests run and 52 wait",
        ),
        (
            Standstill(60.0, last=Look(1.0, running=1, waiting=1, in_flight=2)),
            "no token for 60 s while 1 request runs and 1 waits",
        ),
        (
            Standstill(60.0, last=Look(1.0, in_flight=1)),
            "no token for 60 s with 1 request under way",
        ),
        (
            Standstill(60.0, silent=True, last=Look(None, running=2, in_flight=8)),
            "no answer from /metrics for 60 s with 8 requests under way",
        ),
    ],
)
def test_standstill_words(standstill: Standstill, words: str) -> None:
    assert standstill.words() == words
