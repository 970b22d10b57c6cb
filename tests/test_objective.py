"""The score's formula and the constraints every trial is told with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import measurement

from tuner.objective import CONSTRAINTS, judge, refused, score
from tuner.types import (
    Failure,
    FailureCause,
    MemoryFacts,
    Metric,
    ObjectiveSpec,
    Stage,
)


def test_score_without_preemption_or_loss_is_the_throughput():
    assert score(measurement(throughput=800.0), ObjectiveSpec()) == pytest.approx(800.0)


def test_score_halves_at_one_preemption_per_finished_request():
    measured = measurement(throughput=800.0, served=32, offered=32, preemptions=32)
    assert score(measured, ObjectiveSpec(preemption_weight=1.0)) == pytest.approx(400.0)


def test_score_ignores_preemption_at_weight_zero():
    measured = measurement(throughput=800.0, preemptions=50)
    assert score(measured, ObjectiveSpec(preemption_weight=0.0)) == pytest.approx(800.0)


def test_score_of_turned_away_requests_is_in_proportion():
    measured = measurement(throughput=800.0, served=24, offered=32)
    assert score(measured, ObjectiveSpec()) == pytest.approx(600.0)


def test_score_of_request_throughput_uses_requests():
    measured = measurement(throughput=800.0, request_throughput=3.5)
    assert score(measured, ObjectiveSpec(maximize=Metric.REQUEST_THROUGHPUT)) == pytest.approx(3.5)


def test_judge_of_a_measurement_is_feasible_with_its_headroom():
    measured = measurement(memory=MemoryFacts(kv_cache_tokens=4096, max_model_len_tokens=1024))
    verdict = judge(measured, ObjectiveSpec())
    assert verdict.feasible
    assert verdict.constraints["memory"] == pytest.approx(-0.75)


def test_judge_of_nothing_served_is_infeasible_with_score_zero():
    verdict = judge(measurement(served=0, offered=32), ObjectiveSpec())
    assert verdict.score == 0.0
    assert not verdict.feasible
    assert verdict.constraints["served"] == 1.0


def test_judge_of_a_short_kv_cache_tells_the_exact_margin_in_tokens():
    failure = Failure(
        FailureCause.KV_TOO_SMALL,
        Stage.KV_ALLOCATION,
        "...",
        {
            "max_model_len_tokens": 2048,
            "estimated_max_model_len_tokens": 896,
            "needed_gib": 0.0,
            "available_gib": 0.0,
        },
    )
    verdict = judge(failure, ObjectiveSpec())
    assert verdict.constraints["memory"] == pytest.approx((2048 - 896) / 2048)
    assert not verdict.feasible


def test_judge_of_a_short_kv_cache_falls_back_to_gib():
    failure = Failure(
        FailureCause.KV_TOO_SMALL,
        Stage.KV_ALLOCATION,
        "...",
        {"needed_gib": 4.0, "available_gib": 3.0},
    )
    assert judge(failure, ObjectiveSpec()).constraints["memory"] == pytest.approx(0.25)


def test_judge_of_a_miss_rounded_away_is_still_a_miss():
    numbers = {"needed_gib": 0.95, "available_gib": 0.95}
    failure = Failure(FailureCause.KV_TOO_SMALL, Stage.KV_ALLOCATION, "...", numbers)
    assert judge(failure, ObjectiveSpec()).constraints["memory"] > 0


@pytest.mark.parametrize("cause", list(FailureCause))
def test_judge_never_lets_a_failure_win(cause):
    verdict = judge(Failure(cause, Stage.LOAD, "..."), ObjectiveSpec())
    assert verdict.score == 0.0
    assert not verdict.feasible
    assert tuple(verdict.constraints) == CONSTRAINTS


def test_constraints_have_the_same_names_in_every_verdict():
    assert tuple(judge(measurement(), ObjectiveSpec()).constraints) == CONSTRAINTS
    assert tuple(refused()) == CONSTRAINTS


def test_score_prices_preemptions_of_the_window_by_the_requests_of_the_window():
    """20 preemptions to 30 requests in ten seconds; 100 were served with ramp-up and ramp-down."""
    steady = replace(
        measurement(throughput=800, preemptions=20, served=100, offered=100), steady=True
    )
    assert score(steady, ObjectiveSpec(preemption_weight=1.0)) == pytest.approx(800 / (1 + 20 / 30))


def test_score_of_a_window_still_counts_every_request_that_was_not_served():
    steady = replace(measurement(throughput=800, served=80, offered=100), steady=True)
    assert score(steady, ObjectiveSpec(preemption_weight=1.0)) == pytest.approx(640)
