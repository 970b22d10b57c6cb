"""What disks, other programs and time do to a study's database: said clearly, nothing lost."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import optuna
import psutil
import pytest
from builders import KNOBS, measurement, study_spec
from sqlalchemy import event
from test_study import Rig, by_seqs

from tuner.errors import EnvironmentProblem, InputError, TunerError
from tuner.objective import judge
from tuner.records import TrialState
from tuner.search.distributions import distribution, encode
from tuner.storage import StudyLocation, StudyStore, find, opening
from tuner.storage.lock import is_gone, this_process
from tuner.types import BudgetSpec, EngineConfig, ObjectiveSpec, Suggestion

PARAMS = {"max-num-seqs": 16, "gpu-memory-utilization": 0.85, "kv-cache-dtype": "fp8"}
DISTRIBUTIONS = {knob.name: distribution(knob) for knob in KNOBS}
HERE = StudyLocation.of("test")


@pytest.fixture
def store(in_tmp):
    """A study with one measured trial, open for writing."""
    opened = StudyStore.open_for_writing(HERE)
    opened.bind(study_spec(), {"model": "m"}, {"tuner": "0.1", "vLLM": "0.32.0"})
    measure(opened)
    yield opened
    opened.close()


@pytest.fixture
def database(store):
    """The file of a study that nobody works on."""
    store.close()
    return HERE.sqlite_path


def start(store, **changes):
    params = {**PARAMS, **changes}
    encoded = encode(params)
    store.queue(params, encoded)
    trial = store.start({name: DISTRIBUTIONS[name] for name in encoded})
    store.describe(trial, Suggestion(trial.number, params, EngineConfig({})), ["vllm"], {})
    return trial


def measure(store):
    trial, measured = start(store), measurement(throughput=812.5)
    store.finish(trial, measured, judge(measured, ObjectiveSpec()), 41.5)


def read(store):
    return store.read(lambda text, path: study_spec(text=text, path=path))


def problem_of_opening(*, writing):
    opens = StudyStore.open_for_writing if writing else StudyStore.open
    with pytest.raises(TunerError) as caught:
        read(opens(HERE))
    return caught.value


# --- a full disk -------------------------------------------------------------------------


def fill(store):
    """From now on SQLite finds no room for another page; returns how to make room."""

    def limit(connection, *_):
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")

    def make_room():
        event.remove(engine, "checkout", limit)
        engine.dispose()

    engine = store._storage.engine
    event.listen(engine, "checkout", limit)
    return make_room


def test_full_database_is_named_with_what_to_do(store):
    fill(store)
    with pytest.raises(EnvironmentProblem, match="disk is full") as caught:
        store.queue({"padding": "x" * 200_000}, {})
    assert "free space" in caught.value.hint
    assert caught.value.exit_code == 3


def test_trial_that_finds_no_room_is_recovered_from_its_file(store):
    trial = start(store)
    measured = replace(measurement(throughput=640.0), first_error="x" * 200_000)
    verdict = judge(measured, ObjectiveSpec())
    make_room = fill(store)
    with pytest.raises(EnvironmentProblem, match="disk is full"):
        store.finish(trial, measured, verdict, 12.5)
    make_room()
    store.close()
    again = StudyStore.open_for_writing(HERE)
    try:
        (left,) = again.left_trials()
        assert (left.outcome, left.duration_s) == (measured, 12.5)
        again.finish(left.trial, left.outcome, verdict, left.duration_s)
        assert read(again).trials[1].outcome == measured
    finally:
        again.close()


def refuse(store, monkeypatch, words):
    """Every write of a trial's attribute fails in these words, as SQLite says them."""

    def fail(*_, **__):
        raise optuna.exceptions.StorageInternalError from sqlite3.OperationalError(words)

    monkeypatch.setattr(type(store._storage), "set_trial_user_attr", fail)


def test_run_shows_the_figures_it_cannot_store_and_counts_them_later(in_tmp, monkeypatch):
    store = StudyStore.open_for_writing(HERE)
    spec = study_spec(search_space=KNOBS[:1], budget=BudgetSpec(3, None))
    rig = Rig(in_tmp, by_seqs, spec=spec, store=store)

    def fill_at_the_second(config, launch):
        if launch == 2:
            refuse(store, monkeypatch, "database or disk is full")
        return measurement(throughput=512.25)

    rig.evaluator.outcome = fill_at_the_second
    with pytest.raises(EnvironmentProblem, match=r"512\.2 output tokens/s") as caught:
        rig.run()
    assert "database or disk is full" in caught.value.message
    assert "free space" in caught.value.hint
    store.close()
    monkeypatch.undo()
    monkeypatch.chdir(in_tmp)
    store = StudyStore.open_for_writing(HERE)
    try:
        again = Rig(in_tmp, by_seqs, spec=spec, store=store)
        again.run()
        assert len(again.launched) == 1
        second = again.read().trials[1]
        assert second.state is TrialState.MEASURED
        assert second.measurement.output_throughput_tokens_per_s == 512.25
    finally:
        store.close()


def test_outcome_file_without_room_leaves_the_record_in_the_database(store, monkeypatch):
    trial, measured = start(store), measurement()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "outcome.json")

    with monkeypatch.context() as patch:
        patch.setattr("tuner.storage.files.write_text", full)
        with pytest.raises(EnvironmentProblem, match="No space left"):
            store.finish(trial, measured, judge(measured, ObjectiveSpec()), 1.0)
    assert read(store).trials[1].state is TrialState.MEASURED


def test_outcome_file_of_an_older_study_is_not_taken_for_this_one_s(store):
    stale = store.trial_directory(1) / "outcome.json"
    stale.write_text((store.trial_directory(0) / "outcome.json").read_text())
    start(store)
    (left,) = store.left_trials()
    assert left.outcome is None


_LIMITED = """
import resource, sys
from tuner.errors import TunerError
from tuner.storage import StudyLocation, StudyStore
store = StudyStore.open_for_writing(StudyLocation.of("test"))
size = store.location.sqlite_path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
try:
    store.queue({"padding": "x" * 200000}, {})
except TunerError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_file_that_may_not_grow_is_exit_3_and_loses_nothing(database):
    ended = subprocess.run(
        [sys.executable, "-c", _LIMITED], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 3, ended.stderr
    assert "cannot be used" in ended.stdout
    assert "Traceback" not in ended.stderr
    trials = read(StudyStore.open(HERE)).trials
    assert trials[0].state is TrialState.MEASURED


# --- locked, read-only -------------------------------------------------------------------


@pytest.mark.parametrize("writing", [True, False])
def test_locked_database_is_named(database, monkeypatch, writing):
    monkeypatch.setattr(opening, "LOCK_WAIT_S", 0.1)
    with sqlite3.connect(database) as other:
        other.execute("BEGIN EXCLUSIVE")
        problem = problem_of_opening(writing=writing)
        other.rollback()
    assert problem.exit_code == 3
    assert "database is locked" in problem.message
    assert "another program holds it" in problem.hint
    assert len(read(StudyStore.open(HERE)).trials) == 1


def test_database_that_is_locked_for_a_while_is_waited_for(database):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    other = context.Process(target=_hold_for_a_second, args=(str(database), ready))
    other.start()
    try:
        assert ready.wait(60)
        assert len(read(StudyStore.open(HERE)).trials) == 1
    finally:
        other.kill()
        other.join(30)


def _hold_for_a_second(path, ready):
    with sqlite3.connect(path) as database:
        database.execute("BEGIN EXCLUSIVE")
        ready.set()
        time.sleep(1.0)
        database.rollback()


def test_read_only_database_can_be_read_and_says_so_when_written(store, monkeypatch):
    refuse(store, monkeypatch, "attempt to write a readonly database")
    with pytest.raises(EnvironmentProblem, match="readonly database") as caught:
        start(store)
    assert "writable" in caught.value.hint
    assert len(read(store).trials) == 2


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_read_only_folder_is_named(in_tmp, monkeypatch, number):
    def refused(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    problem = problem_of_opening(writing=True)
    assert "studies" in problem.message
    assert os.strerror(number) in problem.message
    assert "writable" in problem.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_is_named(in_tmp):
    (in_tmp / "studies").mkdir(0o500)
    assert "Permission denied" in problem_of_opening(writing=True).message


# --- a damaged file ----------------------------------------------------------------------


def damage(data, kind):
    dice = random.Random(kind)
    match kind:
        case "half":
            return data[: len(data) // 2]
        case "cut within a page":
            return data[:-1000]
        case "empty":
            return b""
        case "text":
            return b"study: mine\nserver: {model: x}\n" * 50
        case "noise in the middle":
            middle = len(data) // 2
            return data[:middle] + dice.randbytes(4096) + data[middle + 4096 :]
        case "zeros at the start":
            return bytes(4096) + data[4096:]
    raise AssertionError(kind)


@pytest.mark.parametrize("writing", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        "half",
        "cut within a page",
        "empty",
        "text",
        "noise in the middle",
        "zeros at the start",
    ],
)
def test_damaged_database_is_named_and_left_as_it_is(database, kind, writing):
    damaged = damage(database.read_bytes(), kind)
    database.write_bytes(damaged)
    problem = problem_of_opening(writing=writing)
    assert "study.db" in problem.message
    assert problem.hint
    assert problem.exit_code == (2 if kind == "empty" and not writing else 3)
    assert database.read_bytes() == damaged
    kept = json.loads((HERE.directory / "trials/0000/outcome.json").read_text())
    assert kept["outcome"]["output_throughput_tokens_per_s"] == 812.5


def test_any_bytes_give_a_study_or_a_message(database):
    whole = database.read_bytes()
    dice = random.Random(7)
    for number in range(60):
        data = bytearray(whole)
        for _ in range(dice.choice([1, 3, 30])):
            at = dice.randrange(len(data))
            data[at : at + 8] = dice.randbytes(8)
        database.write_bytes(data)
        try:
            opened = StudyStore.open_for_writing(HERE) if number % 2 else StudyStore.open(HERE)
        except TunerError:
            continue
        try:
            read(opened)
            opened.left_trials()
        except TunerError:
            continue
        finally:
            opened.close()


def test_empty_file_of_a_killed_first_run_is_filled(in_tmp):
    HERE.directory.mkdir(parents=True)
    HERE.sqlite_path.touch()
    with pytest.raises(InputError, match="empty"):
        StudyStore.open(HERE)
    store = StudyStore.open_for_writing(HERE)
    store.bind(study_spec(), {}, {})
    measure(store)
    store.close()
    assert len(read(StudyStore.open(HERE)).trials) == 1


# --- another version, another tuner, another time ----------------------------------------


def test_study_of_a_newer_tuner_is_refused_with_its_version(store):
    store._study.set_user_attr("tuner:schema", 99)
    store._study.set_user_attr("versions", {"tuner": "7.0"})
    store.close()
    for writing in (True, False):
        problem = problem_of_opening(writing=writing)
        assert problem.exit_code == 2
        assert "format 99, tuner 7.0" in problem.message
        assert "upgrade the tuner" in problem.hint


def test_database_of_a_newer_optuna_is_refused(database):
    with sqlite3.connect(database) as connection:
        connection.execute("update alembic_version set version_num = 'v99.0.0'")
        connection.execute("update version_info set schema_version = 99")
    for writing in (True, False):
        problem = problem_of_opening(writing=writing)
        assert problem.exit_code == 3
        assert "pip install -U optuna" in problem.hint
    with pytest.raises(EnvironmentProblem):
        find("test")


def test_owner_is_known_though_the_clock_was_set(monkeypatch):
    me = this_process()
    monkeypatch.setattr(psutil, "boot_time", lambda: 0.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert not is_gone(me)
    assert is_gone({**me, "started": "another boot/1"})
    assert not is_gone({**me, "host": "elsewhere"})


def test_study_takes_no_harm_from_a_clock_that_jumps(in_tmp, monkeypatch):
    now = [1_700_000_000.0]

    def jump(config, launch):
        now[0] += 86_400.0 * (-3 if launch % 2 else 2)
        return by_seqs(config, launch)

    monkeypatch.setattr(time, "time", lambda: now[0])
    rig = Rig(in_tmp, jump, spec=study_spec(budget=BudgetSpec(5, 3600.0), search_space=KNOBS[:1]))
    rig.run()
    trials = rig.read().trials
    assert [t.number for t in trials if t.state.finished] == [0, 1, 2, 3, 4]
    assert all(0 <= t.duration_s < 60 for t in trials)


_TUNER = """
import sys
sys.path.insert(0, sys.argv[1])
from test_storage_faults import HERE, measure, start, study_spec
from tuner.records import Attempt
from tuner.storage import StudyStore
from tuner.types import FailureCause, Stage
store = StudyStore.open_for_writing(HERE)
store.bind(study_spec(), {}, {})
while True:
    measure(store)
    print(len(store.trials()), flush=True)
    trial = start(store)
    for number in range(3):
        store.record_attempt(trial, Attempt(FailureCause.CRASH, Stage.LOADING, "x", "y", number))
    print("attempted", trial.number, flush=True)
    store.interrupt(trial)
    store.drop_queued()
"""


def test_what_was_told_survives_kill_9_at_any_moment(in_tmp):
    dice = random.Random(3)
    finished, attempted = 0, set()
    for _ in range(4):
        tuner = subprocess.Popen(
            [sys.executable, "-c", _TUNER, str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        first = tuner.stdout.readline()
        assert first
        time.sleep(dice.uniform(0.0, 0.4))
        tuner.send_signal(signal.SIGKILL)
        lines = [first, *tuner.communicate()[0].splitlines()]
        attempted |= {int(line.split()[1]) for line in lines if line.startswith("attempted")}
        finished += sum(not line.startswith("attempted") for line in lines)
        store = StudyStore.open_for_writing(HERE)
        for left in store.left_trials():
            store.interrupt(left.trial)
        while store.next_queued() is not None:
            store.drop_queued()
        trials = read(store).trials
        store.close()
        assert sum(t.state is TrialState.MEASURED for t in trials) >= finished
        by_number = {t.number: t for t in trials}
        assert all(len(by_number[number].attempts) == 3 for number in attempted)


@pytest.mark.parametrize(
    ("name", "value", "reads"),
    [
        ("tuner:process", {"pid": "many"}, StudyStore.left_processes),
        ("tuner:attempts", 5, StudyStore.left_trials),
        ("tuner:attempts", [{"cause": 1}], StudyStore.left_trials),
    ],
)
def test_left_trial_with_damaged_attributes_is_named(store, name, value, reads):
    trial = start(store)
    trial.optuna_trial.set_user_attr(name, value)
    with pytest.raises(EnvironmentProblem, match="it is damaged") as caught:
        reads(store)
    assert caught.value.exit_code == 3
    assert "\n" not in caught.value.message


def test_damaged_budget_is_named(database):
    optuna.load_study(study_name="test", storage=HERE.url).set_user_attr(
        "tuner:budget", {"trials": "many"}
    )
    problem = problem_of_opening(writing=False)
    assert "it is damaged (ValidationError" in problem.message
    assert problem.exit_code == 3


# --- an older tuner ----------------------------------------------------------------------


def test_study_of_an_older_tuner_is_read_but_not_gone_on_with(database):
    optuna.load_study(study_name="test", storage=HERE.url).set_user_attr("tuner:schema", 1)
    assert [t.state for t in read(StudyStore.open(HERE)).trials] == [TrialState.MEASURED]
    with pytest.raises(InputError, match="measured by an older tuner") as caught:
        StudyStore.open_for_writing(HERE)
    assert "--study NAME" in caught.value.hint
    assert [t.state for t in read(StudyStore.open(HERE)).trials] == [TrialState.MEASURED]
