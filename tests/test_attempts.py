"""A study repeats a start where that may help, and remembers each failed one."""

from __future__ import annotations

import asyncio
import errno
import shutil
from dataclasses import replace

import pytest
from test_study import KNOBS, SMALL_KV, Answering, Rig, by_seqs

from tuner.attempts import CACHE_VARIABLE
from tuner.engine.base import ConfigAnswer
from tuner.errors import EnvironmentProblem, Interrupted
from tuner.records import TrialState
from tuner.storage import StudyLocation, StudyStore
from tuner.types import Failure, FailureCause, Stage

BUSY = Failure(FailureCause.DEVICE_BUSY, Stage.LAUNCH, "Free memory on device (1.2/23.6 GiB)")
UNKNOWN = Failure(FailureCause.UNKNOWN, Stage.COMPILING, "Segmentation fault")
CACHE = Failure(FailureCause.COMPILE_CACHE, Stage.COMPILING, "EOFError: Ran out of input")
DISK = Failure(FailureCause.DISK_FULL, Stage.LOADING, "OSError: [Errno 28] No space left")


def failing(*outcomes, then=by_seqs):
    """The first launches end so, all others as `then` says."""
    return lambda config, launch: (
        outcomes[launch - 1] if launch <= len(outcomes) else then(config, launch)
    )


@pytest.fixture
def on_disk(in_tmp):
    """A rig whose study is in a database, and a way to open it as a next run would."""
    opened = []

    def rig(outcome, **options):
        for store in opened:
            store.close()
        store = StudyStore.open_for_writing(StudyLocation.of("test"))
        opened.append(store)
        return Rig(in_tmp, outcome, store=store, **options)

    yield rig
    for store in opened:
        store.close()


def test_run_waits_longer_each_time_for_a_busy_device(in_tmp):
    rig = Rig(in_tmp, failing(BUSY, BUSY))
    rig.run()
    assert sum(rig.paused) == pytest.approx(25)
    assert len({config.digest for config in rig.launched[:3]}) == 1
    first = rig.read().trials[0]
    assert first.state is TrialState.MEASURED
    assert [(a.cause, a.line) for a in first.attempts] == [(BUSY.cause, BUSY.line)] * 2
    assert [a.then for a in first.attempts] == [
        "started again after 5 s for the memory of the device to be freed",
        "started again after 20 s for the memory of the device to be freed",
    ]
    assert sum("after 20 s" in notice for notice in rig.listener.notices) == 1


def test_run_stops_the_study_where_the_device_stays_busy_and_counts_anew_after(in_tmp):
    rig = Rig(in_tmp, lambda *_: BUSY)
    with pytest.raises(EnvironmentProblem, match="device_busy"):
        rig.run()
    assert len(rig.launched) == 3
    again = rig.again(failing(BUSY, BUSY))
    again.run()
    assert len(again.read().trials[1].attempts) == 2


def test_run_repeats_an_unknown_failure_once_and_then_counts_it(in_tmp):
    rig = Rig(in_tmp, failing(UNKNOWN, UNKNOWN))
    rig.run()
    first = rig.read().trials[0]
    assert first.state is TrialState.INFEASIBLE
    assert first.failure.cause is FailureCause.UNKNOWN
    assert [a.cause for a in first.attempts] == [FailureCause.UNKNOWN]
    assert rig.launched[0] == rig.launched[1] != rig.launched[2]


def test_run_counts_the_failure_that_the_second_start_names(in_tmp):
    rig = Rig(in_tmp, failing(UNKNOWN, SMALL_KV))
    rig.run()
    assert rig.read().trials[0].failure == SMALL_KV


def test_run_gives_one_start_a_fresh_compile_cache(in_tmp):
    seen = []

    def outcome(config, launch):
        seen.append(config.env.get(CACHE_VARIABLE))
        return CACHE if launch == 1 else by_seqs(config, launch)

    rig = Rig(in_tmp, outcome)
    rig.run()
    folder = rig.store.trial_directory(0)
    assert seen[0] is None
    assert seen[1] == str((folder / "fresh-cache").resolve())
    assert seen[2:] == [None] * len(seen[2:])
    trial = rig.read().trials[0]
    assert CACHE_VARIABLE in trial.attempts[0].then
    assert CACHE_VARIABLE not in trial.config.env
    assert not (folder / "fresh-cache").exists()


def test_interruption_of_a_wait_comes_at_once_and_the_count_goes_on(on_disk):
    rig = on_disk(failing(UNKNOWN, BUSY))
    slept = []

    async def cancelled(seconds):
        slept.append(seconds)
        asyncio.current_task().cancel()
        await asyncio.sleep(60)

    rig._pause = cancelled
    with pytest.raises(Interrupted):
        rig.run()
    assert len(slept) == 1
    again = on_disk(failing(UNKNOWN))
    again.run()
    trial = again.read().trials[1]
    assert trial.failure.cause is FailureCause.UNKNOWN  # for the second time
    assert [(a.cause, a.trial) for a in trial.attempts] == [
        (FailureCause.UNKNOWN, 0),
        (FailureCause.DEVICE_BUSY, 0),
    ]


def test_attempts_survive_a_tuner_that_dies_between_two_starts(on_disk):
    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    rig = on_disk(failing(UNKNOWN, then=die))
    rig.store.interrupt = lambda trial: None  # as after kill -9
    with pytest.raises(Killed):
        rig.run()
    again = on_disk(failing(UNKNOWN))
    again.run()
    trial = again.read().trials[1]
    assert trial.params == again.read().trials[0].params
    assert trial.state is TrialState.INFEASIBLE
    assert len(trial.attempts) == 1


def test_run_names_the_disk_that_is_full(in_tmp, monkeypatch):
    class Usage:
        free = 5 * 2**20

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    rig = Rig(in_tmp, lambda *_: DISK)
    with pytest.raises(EnvironmentProblem, match=r"no room left in .*5 MiB free"):
        rig.run()
    assert len(rig.launched) == 1


def test_run_names_the_file_that_a_launch_could_not_write(in_tmp):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "studies/x/launch.json")

    rig = Rig(in_tmp, full)
    with pytest.raises(EnvironmentProblem, match=r"launch\.json cannot be written: No space"):
        rig.run()
    assert [t.state for t in rig.read().trials] == [TrialState.INTERRUPTED, TrialState.WAITING]


@pytest.mark.parametrize(
    ("error", "told", "hint"),
    [
        (OSError(errno.ENOENT, "No such file", "s/outcome.json"), "s/outcome.json", "leave"),
        (OSError(errno.ESTALE, "Stale file handle", "s/server.log"), "Stale file", "mounted"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "s"), "too long", "shorter path"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open", "ulimit -n"),
        (TimeoutError(), "broke off: TimeoutError", "mend that"),
    ],
)  # fmt: skip
def test_run_names_whatever_the_system_refuses_a_launch(in_tmp, error, told, hint):
    def refused(*_):
        raise error

    rig = Rig(in_tmp, refused)
    with pytest.raises(EnvironmentProblem, match=told) as caught:
        rig.run()
    assert hint in caught.value.hint
    assert "run the same command again" in caught.value.hint
    assert rig.read().trials[0].state is TrialState.INTERRUPTED


def test_run_names_a_folder_that_was_removed_meanwhile(in_tmp):
    def removed(config, launch):
        folder = rig.store.trial_directory(0)
        shutil.rmtree(folder)
        (folder / "launch.json").write_text("{}")

    rig = Rig(in_tmp, removed)
    with pytest.raises(EnvironmentProblem, match=r"launch\.json cannot be written: No such file"):
        rig.run()


def test_run_keeps_an_outcome_whose_folder_cannot_be_tidied(in_tmp, monkeypatch):
    def untidy(folder):
        raise OSError(errno.EROFS, "Read-only file system", "server.log")

    monkeypatch.setattr("tuner.attempts.tidy", untidy)
    rig = Rig(in_tmp, by_seqs)
    rig.run()
    assert rig.read().finished_trials == 6
    assert "server.log is left as it is: Read-only file system" in rig.listener.notices


def test_run_asks_the_check_again_where_the_network_failed(in_tmp):
    lost = ConfigAnswer(
        accepted=False, error="Connection timed out", cause=FailureCause.MODEL_NOT_FOUND
    )

    class Recovering(Answering):
        asked = 0

        async def check(self, config):
            self.asked += 1
            return lost if self.asked == 3 else await super().check(config)

    rig = Rig(in_tmp, by_seqs, check=Recovering())
    rig.run()
    assert rig.read().finished_trials == 6
    assert sum(rig.paused) == pytest.approx(20)


def test_masks_what_the_server_wrote_into_its_log(in_tmp):
    def outcome(config, launch):
        folder = rig.store.trial_directory(launch - 1)
        (folder / "server.log").write_text("args: {'api_key': ['plain-word-1']}\nall is well\n")
        return by_seqs(config, launch)

    rig = Rig(in_tmp, outcome)
    rig.spec = replace(rig.spec, search_space=KNOBS)
    rig.run()
    log = (rig.store.trial_directory(0) / "server.log").read_text()
    assert log == "args: {'api_key': ***}\nall is well\n"
