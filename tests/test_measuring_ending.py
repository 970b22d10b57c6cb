from dataclasses import replace

import pytest

from tuner.measuring.ending import FEWEST_TO_END, Look, ending, is_saturated
from tuner.types import Interval, MeasureEnd, MeasureSpec

NARROW = Interval(99.0, 101.0)
WIDE = Interval(80.0, 120.0)


def look(interval=WIDE, sure=WIDE, **more):
    given = {"elapsed_s": 10.0, "blocks": FEWEST_TO_END} | more
    return Look(interval=interval, sure=sure, **given)


def test_measurement_goes_on_while_the_interval_is_wide():
    assert ending(look(), MeasureSpec(), None) is None


def test_measurement_without_an_interval_goes_on():
    assert ending(look(None, None), MeasureSpec(), 500.0) is None


def test_narrow_interval_ends_it():
    assert ending(look(NARROW), MeasureSpec(precision=0.01), None) is MeasureEnd.PRECISE
    assert ending(look(NARROW), MeasureSpec(precision=0.009), None) is None


def test_interval_of_few_blocks_does_not_end_it_however_narrow():
    few = look(NARROW, blocks=FEWEST_TO_END - 1)
    assert ending(few, MeasureSpec(), None) is None
    assert ending(replace(few, blocks=FEWEST_TO_END), MeasureSpec(), None) is MeasureEnd.PRECISE


def test_precision_of_nothing_never_ends_it():
    exact = Interval(100.0, 100.0)
    assert ending(look(exact), MeasureSpec(precision=0.0), None) is None


@pytest.mark.parametrize(
    ("incumbent", "expected"), [(130.0, MeasureEnd.WORSE), (123.0, None), (None, None)]
)
def test_what_is_clearly_worse_than_the_incumbent_ends(incumbent, expected):
    """The sure high end is 120: 3 % below 123.7."""
    assert ending(look(), MeasureSpec(), incumbent) is expected


def test_worse_is_measured_in_full_where_that_is_asked_for():
    assert ending(look(), MeasureSpec(stop_worse=False), 500.0) is None


def test_time_ends_it():
    measure = MeasureSpec(time_s=60.0)
    assert ending(look(elapsed_s=60.0), measure, None) is MeasureEnd.TIME
    assert ending(look(elapsed_s=59.0), measure, None) is None


def queued(waiting, per_look=10):
    """A look at an open loop, where so many waited at each look."""
    sent = tuple(per_look * (place + 1) for place in range(len(waiting)))
    return look(queue=tuple(waiting), sent=sent)


def test_growing_queue_of_an_open_loop_is_saturation():
    growing = queued([0, 0, 1, 4, 8, 11, 15, 18, 23, 26, 30, 35, 39])
    assert is_saturated(growing)
    assert ending(growing, MeasureSpec(), None) is MeasureEnd.SATURATED


@pytest.mark.parametrize(
    "waiting",
    [
        [],
        [10, 20, 30, 40],  # too early to tell
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12][::-1],
        [0] * 20,
        [5, 5, 5, 5, 5, 5, 9, 12, 8, 14, 16, 15, 18],  # not all the time
        [0, 10, 20, 30, 40, 50, 58, 64, 68, 70, 71, 71.5, 71.7],  # it levels off
        [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2],  # nearly all end
    ],
)
def test_queue_that_holds_is_no_saturation(waiting):
    assert not is_saturated(queued(waiting))


def test_interval_of_unsettled_blocks_is_good_for_clear_cases_only():
    unsettled = look(NARROW, NARROW, settled=False)
    assert ending(look(NARROW, NARROW), MeasureSpec(0.001), 120.0) is MeasureEnd.WORSE
    assert ending(unsettled, MeasureSpec(), None) is None
    assert ending(unsettled, MeasureSpec(), 120.0) is None
    assert ending(unsettled, MeasureSpec(), 127.0) is MeasureEnd.WORSE  # 101 is 80 % of it
