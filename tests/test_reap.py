"""What a dead tuner left is ended by the next one, and nothing of anybody else."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from misbehaving import (
    FAMILY,
    SLEEPER,
    STUBBORN,
    Trial,
    eventually,
    is_alive,
    supervisor_of,
    trial_in,
)

from tuner.engine.base import ProcessRecord
from tuner.engine.reap import boot_id, descendants, reap, send


@pytest.fixture
async def trial(tmp_path: Path) -> AsyncIterator[Trial]:
    async with trial_in(tmp_path) as trial:
        yield trial


async def test_reap_ends_a_living_supervisor_and_its_server(trial: Trial) -> None:
    process = await trial.spawn(FAMILY + STUBBORN, ups=3)
    record = process.record
    everybody = [record.pid, supervisor_of(record.pid), record.pgid, *trial.children()]
    assert await asyncio.to_thread(reap, record) == sorted(everybody)
    assert not os.path.exists(record.tmpdir)
    assert await process.wait() == -signal.SIGKILL


async def test_reap_wakes_a_supervisor_that_was_stopped(trial: Trial) -> None:
    process = await trial.spawn(FAMILY + STUBBORN, ups=3)
    guardian = process.record.pid
    for pid in (guardian, supervisor_of(guardian)):
        os.kill(pid, signal.SIGSTOP)
    start_s = time.monotonic()
    await asyncio.to_thread(reap, process.record)
    assert time.monotonic() - start_s < 15
    assert not [pid for pid in trial.children() if is_alive(pid)]


@pytest.mark.parametrize("kept", ["TMPDIR", "TUNER_SERVER"])
async def test_reap_finds_orphans_by_one_mark(trial: Trial, kept: str) -> None:
    """Nobody lives who could tell what they descend from, and the session is not the server's."""
    other = {"TMPDIR": "TUNER_SERVER", "TUNER_SERVER": "TMPDIR"}[kept]
    code = f"""
    orphan = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], start_new_session=True,
        env={{**os.environ, {other!r}: "/elsewhere"}},
    )
    say("child", orphan.pid)
    """
    process = await trial.spawn(textwrap.dedent(code) + SLEEPER, ups=2)
    record = process.record
    for pid in (record.pid, supervisor_of(record.pid), record.pgid):
        os.kill(pid, signal.SIGSTOP)
    for pid in (record.pid, supervisor_of(record.pid), record.pgid):
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not is_alive(record.pgid), "the leader is dead")
    await process.stop()  # it buries what is left, as `reap` does
    assert not [pid for pid in trial.children() if is_alive(pid)]


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen]:
    """A process of someone else, in a session of its own."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


NO_TMPDIR = "/tmp/tuner-none_123"


def record_of(process: subprocess.Popen, **changes: object) -> ProcessRecord:
    started = psutil.Process(process.pid).create_time()
    true = ProcessRecord(process.pid, process.pid, started, started, boot_id(), NO_TMPDIR)
    return dataclasses.replace(true, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"boot_id": "another"},
        {"create_time": 1e9, "supervisor_create_time": 1e9},
        {"create_time": 1e9, "supervisor_create_time": 1e9, "tmpdir": ""},
    ],
)
async def test_reap_touches_no_process_with_a_reused_id(
    stranger: subprocess.Popen, changes: dict[str, object]
) -> None:
    assert reap(record_of(stranger, **changes)) == []
    assert stranger.poll() is None


async def test_reap_kills_the_recorded_leader(stranger: subprocess.Popen) -> None:
    """The counterpart of the test above: the same record, unchanged."""
    record = record_of(stranger, pid=2**22 + 1)
    assert await asyncio.to_thread(reap, record) == [stranger.pid]
    assert stranger.wait() == -signal.SIGKILL


async def test_reap_of_an_earlier_boot_removes_the_tmpdir(
    stranger: subprocess.Popen, tmp_path: Path
) -> None:
    left = tmp_path / "tuner-left_123"
    (left / "folder").mkdir(parents=True)
    assert reap(record_of(stranger, boot_id="another", tmpdir=str(left))) == []
    assert not left.exists()


async def test_reap_removes_no_folder_that_is_not_a_private_tmpdir(
    stranger: subprocess.Popen, tmp_path: Path
) -> None:
    assert reap(record_of(stranger, boot_id="another", tmpdir=str(tmp_path))) == []
    assert tmp_path.exists()


async def test_reap_passes_over_an_id_of_another_container(stranger: subprocess.Popen) -> None:
    """The same machine, so the same boot; but ids there are not ids here."""
    here = boot_id()
    assert "pid:[" in here
    elsewhere = here.replace("pid:[", "pid:[9")
    assert reap(record_of(stranger, boot_id=elsewhere)) == []
    assert stranger.poll() is None


# --- send ------------------------------------------------------------------------------


@pytest.fixture(params=["pidfd", "no pidfd"])
def any_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no pidfd":

        def refuse(_: int) -> int:
            raise PermissionError

        monkeypatch.setattr(os, "pidfd_open", refuse)


@pytest.mark.usefixtures("any_kernel")
def test_send_signals_a_process(stranger: subprocess.Popen) -> None:
    send([psutil.Process(stranger.pid)], signal.SIGTERM)
    assert stranger.wait() == -signal.SIGTERM


@pytest.mark.usefixtures("any_kernel")
def test_send_passes_over_a_reused_id(
    stranger: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil knows who had the id before by the time it started."""
    found = psutil.Process(stranger.pid)
    pid, started = found._ident
    monkeypatch.setattr(found, "_ident", (pid, started - 5))
    send([found], signal.SIGKILL)
    time.sleep(0.05)
    assert stranger.poll() is None


@pytest.mark.usefixtures("any_kernel")
def test_send_passes_over_one_that_has_ended(stranger: subprocess.Popen) -> None:
    found = psutil.Process(stranger.pid)
    stranger.kill()
    stranger.wait()
    send([found], signal.SIGKILL)


def test_descendants_leaves_out_a_stranger_with_the_id_of_a_child(
    stranger: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child ended, and its id was given away, between psutil's two looks."""
    before = {child.pid for child in descendants(os.getpid())}
    assert stranger.pid in before
    outsider = psutil.Process(os.getppid())
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [outsider])
    assert descendants(os.getpid()) == []
