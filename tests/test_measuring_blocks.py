"""Batch means and the jackknife, against what is known of the numbers they are given."""

import numpy as np
import pytest

from tuner.measuring.blocks import (
    Block,
    Curve,
    Events,
    block_score,
    cut,
    estimate,
    total,
)
from tuner.types import Interval, Metric, ObjectiveSpec

PLAIN = ObjectiveSpec(preemption_weight=0.0)
PRICED = ObjectiveSpec(preemption_weight=1.0)


def interval(blocks, objective, confidence=0.95):
    found = estimate(blocks, objective)
    return None if found is None else found.interval(confidence)


def blocks_of(tokens, preemptions=0.0):
    return [Block(1.0, float(t), 10.0, 5.0, 5.0, 4.0, preemptions) for t in tokens]


def events(*pairs):
    times_s, weights = np.array(pairs, dtype=float).reshape(-1, 2).T
    return Events(times_s, weights)


def test_events_count_after_one_edge_and_up_to_the_next():
    found = events((0.0, 1), (0.5, 2), (1.0, 4), (1.5, 8), (2.0, 16), (2.1, 32))
    assert found.rises(np.array([0.0, 1.0, 2.0])).tolist() == [6.0, 24.0]


def test_events_of_nothing_are_none():
    assert events().rises(np.array([0.0, 1.0, 2.0])).tolist() == [0.0, 0.0]


def test_curve_is_shared_evenly_between_two_readings():
    curve = Curve((0.0, 4.0), (10.0, 18.0))
    assert curve.rises(np.array([0.0, 1.0, 4.0])).tolist() == [2.0, 6.0]


def test_curve_that_was_never_read_does_not_rise():
    assert Curve((), ()).rises(np.array([0.0, 1.0, 4.0])).tolist() == [0.0, 0.0]


def test_cut_puts_everything_into_its_block():
    first, second = cut(
        np.array([0.0, 1.0, 3.0]),
        output=events((0.5, 3), (1.5, 5)),
        prompts=events((0.5, 7)),
        ended=events((1.5, 1), (1.6, 1)),
        served=events((1.5, 1)),
        good=events(),
        preemptions=Curve((0.0, 3.0), (0.0, 6.0)),
    )
    assert first == Block(1.0, 3.0, 7.0, 0.0, 0.0, 0.0, 2.0)
    assert second == Block(2.0, 5.0, 0.0, 2.0, 1.0, 0.0, 4.0)


def test_total_adds_up():
    assert total(blocks_of([1, 2, 3])).output_tokens == 6
    assert total([]).seconds == 0


def test_block_score_prices_preemptions_and_unserved_requests():
    block = Block(2.0, 200.0, 0.0, ended=10.0, served=8.0, preemptions=4.0)
    assert block_score(block, PLAIN) == pytest.approx(100 * 0.8)
    assert block_score(block, PRICED) == pytest.approx(100 * 0.8 / 1.5)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (Metric.OUTPUT_THROUGHPUT, 50.0),
        (Metric.TOTAL_THROUGHPUT, 60.0),
        (Metric.REQUEST_THROUGHPUT, 5.0),
        (Metric.GOODPUT, 4.0),
    ],
)
def test_block_score_is_of_the_metric_that_is_maximised(metric, expected):
    assert block_score(blocks_of([50])[0], ObjectiveSpec(metric)) == pytest.approx(expected)


def test_interval_of_independent_blocks_is_that_of_their_mean():
    tokens = np.array([94.0, 106.0] * 8)  # none is like the one before it
    found = interval(blocks_of(tokens), PLAIN)
    half = 2.131 * tokens.std(ddof=1) / 4  # t of 15 degrees of freedom
    assert found is not None
    assert found.low == pytest.approx(tokens.mean() - half, rel=1e-3)
    assert found.high == pytest.approx(tokens.mean() + half, rel=1e-3)


def test_interval_covers_the_truth_as_often_as_it_says():
    covered = 0
    for seed in range(300):
        tokens = np.random.default_rng(seed).normal(100, 8, 12)
        found = interval(blocks_of(tokens), PLAIN)
        assert found is not None
        covered += found.low <= 100 <= found.high
    assert 280 <= covered <= 299


def test_interval_that_was_looked_at_several_times_is_wider():
    found = estimate(blocks_of([94.0, 106.0] * 8), PLAIN)
    once, thrice = found.interval(0.95), found.interval(0.95, looks=3)
    assert thrice.confidence == once.confidence == 0.95
    assert thrice.half_width / once.half_width == pytest.approx(2.694 / 2.131, rel=1e-3)


def test_blocks_that_hang_together_do_not_promise_too_much():
    """A slow drift between blocks: the naive interval would cover far less often."""
    covered = naive = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        drift, tokens = 0.0, []
        for _ in range(32):
            drift = 0.7 * drift + rng.normal(0, 4)
            tokens.append(100 + drift)
        found = interval(blocks_of(tokens), PLAIN)
        assert found is not None
        covered += found.low <= 100 <= found.high
        half = 1.96 * np.std(tokens, ddof=1) / 32**0.5
        naive += abs(np.mean(tokens) - 100) <= half
    assert naive < 140
    assert covered > naive + 20


def test_interval_is_of_the_priced_score():
    blocks = blocks_of([100.0] * 10, preemptions=5.0)
    found = interval(blocks, PRICED)
    assert found is not None
    assert (found.low + found.high) / 2 == pytest.approx(50.0)


def test_blocks_that_are_all_alike_prove_no_more_than_a_run_can():
    found = estimate(blocks_of([100.0] * 10), PLAIN)
    assert (found.score, found.error) == pytest.approx((100.0, 0.6))


def test_few_blocks_that_hang_together_widen_the_interval():
    apart = estimate(blocks_of([90, 110, 90, 110, 90, 110, 90, 110]), PLAIN)
    together = estimate(blocks_of([90, 90, 90, 90, 110, 110, 110, 110]), PLAIN)
    assert apart.score == together.score == 100
    assert together.error > 1.5 * apart.error


def test_interval_needs_blocks_and_a_score():
    assert interval(blocks_of([100] * 7), PLAIN) is None
    assert interval([Block(1.0)] * 10, PLAIN) is None


def test_half_width_is_a_share():
    assert Interval(95.0, 105.0).half_width == pytest.approx(0.05)
    assert Interval(0.0, 0.0).half_width == float("inf")
