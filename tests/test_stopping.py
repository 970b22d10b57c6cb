"""When a study is over."""

from __future__ import annotations

import pytest
from builders import study_spec

from tuner.records import StudyRecord, StudyState, TrialRecord, TrialState
from tuner.stopping import Ending, remaining_s, used_up
from tuner.types import BudgetSpec


def study(*durations_s: float, state: TrialState = TrialState.MEASURED) -> StudyRecord:
    trials = [
        TrialRecord(n, state, {}, None, n == 0, 1.0, {}, None, None, duration_s=duration_s)
        for n, duration_s in enumerate(durations_s)
    ]
    return StudyRecord("test", study_spec(), StudyState.RUNNING, trials, {})


def test_used_up_counts_finished_trials_only():
    budget = BudgetSpec(trials=3, time_s=None)
    assert used_up(study(1, 1), budget) is None
    assert used_up(study(1, 1, 1), budget) is Ending.TRIALS
    assert used_up(study(1, 1, 1, state=TrialState.INTERRUPTED), budget) is None
    assert used_up(study(1, 1, 1, state=TrialState.INFEASIBLE), budget) is Ending.TRIALS


def test_used_up_begins_no_trial_that_would_end_too_late():
    assert used_up(study(40, 40), BudgetSpec(None, 130.0)) is None
    assert used_up(study(40, 40), BudgetSpec(None, 110.0)) is Ending.TIME


def test_used_up_lets_the_first_trial_run():
    assert used_up(study(), BudgetSpec(None, 1.0)) is None


def test_remaining_time_is_the_nearer_limit():
    assert remaining_s(study(), BudgetSpec(10, None)) is None
    assert remaining_s(study(40, 60), BudgetSpec(10, None)) == pytest.approx(400)
    assert remaining_s(study(40, 60), BudgetSpec(10, 150.0)) == pytest.approx(50)
