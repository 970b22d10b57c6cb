"""Real processes that misbehave as vLLM does, and worse; nothing of them may be left."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tuner.engine.base import ProcessRecord
from tuner.engine.process import SupervisedProcess, free_port, reap
from tuner.engine.spawn import bury
from tuner.errors import EnvironmentProblem

LIMIT_S = 60.0  # generous: the machine may be busy with other things

PRELUDE = """
import mmap, os, signal, subprocess, sys, time
def say(*words):
    # One write, because several processes write into one log.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def ignore_term():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def child(code, **options):
    started = subprocess.Popen([sys.executable, "-c", code], **options)
    say("child", started.pid)
    return started
STUBBORN = (
    "import os, signal, time; signal.signal(15, signal.SIG_IGN);"
    "os.write(1, b'up' + bytes([10])); time.sleep(600)"
)
"""

SLEEPER = "say('up'); time.sleep(600)"
STUBBORN = "ignore_term(); say('up'); time.sleep(600)"
FAMILY = """
# An engine in the group and one in a session of its own, both deaf to TERM.
child(STUBBORN)
child(STUBBORN, start_new_session=True)
"""


def argv(code: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        await asyncio.sleep(0.02)


class Trial:
    """Spawns servers whose output goes to one log, and knows their processes from it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "server.log"
        self.started: list[SupervisedProcess] = []

    async def spawn(self, code: str, *, grace_s: float = 0.3, ups: int = 0) -> SupervisedProcess:
        process = await SupervisedProcess.spawn(
            argv(code), env=dict(os.environ), cwd=None, log_path=self.log, grace_s=grace_s
        )
        self.started.append(process)
        await eventually(lambda: self.lines().count("up") >= ups, "the server is up")
        return process

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def children(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines() if line.startswith("child ")]


@pytest.fixture
async def trial(tmp_path: Path) -> AsyncIterator[Trial]:
    trial = Trial(tmp_path)
    yield trial
    for process in trial.started:
        await process.stop()
        assert not is_alive(process.record.pid)
        assert not is_alive(process.record.pgid)
        assert not os.path.exists(process.record.tmpdir)
    assert not [pid for pid in trial.children() if is_alive(pid)]


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


async def test_stop_does_without_a_supervisor_that_hangs(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.engine.process.KILL_LIMIT_S", 0.1)
    monkeypatch.setattr("tuner.engine.process.SETTLE_S", 0.1)
    process = await trial.spawn(FAMILY + STUBBORN, ups=3)
    os.kill(process.record.pid, signal.SIGSTOP)
    monkeypatch.setattr("tuner.engine.process._MARGIN_S", 0.1)
    stopping = asyncio.create_task(process.stop())
    await asyncio.sleep(0.3)
    monkeypatch.setattr("tuner.engine.process._MARGIN_S", LIMIT_S)
    await stopping
    assert not [pid for pid in trial.children() if is_alive(pid)]


# --- what a server leaves --------------------------------------------------------------


@pytest.fixture
def shared_name() -> Iterator[str]:
    name = f"/dev/shm/psm_test_{os.getpid()}_{time.monotonic_ns()}"
    yield name
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)


MAPS_SHARED = """
with open({name!r}, "w+b") as file:
    file.truncate(1 << 20)
    shared = mmap.mmap(file.fileno(), 1 << 20)
"""

needs_shm = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="has no /dev/shm")


@needs_shm
async def test_stop_removes_shared_memory_and_sockets_of_the_server(
    trial: Trial, shared_name: str
) -> None:
    code = """
    import socket
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.environ["TMPDIR"] + "/123e4567-e89b-12d3-a456-426614174000")
    """
    process = await trial.spawn(
        textwrap.dedent(code) + MAPS_SHARED.format(name=shared_name) + STUBBORN, ups=1
    )
    assert os.path.exists(shared_name)
    assert len(os.listdir(process.record.tmpdir)) == 1
    await process.stop()
    assert not os.path.exists(shared_name)
    assert not os.path.exists(process.record.tmpdir)


@needs_shm
async def test_stop_removes_shared_memory_of_orphans(trial: Trial, shared_name: str) -> None:
    """The API server is killed, its engine holds the memory."""
    engine = f"{PRELUDE}{MAPS_SHARED.format(name=shared_name)}{STUBBORN}"
    process = await trial.spawn(f"child({engine!r})\n{SLEEPER}", ups=2)
    os.kill(process.record.pgid, signal.SIGKILL)
    assert await process.wait() == -9
    assert os.path.exists(shared_name)
    await process.stop()
    assert not os.path.exists(shared_name)


@needs_shm
async def test_stop_removes_shared_memory_that_a_dying_engine_still_made(
    trial: Trial, shared_name: str
) -> None:
    # As a vLLM that is told to stop in its start: the engine makes more, then ends before its
    # stubborn parent is killed.
    on_term = f"{MAPS_SHARED.format(name=shared_name)}time.sleep(1)\nos._exit(0)\n"
    engine = (
        f"{PRELUDE}def end(*_):\n{textwrap.indent(on_term, '    ')}"
        f"signal.signal(signal.SIGTERM, end); {SLEEPER}"
    )
    process = await trial.spawn(f"child({engine!r})\n{STUBBORN}", grace_s=2.0, ups=2)
    assert not os.path.exists(shared_name)
    await process.stop()
    assert not os.path.exists(shared_name)


@needs_shm
async def test_stop_leaves_shared_memory_that_is_older_than_the_server(
    trial: Trial, shared_name: str
) -> None:
    Path(shared_name).write_bytes(b"x" * 4096)
    await asyncio.sleep(0.1)  # file times come from a coarse clock
    code = f"""
    with open({shared_name!r}, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 4096)
    """
    process = await trial.spawn(textwrap.dedent(code) + STUBBORN, ups=1)
    await process.stop()
    assert os.path.exists(shared_name)


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


# --- when the tuner or the supervisor is killed ----------------------------------------

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signalled_supervisor_ends_the_server(trial: Trial, number: int) -> None:
    process = await trial.spawn(FAMILY + STUBBORN, ups=3)
    os.kill(process.record.pid, number)
    assert await asyncio.wait_for(process.wait(), LIMIT_S) == -signal.SIGKILL
    await process.stop()


async def test_killed_supervisor_is_noticed_and_the_server_killed(
    trial: Trial, shared_name: str
) -> None:
    process = await trial.spawn(FAMILY + MAPS_SHARED.format(name=shared_name) + STUBBORN, ups=3)
    os.kill(process.record.pid, signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), LIMIT_S) == -signal.SIGKILL
    assert not is_alive(process.record.pgid)
    assert not [pid for pid in trial.children() if is_alive(pid)]
    assert not os.path.exists(shared_name)


async def test_supervisor_and_tuner_killed_at_once_terminates_the_server(
    trial: Trial, tuner: RunTuner
) -> None:
    process, record = tuner(FAMILY + SLEEPER)
    await eventually(lambda: trial.lines().count("up") == 3, "the family is up")
    process.send_signal(signal.SIGSTOP)  # so that it cannot react
    os.kill(record.pid, signal.SIGKILL)
    process.kill()
    await eventually(lambda: not is_alive(record.pgid), "the leader is gone")
    orphans = trial.children()
    assert all(is_alive(pid) for pid in orphans)
    assert await asyncio.to_thread(reap, record) == sorted(orphans)
    assert not any(map(is_alive, orphans))
    assert not os.path.exists(record.tmpdir)


# --- reap ------------------------------------------------------------------------------


async def test_reap_ends_a_living_supervisor_and_its_server(trial: Trial) -> None:
    process = await trial.spawn(FAMILY + STUBBORN, ups=3)
    record = process.record
    ended = await asyncio.to_thread(reap, record)
    assert ended == sorted([record.pid, record.pgid, *trial.children()])
    assert not os.path.exists(record.tmpdir)
    assert await process.wait() == -signal.SIGKILL


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen]:
    """A process of someone else, in a session of its own."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def record_of(process: subprocess.Popen, **changes: object) -> ProcessRecord:
    started = psutil.Process(process.pid).create_time()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    true = ProcessRecord(process.pid, process.pid, started, started, boot_id, "/tmp/tuner-none")
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
    left = tmp_path / "tuner-left"
    (left / "folder").mkdir(parents=True)
    assert reap(record_of(stranger, boot_id="another", tmpdir=str(left))) == []
    assert not left.exists()


async def test_reap_removes_no_folder_that_is_not_a_private_tmpdir(
    stranger: subprocess.Popen, tmp_path: Path
) -> None:
    assert reap(record_of(stranger, boot_id="another", tmpdir=str(tmp_path))) == []
    assert tmp_path.exists()


def test_free_port_can_be_bound() -> None:
    port = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        assert server.getsockname()[1] == port
