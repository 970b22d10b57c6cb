"""The tuner, the supervisor or the guardian is killed; nothing of the server is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from misbehaving import (
    FAMILY,
    LIMIT_S,
    MAPS_SHARED,
    PRELUDE,
    SLEEPER,
    STUBBORN,
    Trial,
    argv,
    eventually,
    is_alive,
    supervisor_of,
    trial_in,
)

from tuner.engine.base import ProcessRecord
from tuner.engine.process import reap


@pytest.fixture
async def trial(tmp_path: Path) -> AsyncIterator[Trial]:
    async with trial_in(tmp_path) as trial:
        yield trial


TUNER = """
import asyncio, dataclasses, json, os, sys, time
from pathlib import Path
from tuner.engine.process import SupervisedProcess

async def main():
    command, log = json.loads(sys.argv[1]), Path(sys.argv[2])
    process = await SupervisedProcess.spawn(
        command, env=dict(os.environ), cwd=None, log_path=log, grace_s=0.3
    )
    if "fork" in sys.argv and (pid := os.fork()):
        print("child", pid, file=log.open("a"))
    elif "fork" in sys.argv:
        os.close(1)
        time.sleep(600)
    print(json.dumps(dataclasses.asdict(process.record)), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""

RunTuner = Callable[..., tuple[subprocess.Popen, ProcessRecord]]


@pytest.fixture
def tuner(trial: Trial) -> Iterator[RunTuner]:
    """Runs a tuner in a process of its own, with a server of the given code."""
    tuners: list[subprocess.Popen] = []

    def run(code: str, *options: str) -> tuple[subprocess.Popen, ProcessRecord]:
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        started = subprocess.Popen(
            [sys.executable, "-c", TUNER, json.dumps(argv(code)), str(trial.log), *options],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        tuners.append(started)
        assert started.stdout is not None
        return started, ProcessRecord(**json.loads(started.stdout.readline()))

    yield run
    for started in tuners:
        started.kill()
        started.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_death_of_the_tuner_ends_everything(
    trial: Trial, tuner: RunTuner, number: int
) -> None:
    process, record = tuner(FAMILY + STUBBORN)
    await eventually(lambda: trial.lines().count("up") == 3, "the family is up")
    pids = [record.pid, record.pgid, *trial.children()]
    assert all(is_alive(pid) for pid in pids)
    process.send_signal(number)
    await eventually(lambda: not any(map(is_alive, pids)), "all are gone")
    assert not os.path.exists(record.tmpdir)
    assert reap(record) == []


async def test_death_of_the_tuner_is_noticed_though_a_fork_of_it_holds_the_pipe(
    trial: Trial, tuner: RunTuner
) -> None:
    process, record = tuner(STUBBORN, "fork")
    await eventually(lambda: trial.lines().count("up") == 1, "the server is up")
    process.kill()
    await eventually(lambda: not is_alive(record.pid), "the supervisor is done")
    assert not is_alive(record.pgid)
    (fork,) = trial.children()
    assert is_alive(fork)
    os.kill(fork, signal.SIGKILL)
    await eventually(lambda: not is_alive(fork), "the fork is gone")


@pytest.mark.parametrize(
    "victims",
    [
        ("supervisor",),
        ("guardian",),
        ("tuner", "supervisor"),
        ("tuner", "guardian"),
        ("leader",),
        ("tuner", "leader"),
        ("engine", "leader", "supervisor"),
    ],
    ids="+".join,
)
async def test_nothing_is_left_when_these_are_killed_at_once(
    trial: Trial, tuner: RunTuner, tmp_path: Path, victims: tuple[str, ...]
) -> None:
    shared = Path(f"/dev/shm/psm_test_{os.getpid()}_{time.monotonic_ns()}")
    engine = f"{PRELUDE}{MAPS_SHARED.format(name=str(shared))}{STUBBORN}"
    process, record = tuner(f"{FAMILY}child({engine!r})\n{STUBBORN}")
    await eventually(lambda: trial.lines().count("up") == 4, "the family is up")
    server = [record.pgid, *trial.children()]
    pids = {
        "tuner": process.pid,
        "guardian": record.pid,
        "supervisor": supervisor_of(record.pid),
        "leader": record.pgid,
        "engine": trial.children()[0],
    }
    killed = [pids[victim] for victim in victims]
    for pid in killed:
        os.kill(pid, signal.SIGSTOP)  # so that none of them can react
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    if not {"tuner", "supervisor", "guardian"} & set(victims):
        await eventually(lambda: not is_alive(record.pgid), "the leader is dead")
        process.kill()  # its children are ended by the tuner, or with it
    everything = [*server, record.pid, pids["supervisor"]]
    await eventually(lambda: not any(map(is_alive, everything)), "all are gone", limit_s=15)
    assert not shared.exists()
    assert not os.path.exists(record.tmpdir)
    assert reap(record) == []


async def test_tuner_supervisor_and_guardian_killed_at_once_terminates_the_server(
    trial: Trial, tuner: RunTuner
) -> None:
    """Nobody is left who could KILL; the next run does."""
    process, record = tuner(FAMILY + SLEEPER)
    await eventually(lambda: trial.lines().count("up") == 3, "the family is up")
    supervisor = supervisor_of(record.pid)
    for pid in (process.pid, record.pid, supervisor):
        os.kill(pid, signal.SIGSTOP)
    for pid in (process.pid, record.pid, supervisor):
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not is_alive(record.pgid), "the leader is gone")
    orphans = trial.children()
    assert all(is_alive(pid) for pid in orphans)
    assert await asyncio.to_thread(reap, record) == sorted(orphans)
    assert not any(map(is_alive, orphans))
    assert not os.path.exists(record.tmpdir)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("who", ["supervisor", "guardian"])
async def test_signalled_supervisor_ends_the_server(trial: Trial, who: str, number: int) -> None:
    process = await trial.spawn(FAMILY + STUBBORN, ups=3)
    guardian = process.record.pid
    os.kill(guardian if who == "guardian" else supervisor_of(guardian), number)
    assert await asyncio.wait_for(process.wait(), LIMIT_S) == -signal.SIGKILL
    await process.stop()


async def test_killed_supervisor_is_noticed_by_the_tuner(trial: Trial) -> None:
    process = await trial.spawn(FAMILY + STUBBORN, ups=3)
    os.kill(supervisor_of(process.record.pid), signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), LIMIT_S) == -signal.SIGKILL
    assert not is_alive(process.record.pgid)
    assert not [pid for pid in trial.children() if is_alive(pid)]


@pytest.mark.parametrize("who", ["supervisor", "guardian", "server"])
async def test_stop_does_not_wait_for_one_that_was_stopped(trial: Trial, who: str) -> None:
    process = await trial.spawn(FAMILY + STUBBORN, ups=3)
    guardian = process.record.pid
    pids = {
        "guardian": guardian,
        "supervisor": supervisor_of(guardian),
        "server": process.record.pgid,
    }
    os.kill(pids[who], signal.SIGSTOP)
    start_s = time.monotonic()
    await process.stop()
    assert time.monotonic() - start_s < 15
    assert not [pid for pid in trial.children() if is_alive(pid)]


async def test_stop_does_without_a_supervisor_that_hangs(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.engine.process.KILL_LIMIT_S", 0.1)
    monkeypatch.setattr("tuner.engine.process.SETTLE_S", 0.1)
    monkeypatch.setattr("tuner.engine.process.resume", lambda _: None)
    process = await trial.spawn(FAMILY + STUBBORN, ups=3)
    os.kill(supervisor_of(process.record.pid), signal.SIGSTOP)
    monkeypatch.setattr("tuner.engine.process._MARGIN_S", 0.1)
    stopping = asyncio.create_task(process.stop())
    await asyncio.sleep(0.3)
    monkeypatch.setattr("tuner.engine.process._MARGIN_S", LIMIT_S)
    await stopping
    assert not [pid for pid in trial.children() if is_alive(pid)]
