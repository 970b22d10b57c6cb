"""The tuner killed before every single write of a study: nothing is lost, nothing is half done.

The child of a fork runs a study with made-up outcomes on a database in a file, and kills itself
before its n-th write to the database or to a file; this process goes on with the study. For a
few n here, drawn by `--seed N`; for every n with
`python -m pytest tests/test_killed_store.py --long`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
import sqlalchemy
from builders import study_spec
from killing import finished, trials_of
from optuna.trial import TrialState
from test_study import KNOBS, SMALL_KV, Answering, Listening, Making, by_seqs

from tuner.storage import StudyLocation, StudyStore
from tuner.study import StudyLoop
from tuner.types import BudgetSpec

TRIALS = 3
A_FEW = 12
FOLDER = Path("studies/test")
DATABASE = FOLDER / "study.db"
LAUNCHES = Path("launches")
ALL_WRITES = 1_000_000
SPEC = study_spec(search_space=KNOBS, budget=BudgetSpec(TRIALS, None))


@pytest.fixture
def in_a_hurry(in_tmp):
    """Nobody pulls the plug here: SQLite need not wait for the disk."""

    def hurry(connection, _record):
        connection.execute("pragma synchronous = off")

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", hurry)
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", hurry)


class Killer:
    """Counts writes, and ends the process without a word before the `at`-th."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def __call__(self, *_args):
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def run_study():
    """All of `tuner run` that writes, but for the server and the best file."""
    store = StudyStore.open_for_writing(StudyLocation("test", FOLDER, f"sqlite:///{DATABASE}"))
    try:
        store.bind(SPEC, {}, {})
        loop = StudyLoop(SPEC, store, Making(outcome), Answering(), Listening())
        asyncio.run(loop.run())
    finally:
        store.close()


def outcome(config, launch):
    """Of a launch, which is recorded in a file; the second configuration fails."""
    with LAUNCHES.open("a") as file:
        file.write(f"{config.digest}\n")
    return SMALL_KV if len(set(launches())) == 2 else by_seqs(config, launch)


def in_child(at):
    """Run the study, killed before write number `at`; the number of writes, or None if killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        killer = Killer(at)
        sqlalchemy.event.listen(sqlalchemy.Engine, "commit", killer)
        for name in ("write_text", "write_bytes", "mkdir", "rename", "replace", "unlink"):
            watch(Path, name, killer)
        watch(os, "replace", killer)
        try:
            run_study()
        finally:
            os.write(writing, str(killer.count).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return int(told) if told else None


def watch(owner, name, killer):
    original = getattr(owner, name)

    def watched(*args, **kwargs):
        killer()
        return original(*args, **kwargs)

    setattr(owner, name, watched)


def launches():
    return LAUNCHES.read_text().splitlines() if LAUNCHES.exists() else []


def start_anew():
    for path in sorted(FOLDER.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    LAUNCHES.unlink(missing_ok=True)


def check_resumed(kept, at):
    """The study was killed before write `at` with `kept` finished, and has been gone on with."""
    trials = trials_of(DATABASE)
    done = finished(trials)
    assert len(done) == TRIALS, at
    assert {number: done[number] for number in kept} == kept, at
    assert not [t for t in trials if t.state in (TrialState.RUNNING, TrialState.WAITING)], at
    params = [str(t.user_attrs["tuner:params"]) for t in trials if t.number in done]
    assert len(set(params)) == TRIALS, at
    assert sum(bool(t.user_attrs.get("reference")) for t in trials if t.number in done) == 1, at
    repeated = len(launches()) - len(set(launches()))
    assert repeated <= 1, f"{at}: at most the running trial is launched again"


def test_kill_before_any_write_loses_no_finished_trial(in_a_hurry, long_form, seed):
    FOLDER.mkdir(parents=True)
    writes = in_child(ALL_WRITES)
    assert writes > 20 * TRIALS
    check_resumed({}, 0)
    moments = range(1, writes + 1)
    for at in moments if long_form else random.Random(seed).sample(moments, A_FEW):
        start_anew()
        assert in_child(at) is None
        kept = finished(trials_of(DATABASE))
        run_study()
        check_resumed(kept, at)
