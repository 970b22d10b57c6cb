"""The loop of a study, with made-up outcomes in place of server lives."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from builders import measurement, study_spec

from tuner.engine.base import ConfigAnswer
from tuner.errors import EnvironmentProblem, Interrupted, NoResult
from tuner.measuring.session import ClientTooSlow
from tuner.records import TrialState
from tuner.stopping import Ending
from tuner.storage import StudyStore
from tuner.study import StudyLoop
from tuner.types import (
    BudgetSpec,
    Choice,
    Failure,
    FailureCause,
    Interval,
    IntRange,
    MeasureEnd,
    Stage,
)

KNOBS = (IntRange("max-num-seqs", 1, 8), Choice("kv-cache-dtype", ("auto", "fp8")))
SMALL_KV = Failure(FailureCause.KV_TOO_SMALL, Stage.KV_ALLOCATION, "To serve at least one ...")
NO_MODEL = Failure(FailureCause.MODEL_NOT_FOUND, Stage.LOADING, "Repo id must be in the form")
PORT = Failure(FailureCause.PORT_IN_USE, Stage.LAUNCH, "[Errno 98] Address already in use")
ACCEPTED = ConfigAnswer(accepted=True)


class Listening:
    def __init__(self):
        self.notices, self.started, self.finished = [], [], []

    def notice(self, text):
        self.notices.append(text)

    def progress(self, progress):
        pass

    def trial_started(self, suggestion, study):
        self.started.append(suggestion)

    def trial_finished(self, trial, study):
        self.finished.append(trial)


class Answering:
    """vLLM's own check: refuses what `refuses` says, and resolves a default."""

    def __init__(self, refuses=lambda config: False):
        self.refuses = refuses

    async def check(self, config):
        if self.refuses(config):
            return ConfigAnswer(
                accepted=False, error="must be greater", cause=FailureCause.BAD_CONFIG
            )
        return ConfigAnswer(accepted=True, resolved={"max-num-seqs": 8, "kv-cache-dtype": "auto"})


class Making:
    """Outcomes from a function of the configuration and how many there were before."""

    def __init__(self, outcome):
        self.outcome = outcome
        self.launched = []

    def command_line(self, config):
        return ["vllm", "serve"]

    async def evaluate(self, config, trial_dir, observer, incumbent=None):
        assert trial_dir.is_dir()
        self.launched.append(config)
        result = self.outcome(config, len(self.launched))
        return await result if asyncio.iscoroutine(result) else result


class Rig:
    """A study in memory; `outcome` answers each launch. `again` goes on with it."""

    def __init__(self, directory, outcome, *, check=None, spec=None, store=None):
        self.spec = spec or study_spec(search_space=KNOBS, budget=BudgetSpec(6, None))
        self.store = store or StudyStore.in_memory(self.spec.name, directory)
        self.store.bind(self.spec, {}, {})
        self.listener = Listening()
        self.evaluator = Making(outcome)
        self.launched = self.evaluator.launched
        self.check = check or Answering()
        self.paused = []

    def again(self, outcome, *, spec=None):
        return Rig(None, outcome, spec=spec or self.spec, store=self.store)

    def run(self):
        loop = StudyLoop(
            self.spec,
            self.store,
            self.evaluator,
            self.check,
            self.listener,
            pause=self._pause,
        )
        return asyncio.run(loop.run())

    async def _pause(self, seconds):
        self.paused.append(seconds)
        await asyncio.sleep(0)

    def read(self):
        return self.store.read(lambda *_: self.spec)


def by_seqs(config, _launch):
    return measurement(throughput=100.0 * config.args.get("max-num-seqs", 3))


def test_run_measures_the_reference_first_and_ends_at_the_budget(in_tmp):
    rig = Rig(in_tmp, by_seqs)
    assert rig.run() is Ending.TRIALS
    assert [t.state for t in rig.read().trials] == [TrialState.MEASURED] * 6
    assert "max-num-seqs" not in rig.launched[0].args
    assert rig.read().reference.number == 0
    assert rig.read().reference.score == pytest.approx(300.0)


def test_run_ends_when_every_point_was_measured(in_tmp):
    spec = study_spec(search_space=KNOBS, budget=BudgetSpec(100, None))
    rig = Rig(in_tmp, by_seqs, spec=spec)
    assert rig.run() is Ending.EXHAUSTED
    assert len(rig.launched) == 1 + 16
    assert len({config.digest for config in rig.launched}) == 17
    assert rig.read().best.score == pytest.approx(800.0)
    assert rig.read().gain == pytest.approx(800 / 300 - 1)


def test_run_tells_a_failed_reference_and_goes_on(in_tmp):
    rig = Rig(
        in_tmp,
        lambda config, launch: SMALL_KV if launch == 1 else by_seqs(config, launch),
    )
    rig.run()
    study = rig.read()
    assert study.reference.failure.cause is FailureCause.KV_TOO_SMALL
    assert study.best is not None
    assert study.gain is None


def test_run_keeps_failures_from_winning(in_tmp):
    rig = Rig(
        in_tmp,
        lambda config, launch: (
            SMALL_KV if config.args.get("max-num-seqs", 0) > 4 else by_seqs(config, 1)
        ),
        spec=study_spec(search_space=KNOBS, budget=BudgetSpec(12, None)),
    )
    rig.run()
    study = rig.read()
    assert study.best.failure is None
    assert {t.state for t in study.trials} == {TrialState.MEASURED, TrialState.INFEASIBLE}


def test_run_stops_at_an_environment_failure_and_keeps_the_configuration(in_tmp):
    rig = Rig(in_tmp, lambda config, launch: NO_MODEL if launch == 3 else by_seqs(config, 1))
    with pytest.raises(EnvironmentProblem, match="model_not_found"):
        rig.run()
    study = rig.read()
    assert study.trials[2].state is TrialState.ABORTED
    assert study.trials[3].state is TrialState.WAITING
    assert study.trials[3].params == study.trials[2].params
    assert study.finished_trials == 2
    again = rig.again(by_seqs)
    assert again.run() is Ending.TRIALS
    assert again.launched[0] == rig.launched[2]


def slow_for(*launches, then=by_seqs):
    """The client cannot drive the load of these launches."""

    def outcome(config, launch):
        if launch in launches:
            raise ClientTooSlow("its process was busy 99% of the time", 3)
        return then(config, launch)

    return outcome


def test_run_leaves_out_a_configuration_that_the_client_is_too_slow_for(in_tmp):
    spec = study_spec(search_space=KNOBS, budget=BudgetSpec(100, None))
    rig = Rig(in_tmp, slow_for(3), spec=spec)
    assert rig.run() is Ending.EXHAUSTED
    study = rig.read()
    slow = study.trials[2]
    assert slow.state is TrialState.ABORTED
    assert "its process was busy 99%" in slow.failure.line
    assert slow.score is None
    assert rig.launched.count(rig.launched[2]) == 1
    assert study.finished_trials == 16  # of 17
    assert study.best is not None
    assert not [t for t in study.trials if t.state is TrialState.WAITING]
    assert any("left out of this run" in notice for notice in rig.listener.notices)


def test_run_tries_what_the_client_was_too_slow_for_in_the_next_run(in_tmp):
    spec = study_spec(search_space=KNOBS, budget=BudgetSpec(100, None))
    rig = Rig(in_tmp, slow_for(1, 3), spec=spec)
    rig.run()
    assert rig.read().reference is None or not rig.read().reference.state.finished
    again = rig.again(by_seqs)
    assert again.run() is Ending.EXHAUSTED
    assert again.launched == [rig.launched[0], rig.launched[2]]
    assert again.read().reference.score == pytest.approx(300.0)


def test_run_ends_where_the_client_is_too_slow_for_three_in_a_row(in_tmp):
    rig = Rig(in_tmp, slow_for(2, 4, 5, 6))
    with pytest.raises(ClientTooSlow, match="the load generator was the bottleneck"):
        rig.run()
    assert len(rig.launched) == 6
    assert rig.read().finished_trials == 2
    assert rig.read().best is not None
    again = rig.again(by_seqs)
    assert again.run() is Ending.TRIALS
    assert again.read().finished_trials == 6


def test_run_counts_a_slow_client_on_over_starts_that_fail(in_tmp):
    failing = lambda config, launch: SMALL_KV if launch % 2 else by_seqs(config, launch)  # noqa: E731
    rig = Rig(in_tmp, slow_for(2, 4, 6, then=failing))
    with pytest.raises(ClientTooSlow):
        rig.run()
    assert len(rig.launched) == 6


@pytest.mark.parametrize("interval", [Interval(250.0, 350.0, 0.95), None])
def test_run_gives_each_launch_the_low_end_of_the_best_so_far(in_tmp, interval):
    scores = iter([300.0, 200.0, 400.0])
    seen = []

    class Noting(Making):
        async def evaluate(self, config, trial_dir, observer, incumbent=None):
            seen.append(incumbent)
            return await super().evaluate(config, trial_dir, observer)

    def outcome(*_):
        return replace(measurement(throughput=next(scores)), interval=interval)

    rig = Rig(in_tmp, outcome, spec=study_spec(search_space=KNOBS, budget=BudgetSpec(3, None)))
    rig.evaluator = Noting(outcome)
    rig.run()
    low = 300.0 if interval is None else 250.0
    assert seen == [None, low, low]


def test_run_lets_an_estimate_win(in_tmp):
    ends = [MeasureEnd.COMPLETE, MeasureEnd.SATURATED, MeasureEnd.TIME]

    def outcome(_, launch):
        found = measurement(throughput=100.0 * launch)
        return replace(found, end=ends[launch - 1])

    rig = Rig(in_tmp, outcome, spec=study_spec(search_space=KNOBS, budget=BudgetSpec(3, None)))
    rig.run()
    assert rig.read().best.measurement.end is MeasureEnd.TIME


def test_run_tries_a_taken_port_once_more(in_tmp):
    rig = Rig(in_tmp, lambda config, launch: PORT if launch == 2 else by_seqs(config, 1))
    assert rig.run() is Ending.TRIALS
    assert rig.launched[1] == rig.launched[2]
    assert any("started again" in notice for notice in rig.listener.notices)


def test_run_gives_up_where_the_port_stays_taken(in_tmp):
    rig = Rig(in_tmp, lambda config, launch: PORT)
    with pytest.raises(EnvironmentProblem, match="Address already in use"):
        rig.run()
    assert len(rig.launched) == 3


def test_run_never_launches_what_vllm_refuses(in_tmp):
    check = Answering(lambda config: config.args.get("max-num-seqs", 0) > 4)
    rig = Rig(
        in_tmp,
        by_seqs,
        check=check,
        spec=study_spec(search_space=KNOBS, budget=BudgetSpec(100, None)),
    )
    assert rig.run() is Ending.EXHAUSTED
    assert len(rig.launched) == 1 + 8
    assert all(config.args.get("max-num-seqs", 0) <= 4 for config in rig.launched)


def test_run_records_a_refused_reference_without_a_launch(in_tmp):
    check = Answering(lambda config: "max-num-seqs" not in config.args)
    rig = Rig(in_tmp, by_seqs, check=check)
    rig.run()
    assert rig.read().reference.failure.cause is FailureCause.BAD_CONFIG
    assert all("max-num-seqs" in config.args for config in rig.launched)


def test_run_says_when_vllm_refuses_everything(in_tmp):
    rig = Rig(
        in_tmp,
        by_seqs,
        check=Answering(lambda config: True),
        spec=study_spec(search_space=(IntRange("max-num-seqs", 1, 100_000),)),
    )
    with pytest.raises(NoResult, match="must be greater"):
        rig.run()


def test_interruption_marks_the_trial_and_resume_runs_it_again(in_tmp):
    async def never():
        asyncio.get_running_loop().call_later(0.05, asyncio.current_task().cancel)
        await asyncio.sleep(60)

    rig = Rig(in_tmp, lambda config, launch: never() if launch == 3 else by_seqs(config, 1))
    with pytest.raises(Interrupted):
        rig.run()
    assert rig.read().trials[2].state is TrialState.INTERRUPTED
    again = rig.again(by_seqs)
    assert again.run() is Ending.TRIALS
    assert again.launched[0] == rig.launched[2]
    assert again.read().finished_trials == 6


def test_resume_measures_nothing_twice(in_tmp):
    first = Rig(in_tmp, by_seqs)
    first.run()
    spec = study_spec(search_space=KNOBS, budget=BudgetSpec(100, None))
    second = first.again(by_seqs, spec=spec)
    assert second.run() is Ending.EXHAUSTED
    launched = [config.digest for config in (*first.launched, *second.launched)]
    assert len(launched) == len(set(launched)) == 17


def test_resume_of_a_finished_study_launches_nothing(in_tmp):
    first = Rig(in_tmp, by_seqs)
    first.run()
    again = first.again(by_seqs)
    assert again.run() is Ending.TRIALS
    assert again.launched == []


def test_run_ends_well_when_vllm_refuses_the_rest(in_tmp):
    check = Answering(lambda config: config.args.get("max-num-seqs", 0) > 2)
    spec = study_spec(
        search_space=(IntRange("max-num-seqs", 1, 100_000),), budget=BudgetSpec(6, None)
    )
    rig = Rig(in_tmp, by_seqs, check=check, spec=spec)
    assert rig.run() is Ending.EXHAUSTED
    assert rig.read().best is not None


def test_run_stops_when_the_check_finds_the_environment_at_fault(in_tmp):
    gone = ConfigAnswer(accepted=False, error="401", cause=FailureCause.MODEL_ACCESS)

    class Expiring(Answering):
        async def check(self, config):
            return gone if "max-num-seqs" in config.args else ACCEPTED

    rig = Rig(in_tmp, by_seqs, check=Expiring())
    with pytest.raises(EnvironmentProblem, match="model_access"):
        rig.run()
    assert rig.read().finished_trials == 1


def test_resume_runs_the_reference_that_the_file_names_now(in_tmp):
    old = study_spec(search_space=KNOBS, reference={"max-num-seqs": 2})
    first = Rig(in_tmp, lambda config, launch: NO_MODEL, spec=old)
    with pytest.raises(EnvironmentProblem):
        first.run()
    new = study_spec(search_space=KNOBS, reference={"max-num-seqs": 6})
    again = first.again(by_seqs, spec=new)
    again.run()
    assert again.launched[0].args["max-num-seqs"] == 6
    assert again.read().reference.params == {"max-num-seqs": 6}
    assert [t.state for t in again.read().trials][:2] == [TrialState.ABORTED, TrialState.DROPPED]


def test_resume_drops_a_queued_trial_that_the_range_now_excludes(in_tmp):
    first = Rig(in_tmp, lambda config, launch: NO_MODEL if launch == 2 else by_seqs(config, 1))
    with pytest.raises(EnvironmentProblem):
        first.run()
    owed = first.read().trials[-1].params["max-num-seqs"]
    narrow = IntRange("max-num-seqs", owed + 1, owed + 3)
    again = first.again(by_seqs, spec=study_spec(search_space=(narrow, KNOBS[1])))
    again.run()
    assert all(c.args["max-num-seqs"] > owed for c in again.launched)
