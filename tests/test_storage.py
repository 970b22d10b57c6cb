"""The study database: what is written, read back, locked, and recovered."""

from __future__ import annotations

import multiprocessing
import sqlite3

import optuna
import pytest
from builders import KNOBS, measurement, study_spec

from tuner.engine.base import ProcessRecord
from tuner.errors import EnvironmentProblem, InputError
from tuner.objective import judge
from tuner.records import StudyState, TrialState
from tuner.search.distributions import distribution, encode
from tuner.storage import Queued, StudyLocation, StudyStore, find
from tuner.types import EngineConfig, Failure, FailureCause, ObjectiveSpec, Stage, Suggestion

PARAMS = {"max-num-seqs": 16, "gpu-memory-utilization": 0.85, "kv-cache-dtype": "fp8"}
DISTRIBUTIONS = {knob.name: distribution(knob) for knob in KNOBS}
CONFIG = EngineConfig({"max-num-seqs": 16}, {"A": "1"})
PROCESS = ProcessRecord(
    pid=11,
    pgid=12,
    create_time=1.5,
    supervisor_create_time=1.25,
    boot_id="b",
    tmpdir="t",
)


@pytest.fixture
def store(in_tmp):
    opened = StudyStore.open_for_writing(StudyLocation.of("test"))
    opened.bind(study_spec(), {"model": "m"}, {"vLLM": "0.32.0"})
    yield opened
    opened.close()


def read(store):
    return store.read(lambda text, path: study_spec(text=text, path=path))


def start(store, params=PARAMS):
    encoded = encode(params)
    store.queue(params, encoded)
    trial = store.start({name: DISTRIBUTIONS[name] for name in encoded})
    store.describe(trial, Suggestion(trial.number, params, CONFIG), ["vllm"], {})
    return trial


def test_store_reads_back_a_measured_trial(store):
    trial = start(store)
    measured = measurement(throughput=812.5, preemptions=3)
    verdict = judge(measured, ObjectiveSpec())
    store.finish(trial, measured, verdict, 41.5)
    (record,) = read(store).trials
    assert record.state is TrialState.MEASURED
    assert record.params == PARAMS
    assert record.config == CONFIG
    assert record.outcome == measured
    assert record.score == pytest.approx(verdict.score)
    assert record.constraints == pytest.approx(dict(verdict.constraints))
    assert record.duration_s == 41.5
    assert record.directory.is_dir()
    assert (record.directory / "outcome.json").is_file()


def test_store_tells_a_failure_as_a_complete_infeasible_trial(store):
    trial = start(store)
    failure = Failure(FailureCause.KV_NO_BLOCKS, Stage.KV_ALLOCATION, "No available memory")
    store.finish(trial, failure, judge(failure, ObjectiveSpec()), 30.0)
    (record,) = read(store).trials
    assert record.state is TrialState.INFEASIBLE
    assert record.outcome == failure
    study = optuna.load_study(study_name="test", storage=store.location.url)
    (frozen,) = study.trials
    assert frozen.state is optuna.trial.TrialState.COMPLETE
    assert max(frozen.constraints.values()) > 0
    with pytest.raises(ValueError, match="No"):
        _ = study.best_trial


def test_store_holds_parameters_as_they_ran_for_optuna_dashboard(store):
    trial = start(store)
    measured = measurement()
    store.finish(trial, measured, judge(measured, ObjectiveSpec()), 1.0)
    frozen = optuna.load_study(study_name="test", storage=store.location.url).trials[0]
    assert frozen.params == PARAMS
    assert frozen.user_attrs["output_throughput"] == 800.0
    assert frozen.user_attrs["preemptions"] == 0


def test_store_queues_an_interrupted_trial_again(store):
    trial = start(store)
    store.interrupt(trial)
    assert store.next_queued() == Queued(PARAMS, is_reference=False)
    first, second = read(store).trials
    assert first.state is TrialState.INTERRUPTED
    assert second.state is TrialState.WAITING
    assert read(store).finished_trials == 0


def test_store_runs_the_queue_in_order(store):
    store.queue({}, {}, is_reference=True)
    store.queue(PARAMS, encode(PARAMS))
    assert store.next_queued() == Queued({}, is_reference=True)
    reference = store.start({})
    assert reference.optuna_trial.params == {}
    assert store.next_queued() == Queued(PARAMS, is_reference=False)


def test_store_finds_what_a_dead_tuner_was_running(store):
    trial = start(store)
    store.record_process(trial, PROCESS)
    store.close()
    again = StudyStore.open_for_writing(StudyLocation.of("test"))
    try:
        assert again.left_processes() == [PROCESS]
        (left,) = again.left_trials()
        assert (left.trial.number, left.outcome) == (trial.number, None)
        again.interrupt(left.trial)
        assert again.left_processes() == []
        assert again.next_queued() == Queued(PARAMS, is_reference=False)
        assert again.left_trials() == []
    finally:
        again.close()


def test_store_queues_a_left_trial_once_though_killed_in_between(store):
    trial = start(store)
    store.queue(PARAMS, encode(PARAMS))  # as if the kill came between the queueing and the tell
    (left,) = store.left_trials()
    assert left.trial.number == trial.number
    store.interrupt(left.trial)
    states = [t.state for t in read(store).trials]
    assert states.count(TrialState.WAITING) == 1


def test_store_finishes_a_trial_whose_end_was_cut_off(store, monkeypatch):
    trial = start(store)
    measured = measurement(throughput=640.0)
    verdict = judge(measured, ObjectiveSpec())
    with monkeypatch.context() as patch:  # killed just before the last write
        patch.setattr(optuna.Study, "tell", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.finish(trial, measured, verdict, 12.5)
    assert read(store).trials[0].outcome is None
    (left,) = store.left_trials()
    assert (left.outcome, left.duration_s) == (measured, 12.5)
    store.finish(left.trial, left.outcome, verdict, left.duration_s)
    (record,) = read(store).trials
    assert record.state is TrialState.MEASURED
    assert record.outcome == measured
    assert record.constraints == pytest.approx(dict(verdict.constraints))


def test_open_refuses_a_study_that_is_not_a_tuner_s(in_tmp):
    location = StudyLocation.of("foreign")
    location.directory.mkdir(parents=True)
    foreign = optuna.create_study(study_name="foreign", storage=location.url)
    foreign.add_trial(optuna.trial.create_trial(value=1.0))
    with pytest.raises(InputError, match="not a tuner's"):
        StudyStore.open_for_writing(location)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_open_refuses_a_database_in_memory(in_tmp, url):
    with pytest.raises(InputError, match="memory"):
        StudyStore.open_for_writing(StudyLocation.of("x", url))


def test_read_names_an_attribute_that_no_tuner_wrote(store):
    trial = start(store)
    trial.optuna_trial.set_user_attr("tuner:config", ["nonsense"])
    with pytest.raises(EnvironmentProblem, match="trial 0"):
        read(store)


def test_second_tuner_elsewhere_is_kept_from_the_same_database(store, tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path / 'studies' / 'test' / 'study.db'}"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentProblem, match="another tuner"):
        StudyStore.open_for_writing(StudyLocation.of("test", url))


def test_study_state_follows_the_lock_and_the_mark(store):
    assert read(store).state is StudyState.RUNNING
    store.close()
    reader = StudyStore.open(StudyLocation.of("test"))
    assert read(reader).state is StudyState.EMPTY
    writer = StudyStore.open_for_writing(StudyLocation.of("test"))
    start(writer)
    writer.close()
    assert read(reader).state is StudyState.STOPPED
    writer = StudyStore.open_for_writing(StudyLocation.of("test"))
    writer.mark_finished(True)
    writer.close()
    assert read(StudyStore.open(StudyLocation.of("test"))).state is StudyState.FINISHED


def _hold_lock(ready, done):
    held = StudyStore.open_for_writing(StudyLocation.of("test"))
    ready.set()
    done.wait(30)
    held.close()


def test_lock_keeps_a_second_tuner_out_until_the_first_ends(in_tmp):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold_lock, args=(ready, done))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(EnvironmentProblem, match=rf"process {other.pid}"):
            StudyStore.open_for_writing(StudyLocation.of("test"))
        other.kill()
        other.join(30)
        StudyStore.open_for_writing(StudyLocation.of("test")).close()
    finally:
        other.kill()


def test_open_refuses_a_study_of_a_newer_tuner(store):
    optuna.load_study(study_name="test", storage=store.location.url).set_user_attr(
        "tuner:schema", 99
    )
    store.close()
    with pytest.raises(InputError, match="newer tuner"):
        StudyStore.open_for_writing(StudyLocation.of("test"))
    with pytest.raises(InputError, match="newer tuner"):
        StudyStore.open(StudyLocation.of("test"))


def test_open_names_a_file_that_is_no_database(in_tmp):
    location = StudyLocation.of("broken")
    location.directory.mkdir(parents=True)
    location.sqlite_path.write_bytes(b"this is not a database, and long enough to look at" * 20)
    with pytest.raises(EnvironmentProblem, match="cannot be used: file is not a database"):
        StudyStore.open_for_writing(location)
    with pytest.raises(EnvironmentProblem, match="cannot be used"):
        StudyStore.open(location)


def test_open_names_a_database_of_something_else(in_tmp):
    location = StudyLocation.of("other")
    location.directory.mkdir(parents=True)
    with sqlite3.connect(location.sqlite_path) as database:
        database.execute("create table version_info (version_info_id integer, x text)")
    with pytest.raises(EnvironmentProblem, match="cannot be used"):
        StudyStore.open(location)


def test_find_knows_names_directories_and_urls(store, tmp_path):
    store.close()
    for spelled in ("test", "studies/test", str(tmp_path / "studies" / "test")):
        assert find(spelled).name == "test"
    by_url = find(f"sqlite:///{tmp_path / 'studies' / 'test' / 'study.db'}")
    assert by_url.name == "test"
    assert StudyStore.open(by_url).read(lambda *_: study_spec()).name == "test"


def test_find_lists_what_there_is(store):
    with pytest.raises(InputError) as caught:
        find("tset")
    assert "tset" in caught.value.message
    assert "test" in caught.value.hint


@pytest.mark.parametrize("url", ["nonsense://", "sqlite:///no/such/folder/x.db", "://"])
def test_find_names_an_unusable_url(in_tmp, url):
    with pytest.raises((InputError, EnvironmentProblem)) as caught:
        find(url)
    assert caught.value.exit_code in (2, 3)


def test_location_hides_a_password():
    location = StudyLocation.of("x", "postgresql://me:secret@db/study")
    assert "secret" not in location.shown_url
    assert location.sqlite_path is None


def test_discard_removes_only_a_database_that_it_made(in_tmp):
    made = StudyStore.open_for_writing(StudyLocation.of("new"))
    made.discard()
    made.close()
    assert not (in_tmp / "studies").exists()

    location = StudyLocation.of("mine")
    location.directory.mkdir(parents=True)
    optuna.create_study(study_name="somebody's", storage=location.url)
    opened = StudyStore.open_for_writing(location)
    opened.discard()
    opened.close()
    assert "somebody's" in optuna.get_all_study_names(location.url)
