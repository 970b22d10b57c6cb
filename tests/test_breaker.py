"""A study whose starts all fail ends by itself, and says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import measurement, study_spec
from test_study import Rig, by_seqs

from tuner.errors import NoResult
from tuner.records import TrialRecord, TrialState
from tuner.stopping import (
    ALIKE_IN_A_ROW,
    FAILURES_AT_FIRST,
    MEMORY_CAUSES,
    MEMORY_FAILURES_AT_FIRST,
    OTHERS_IN_A_ROW,
    Ending,
    broken,
)
from tuner.types import Blame, BudgetSpec, Failure, FailureCause, IntRange, Stage

LOG = Path("studies/test/trials/0007/server.log")
UNSUPPORTED = Failure(FailureCause.UNSUPPORTED, Stage.LOADING, "no kernel for sm_70", log_path=LOG)
SPEC = study_spec(search_space=(IntRange("max-num-seqs", 1, 1000),), budget=BudgetSpec(60, None))


def trial(number: int, cause: FailureCause | None) -> TrialRecord:
    """A trial that failed; None is one that was measured."""
    outcome = measurement() if cause is None else Failure(cause, Stage.LOADING, "x")
    state = TrialState.MEASURED if cause is None else TrialState.INFEASIBLE
    return TrialRecord(number, state, {}, None, False, 0.0, {}, outcome, None)


def row(*causes: FailureCause | None) -> list[TrialRecord]:
    return [trial(number, cause) for number, cause in enumerate(causes)]


CRASH, OOM = FailureCause.CRASH, FailureCause.OOM_LOAD


def test_broken_waits_for_enough_failures():
    assert broken(row(*[CRASH] * (FAILURES_AT_FIRST - 1)), ever_measured=False) is None
    found = broken(row(*[CRASH] * FAILURES_AT_FIRST), ever_measured=False)
    assert len(found) == FAILURES_AT_FIRST


def test_broken_is_patient_with_memory():
    short = [OOM] * (MEMORY_FAILURES_AT_FIRST - 1)
    assert broken(row(*short), ever_measured=False) is None
    assert broken(row(*short, OOM), ever_measured=False) is not None
    mixed = [OOM, CRASH] * (FAILURES_AT_FIRST - 1)
    assert broken(row(*mixed), ever_measured=False) is None
    assert broken(row(*mixed, CRASH), ever_measured=False) is not None


def test_broken_counts_one_cause_once_something_was_measured():
    alike = [CRASH] * ALIKE_IN_A_ROW
    assert broken(row(None, *alike[1:]), ever_measured=True) is None
    assert len(broken(row(None, *alike), ever_measured=True)) == ALIKE_IN_A_ROW
    assert broken(row(*alike[1:], None, CRASH), ever_measured=True) is None
    turns = [CRASH, FailureCause.HANG] * (ALIKE_IN_A_ROW // 2)
    assert broken(row(*turns, CRASH), ever_measured=True) is None


def test_broken_never_ends_a_study_that_measured_for_lack_of_memory():
    assert broken(row(*[OOM] * 100), ever_measured=True) is None


def test_memory_causes_are_the_configuration_s():
    assert all(cause.blame is Blame.CONFIGURATION for cause in MEMORY_CAUSES)


def test_run_ends_with_a_diagnosis(in_tmp):
    rig = Rig(in_tmp, lambda *_: UNSUPPORTED, spec=SPEC)
    with pytest.raises(NoResult) as caught:
        rig.run()
    assert len(rig.launched) == FAILURES_AT_FIRST
    assert caught.value.exit_code == 4
    assert "8 trials in a row failed" in caught.value.message
    assert "8 x unsupported" in caught.value.message
    assert "no kernel for sm_70" in caught.value.message
    assert str(LOG) in caught.value.hint
    assert "run the same command again" in caught.value.hint


def test_run_says_the_most_frequent_line_though_its_numbers_differ(in_tmp):
    lines = ["tried 1.5 GiB", "quite another", "tried 2.25 GiB", "tried 3 GiB"]

    def outcome(_config, launch):
        return Failure(FailureCause.UNSUPPORTED, Stage.LOADING, lines[launch % len(lines)])

    with pytest.raises(NoResult, match=r"6 of them say: tried [\d.]+ GiB"):
        Rig(in_tmp, outcome, spec=SPEC).run()


def test_run_after_a_diagnosis_goes_on(in_tmp):
    rig = Rig(in_tmp, lambda *_: UNSUPPORTED, spec=SPEC)
    with pytest.raises(NoResult):
        rig.run()
    again = rig.again(lambda *_: UNSUPPORTED)
    with pytest.raises(NoResult):
        again.run()
    assert len(again.launched) == FAILURES_AT_FIRST
    mended = rig.again(by_seqs)
    assert mended.run() is Ending.TRIALS
    assert mended.read().finished_trials == 60


def test_run_ends_when_a_machine_breaks_in_the_middle(in_tmp):
    rig = Rig(
        in_tmp,
        lambda config, launch: by_seqs(config, 1) if launch < 4 else UNSUPPORTED,
        spec=SPEC,
    )
    with pytest.raises(NoResult, match=r"the best is still no\. \d"):
        rig.run()
    assert rig.read().finished_trials == 3 + ALIKE_IN_A_ROW


def test_run_with_a_budget_below_the_limit_ends_at_the_budget(in_tmp):
    small = study_spec(search_space=SPEC.search_space, budget=BudgetSpec(3, None))
    assert Rig(in_tmp, lambda *_: UNSUPPORTED, spec=small).run() is Ending.TRIALS


UNLIKE = [CRASH, FailureCause.HANG, FailureCause.UNKNOWN, FailureCause.UNSUPPORTED]


def test_broken_ends_a_machine_that_breaks_in_turns():
    turns = UNLIKE * (OTHERS_IN_A_ROW // len(UNLIKE))
    assert broken(row(None, *turns[1:]), ever_measured=True) is None
    assert len(broken(row(None, *turns), ever_measured=True)) == OTHERS_IN_A_ROW


@pytest.mark.parametrize("between", [OOM, None])
def test_broken_counts_anew_after_what_the_search_learns_from(between):
    turns = UNLIKE * (OTHERS_IN_A_ROW // len(UNLIKE))
    assert broken(row(*turns[1:], between, *turns[1:]), ever_measured=True) is None
