"""Drawn lengths have the moments that were asked for, within bounds, and are the same again."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tuner.load.lengths import draw, lognormal_parameters, mean_of_bins
from tuner.types import LengthBin, LengthKind, LengthSpec

COUNT = 20_000


def drawn(lengths: LengthSpec, count: int = COUNT) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(draw(lengths, count, np.random.default_rng(3)))


def test_draw_of_a_normal_distribution_has_its_moments() -> None:
    found = drawn(LengthSpec(500, 100))
    assert found.mean() == pytest.approx(500, abs=3)
    assert found.std() == pytest.approx(100, rel=0.03)
    assert stats.kstest(found, stats.norm(500, 100).cdf).statistic < 0.02


def test_draw_of_a_uniform_distribution_takes_both_bounds_equally_often() -> None:
    found = drawn(LengthSpec(5, minimum=3, maximum=7, kind=LengthKind.UNIFORM))
    values, counts = np.unique(found, return_counts=True)
    assert values.tolist() == [3, 4, 5, 6, 7]
    assert counts / COUNT == pytest.approx([0.2] * 5, abs=0.015)


@pytest.mark.parametrize(("mean", "stdev"), [(1000, 400), (600, 900)])
def test_draw_of_a_lognormal_distribution_has_the_moments_of_the_lengths(
    mean: float, stdev: float
) -> None:
    found = drawn(LengthSpec(mean, stdev, kind=LengthKind.LOGNORMAL), 50_000)
    assert found.mean() == pytest.approx(mean, rel=0.03)
    assert found.std() == pytest.approx(stdev, rel=0.1)
    mu, sigma = lognormal_parameters(mean, stdev)
    reference = stats.lognorm(s=sigma, scale=math.exp(mu))
    assert reference.mean() == pytest.approx(mean)
    assert reference.std() == pytest.approx(stdev)
    assert stats.kstest(found, reference.cdf).statistic < 0.02


def test_draw_of_a_histogram_follows_its_weights() -> None:
    bins = (LengthBin(1, 10, 3.0), LengthBin(11, 20, 0.0), LengthBin(101, 300, 1.0))
    found = drawn(LengthSpec(0, kind=LengthKind.HISTOGRAM, bins=bins))
    assert (found <= 10).mean() == pytest.approx(0.75, abs=0.015)
    assert not ((found > 10) & (found < 101)).any()
    assert (found.min(), found.max()) == (1, 300)
    assert found.mean() == pytest.approx(mean_of_bins(bins), rel=0.02)
    assert mean_of_bins(bins) == pytest.approx(0.75 * 5.5 + 0.25 * 200.5)


BINS = st.lists(
    st.tuples(st.integers(1, 500), st.integers(0, 500), st.floats(0.001, 9)), min_size=1, max_size=5
).map(lambda bins: tuple(LengthBin(low, low + more, weight) for low, more, weight in bins))
SPECS = st.builds(
    LengthSpec,
    mean=st.floats(0.01, 2.0**31),
    stdev=st.floats(0, 2.0**31),
    minimum=st.integers(1, 50),
    maximum=st.none() | st.integers(50, 2**31 - 1),
    kind=st.sampled_from(LengthKind),
    bins=BINS,
)


@settings(deadline=None)
@given(SPECS, st.integers(1, 40))
def test_draw_stays_within_bounds_and_a_longer_draw_begins_alike(
    lengths: LengthSpec, count: int
) -> None:
    few = draw(lengths, count, np.random.default_rng(1))
    many = draw(lengths, count + 7, np.random.default_rng(1))
    assert many[:count] == few
    assert min(few) >= lengths.minimum
    assert max(few) <= (lengths.maximum or 2**31 - 1)
