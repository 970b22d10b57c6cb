"""The search of the highest load under an SLO, against servers whose answers are noisy."""

import numpy as np
import pytest

from tuner.measuring.rates import MOST_PROBES, RateFinder, crossing
from tuner.types import RateProbe


def probe(load, attained, requests=200):
    return RateProbe(load, attained, requests, attained >= 1.0)


def search(finder, attained_at, requests=200):
    while (load := finder.next_load()) is not None:
        attained = attained_at(load)
        finder.tell(probe(load, attained, requests))
    return finder.result()


def finder(start=4.0, **more):
    return RateFinder(start, **{"least": 0.1, "most": 1000.0, "needed": 0.99} | more)


@pytest.mark.parametrize("capacity", [0.5, 3.9, 4.0, 7.3, 50.0, 444.0])
def test_rate_is_found_from_any_start(capacity):
    found = search(finder(), lambda load: 1.0 if load <= capacity else 0.5)
    assert 0.9 * capacity <= found.load <= 1.05 * capacity
    assert found.interval.low <= found.load <= found.interval.high


def test_search_takes_few_probes():
    found = search(finder(), lambda load: 1.0 if load <= 13.0 else 0.5)
    assert len(found.probes) <= 8


def test_search_ends_at_the_highest_load_allowed():
    found = search(finder(most=10.0), lambda _: 1.005)
    assert found.load == 10.0
    assert [p.load for p in found.probes] == [4.0, 8.0, 10.0]


def test_no_load_that_meets_the_slo_is_a_rate_of_nothing():
    found = search(finder(least=1.0), lambda _: 0.2)
    assert found.load == 0.0
    assert found.interval.low == 0.0


def test_concurrencies_are_whole_numbers():
    found = search(finder(whole=True, start=8, least=1), lambda load: float(load <= 21))
    assert all(p.load == int(p.load) for p in found.probes)
    assert 20 <= found.load <= 22


def test_no_load_is_probed_twice():
    found = search(finder(whole=True, start=1, least=1, most=2), lambda load: float(load <= 1))
    loads = [p.load for p in found.probes]
    assert len(loads) == len(set(loads))


def test_noisy_answers_still_come_near():
    """Near the capacity the share of good requests falls gently and is drawn by chance."""
    ratios, covered = [], 0
    for seed in range(60):
        rng = np.random.default_rng(seed)

        def attained(load, rng=rng):
            share = 1 / (1 + (load / 26.0) ** 20)  # 0.99 at 20.66
            return rng.binomial(300, share) / 300 / 0.99

        found = search(finder(), attained, requests=300)
        assert len(found.probes) <= MOST_PROBES
        ratios.append(found.load / 20.66)
        covered += found.interval.low <= 20.66 <= found.interval.high
    assert 0.93 <= np.median(ratios) <= 1.07
    assert np.percentile(ratios, 5) >= 0.85
    assert np.percentile(ratios, 95) <= 1.15
    assert covered >= 51  # of 60; at 95 % some 57


def test_crossing_makes_a_non_monotone_answer_monotone():
    probes = [probe(1, 1.01), probe(2, 0.97), probe(3, 1.03), probe(4, 0.5)]
    assert 3 <= crossing(probes) < 3.5  # 2 and 3 together just meet it


def test_requests_of_neighbouring_probes_count_together():
    """A hundred good requests prove 99 % of none, three hundred do."""
    alone = finder()
    alone.tell(probe(4.0, 1 / 0.99, 100))
    assert alone.result().interval.low == 0.0
    together = finder()
    for load in (4.0, 8.0, 16.0):
        together.tell(probe(load, 1 / 0.99, 100))
    assert together.result().interval.low == 4.0


def test_load_that_cannot_be_driven_bounds_the_answer():
    limited = finder()
    limited.tell(probe(4.0, 1.005))
    limited.cannot_drive(8.0, "too fast")
    assert limited.next_load() is None
    found = limited.result()
    assert (found.load, found.interval.high, found.limited_by) == (4.0, 8.0, "too fast")


def test_load_that_cannot_be_driven_between_two_others_bounds_the_answer():
    limited = finder()
    limited.tell(probe(4.0, 1.005))
    limited.tell(probe(8.0, 0.5))
    assert limited.next_load() == pytest.approx(5.66, abs=0.01)
    limited.cannot_drive(limited.next_load(), "too fast")
    assert limited.next_load() is None
    found = limited.result()
    assert found.load == 4.0
    assert found.interval.high == pytest.approx(5.66, abs=0.01)
    assert found.limited_by == "too fast"
