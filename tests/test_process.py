"""Real processes that misbehave as vLLM does, and worse; nothing of them may be left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from misbehaving import (
    FAMILY,
    LIMIT_S,
    SLEEPER,
    STUBBORN,
    Trial,
    argv,
    eventually,
    is_alive,
    trial_in,
)

from tuner.engine.process import SupervisedProcess, free_port
from tuner.engine.spawn import bury
from tuner.errors import EnvironmentProblem


@pytest.fixture
async def trial(tmp_path: Path) -> AsyncIterator[Trial]:
    async with trial_in(tmp_path) as trial:
        yield trial


# --- start and exit --------------------------------------------------------------------


async def test_spawn_runs_the_command_in_its_own_session_and_records_it(trial: Trial) -> None:
    process = await trial.spawn(SLEEPER, ups=1)
    record = process.record
    assert os.getpgid(record.pgid) == os.getsid(record.pgid) == record.pgid
    assert os.getsid(record.pid) == record.pid
    assert psutil.Process(record.pgid).create_time() == pytest.approx(record.create_time)
    assert psutil.Process(record.pid).create_time() == pytest.approx(record.supervisor_create_time)
    assert [found.pid for found in process.descendants()] == [record.pgid]
    assert process.exit_code is None


async def test_spawn_is_quick(trial: Trial) -> None:
    """The supervisor stands between every trial and its server."""
    start_s = time.monotonic()
    await trial.spawn(SLEEPER)
    assert time.monotonic() - start_s < 5


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.abort()", -6),
    ],
)
async def test_wait_returns_exit_code_or_minus_signal(
    trial: Trial, code: str, expected: int
) -> None:
    process = await trial.spawn(code)
    assert await asyncio.wait_for(process.wait(), LIMIT_S) == expected
    assert process.exit_code == expected
    await process.stop()
    assert process.exit_code == expected


async def test_server_sees_its_environment_folder_and_no_other_descriptor(
    trial: Trial, tmp_path: Path
) -> None:
    with socket.socket() as listening, (tmp_path / "study.db").open("w") as database:
        os.set_inheritable(listening.fileno(), True)
        os.set_inheritable(database.fileno(), True)
        process = await SupervisedProcess.spawn(
            argv(
                """
                say(sorted(os.listdir("/proc/self/fd"))[:-1])  # the last one is the listing's
                say(os.environ["TMPDIR"], os.environ["MODE"], os.getcwd(), len(os.environ) < 9)
                say(repr(sys.stdin.read()), os.readlink("/proc/self/fd/0"))
                """
            ),
            env={"MODE": "test", "PATH": os.environ["PATH"]},
            cwd=tmp_path,
            log_path=trial.log,
        )
        trial.started.append(process)
        assert await process.wait() == 0
    tmpdir = process.record.tmpdir
    assert trial.lines() == [
        "['0', '1', '2']",
        f"{tmpdir} test {tmp_path} True",
        "'' /dev/null",
    ]
    assert len(tmpdir) <= 70, "vLLM's sockets there must fit sun_path"


async def test_tmpdir_stays_short_where_the_temporary_folder_is_deep(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    process = await trial.spawn(SLEEPER)
    assert len(process.record.tmpdir) <= 70
    assert os.path.isdir(process.record.tmpdir)


async def test_log_gets_all_output_of_both_streams_and_is_private(trial: Trial) -> None:
    trial.log.write_text("before\n")
    trial.log.chmod(0o600)
    code = """
    for _ in range(500):
        os.write(1, b"o" * 4999 + b"\\n")
        os.write(2, b"e" * 4999 + b"\\n")
    """
    process = await trial.spawn(code)
    assert await process.wait() == 0
    content = trial.log.read_bytes()
    assert len(content) == len("before\n") + 5_000_000
    assert content.startswith(b"before\n")
    assert (content.count(b"o" * 4999), content.count(b"e" * 4999)) == (500, 500)


async def test_log_is_created_for_the_user_alone(trial: Trial) -> None:
    await trial.spawn(SLEEPER)
    assert trial.log.stat().st_mode & 0o777 == 0o600


# --- a start that fails ----------------------------------------------------------------


def script(folder: Path, text: str, mode: int) -> str:
    path = folder / "vllm"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "message", "hint"),
    [
        ("missing", "no-such-vllm is not found", "full path"),
        ("not executable", "Permission denied", "chmod"),
        ("bad interpreter", "cannot be executed", "interpreter"),
        ("no program", "Exec format error", "#! line"),
        ("no folder", "nowhere cannot be used", "Create it"),
        ("no log", "cannot be written", "permissions"),
    ],
)
async def test_spawn_tells_why_a_command_cannot_be_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str, hint: str
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    commands = {
        "missing": lambda: "no-such-vllm",
        "not executable": lambda: script(tmp_path, "#!/bin/sh\n", 0o600),
        "bad interpreter": lambda: script(tmp_path, "#!/no/such/python\n", 0o700),
        "no program": lambda: script(tmp_path, "\0\1\2", 0o700),
    }
    command = commands.get(kind, lambda: sys.executable)()
    with pytest.raises(EnvironmentProblem) as caught:
        await SupervisedProcess.spawn(
            [command, "-c", "pass"],
            env=dict(os.environ),
            cwd=tmp_path / "nowhere" if kind == "no folder" else None,
            log_path=tmp_path / ("nowhere" if kind == "no log" else ".") / "server.log",
        )
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert list(temporary.iterdir()) == []


async def test_cancelled_spawn_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    trial = Trial(tmp_path)
    cancelled = 0
    for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1):
        spawning = asyncio.create_task(trial.spawn(f"say('child', os.getpid());{STUBBORN}"))
        await asyncio.sleep(delay_s)
        spawning.cancel()
        try:
            process = await spawning
        except asyncio.CancelledError:
            cancelled += 1
        else:  # it was quicker
            await process.stop()
    assert cancelled >= 1
    assert not [pid for pid in trial.children() if is_alive(pid)]
    assert list(temporary.iterdir()) == []


# --- stop ------------------------------------------------------------------------------


async def test_stop_lets_a_server_end_by_itself(trial: Trial) -> None:
    code = """
    signal.signal(signal.SIGTERM, lambda *_: (say("bye"), sys.exit(3)))
    say("up")
    time.sleep(600)
    """
    process = await trial.spawn(code, grace_s=LIMIT_S, ups=1)
    start_s = time.monotonic()
    await process.stop()
    assert time.monotonic() - start_s < LIMIT_S / 2
    assert process.exit_code == 3
    assert trial.lines()[-1] == "bye"
    assert await process.wait() == 3
    assert process.descendants() == []
    assert process.host_memory_gib() is None


async def test_stop_kills_a_server_that_ignores_term(trial: Trial) -> None:
    process = await trial.spawn(STUBBORN, ups=1)
    await process.stop()
    assert process.exit_code == -signal.SIGKILL


async def test_stop_during_the_start_of_the_server(trial: Trial) -> None:
    process = await trial.spawn(f"ignore_term(); {SLEEPER}")
    await process.stop()
    assert process.exit_code in (-signal.SIGTERM, -signal.SIGKILL)


async def test_stop_can_be_called_twice_and_at_once(trial: Trial) -> None:
    process = await trial.spawn(STUBBORN, ups=1)
    await asyncio.gather(process.stop(), process.stop())
    await process.stop()
    assert process.exit_code == -signal.SIGKILL


async def test_stop_ends_the_whole_family(trial: Trial) -> None:
    process = await trial.spawn(FAMILY + STUBBORN, ups=3)
    assert len(process.descendants()) == 3
    await process.stop()
    assert not [pid for pid in trial.children() if is_alive(pid)]


async def test_stop_ends_what_double_forks_out_of_the_session(trial: Trial) -> None:
    code = """
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        say("child", os.getpid())
        ignore_term()
        say("up")
        time.sleep(600)
    """
    process = await trial.spawn(textwrap.dedent(code) + STUBBORN, ups=2)
    await process.stop()
    assert not [pid for pid in trial.children() if is_alive(pid)]


async def test_death_of_the_leader_is_told_and_its_children_are_ended_by_stop(
    trial: Trial,
) -> None:
    """vLLM's API process ends with 0 when its engine dies."""
    process = await trial.spawn(FAMILY + "time.sleep(0.3); sys.exit(0)", ups=2)
    assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
    assert [is_alive(pid) for pid in trial.children()] == [True, True]
    assert {found.pid for found in process.descendants()} == set(trial.children())
    await process.stop()
    assert not [pid for pid in trial.children() if is_alive(pid)]


async def test_stop_ends_many_processes_that_make_more(trial: Trial) -> None:
    """Each in a session of its own, deaf to TERM, and started again when it is killed."""
    code = """
    def keep_alive(count):
        while True:
            children = [subprocess.Popen(
                [sys.executable, "-S", "-c", STUBBORN], start_new_session=True
            ) for _ in range(count)]
            for started in children:
                say("child", started.pid)
            for started in children:
                started.wait()
    ignore_term()
    for _ in range(5):
        if (pid := os.fork()) == 0:
            os.setsid()
            keep_alive(10)
        say("child", pid)
    """
    process = await trial.spawn(textwrap.dedent(code) + STUBBORN, ups=51)
    assert len(process.descendants()) == 56
    await process.stop()
    assert not [pid for pid in trial.children() if is_alive(pid)]


async def test_stop_ends_one_that_hides(trial: Trial) -> None:
    """Double-forked, in another session and group, without a mark or an open file."""
    code = """
    hidden = "import os, signal, time;" + "".join(
        f"signal.signal({number}, signal.SIG_IGN);" for number in (1, 2, 15)
    ) + "os.closerange(0, 256); time.sleep(600)"
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.setpgid(0, 0)
        say("child", os.getpid())
        say("up")
        os.execve(sys.executable, [sys.executable, "-c", hidden], {})
    """
    process = await trial.spawn(textwrap.dedent(code) + STUBBORN, ups=2)
    [hidden] = trial.children()
    await eventually(lambda: psutil.Process(hidden).environ() == {}, "it has no mark")
    await process.stop()
    assert not is_alive(hidden)


async def test_stop_gives_the_group_time_to_settle_after_the_leader(trial: Trial) -> None:
    """vLLM's resource tracker unlinks shared memory after its parent's end, if it may."""
    code = """
    read, write = os.pipe()
    os.set_inheritable(read, True)
    tracker = f'''
    import os, signal, time
    signal.signal(15, signal.SIG_IGN)
    print("up", flush=True)
    os.read({read}, 1)
    time.sleep(0.5)
    print("tidied", flush=True)
    '''
    import textwrap
    child(textwrap.dedent(tracker), pass_fds=[read])
    os.close(read)
    time.sleep(600)
    """
    process = await trial.spawn(code, grace_s=LIMIT_S, ups=1)
    await process.stop()
    assert trial.lines()[-1] == "tidied"


async def test_cancelled_stop_still_completes(trial: Trial) -> None:
    process = await trial.spawn(FAMILY + STUBBORN, grace_s=0.5, ups=3)
    stopping = asyncio.create_task(process.stop())
    await asyncio.sleep(0.05)
    stopping.cancel()
    await asyncio.sleep(0.05)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(stopping, LIMIT_S)
    assert not is_alive(process.record.pgid)
    assert not [pid for pid in trial.children() if is_alive(pid)]
    assert not os.path.exists(process.record.tmpdir)


async def test_stop_does_not_block_the_event_loop(trial: Trial) -> None:
    process = await trial.spawn(STUBBORN, grace_s=0.5, ups=1)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await process.stop()
    ticking.cancel()
    assert ticks >= 10


async def test_stop_names_a_process_that_cannot_be_ended(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = "4711 (VLLM::Worker, disk-sleep)"
    process = await trial.spawn(SLEEPER)
    monkeypatch.setattr("tuner.engine.process.bury", lambda started, _: bury(started, [stuck]))
    for _ in range(2):
        with pytest.raises(EnvironmentProblem, match=r"4711 \(VLLM::Worker, disk-sleep\)"):
            await process.stop()
    trial.started.clear()


async def test_host_memory_counts_children(trial: Trial) -> None:
    code = """
    held = bytearray(b"x") * (64 << 20)
    if os.fork() == 0:
        held = bytearray(b"y") * (64 << 20)
    """
    process = await trial.spawn(textwrap.dedent(code) + SLEEPER, ups=2)
    memory_gib = process.host_memory_gib()
    assert memory_gib is not None
    assert 0.125 <= memory_gib < 0.3


def test_free_port_can_be_bound() -> None:
    port = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        assert server.getsockname()[1] == port
