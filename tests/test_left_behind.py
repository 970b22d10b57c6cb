"""Shared memory and sockets of servers are removed, those of others are not."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from misbehaving import (
    MAPS_SHARED,
    PRELUDE,
    SLEEPER,
    STUBBORN,
    Trial,
    eventually,
    has_noted,
    supervisor_of,
    trial_in,
)

from tuner.engine.left_behind import (
    FileWatch,
    LeftFile,
    files_of,
    read_notes,
    remove_files,
    remove_tmpdir,
)


@pytest.fixture
async def trial(tmp_path: Path) -> AsyncIterator[Trial]:
    async with trial_in(tmp_path) as trial:
        yield trial


@pytest.fixture
def shared_name() -> Iterator[str]:
    name = f"/dev/shm/psm_test_{os.getpid()}_{time.monotonic_ns()}"
    yield name
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)


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


BINDS = """
import socket
server = socket.socket(socket.AF_UNIX)
server.bind({path!r})
server.listen()
"""


async def test_stop_removes_sockets_outside_of_the_tmpdir(trial: Trial, tmp_path: Path) -> None:
    """As with VLLM_RPC_BASE_PATH in the server's environment."""
    path = tmp_path / "engine.sock"
    process = await trial.spawn(BINDS.format(path=str(path)) + STUBBORN, ups=1)
    assert path.is_socket()
    await process.stop()
    assert not path.exists()


async def test_stop_leaves_a_socket_that_is_someone_else_s_by_now(
    trial: Trial, tmp_path: Path
) -> None:
    path = tmp_path / "engine.sock"
    process = await trial.spawn(BINDS.format(path=str(path)) + STUBBORN, ups=1)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        await process.stop()
        assert path.is_socket()


@needs_shm
async def test_shared_memory_of_a_server_that_dies_at_once_is_known(
    trial: Trial, shared_name: str
) -> None:
    """All of it is killed from outside, long after its start."""
    later = f"say('up'); time.sleep(1.5)\n{MAPS_SHARED.format(name=shared_name)}\n{SLEEPER}"
    process = await trial.spawn(later, ups=2)
    await eventually(lambda: has_noted(process.record.pid), "the file is known")
    os.killpg(process.record.pgid, signal.SIGKILL)
    await process.wait()
    assert os.path.exists(shared_name)
    await process.stop()
    assert not os.path.exists(shared_name)


@needs_shm
async def test_shared_memory_of_a_server_that_is_killed_as_soon_as_it_is_made_is_known(
    trial: Trial, shared_name: str, tmp_path: Path
) -> None:
    """By the kernel, with all its processes, while it loads its model."""
    signal_file = tmp_path / "now"
    dies = f"""
    while not os.path.exists({str(signal_file)!r}):
        time.sleep(0.01)
    os.killpg(0, 9)
    """
    process = await trial.spawn(MAPS_SHARED.format(name=shared_name) + textwrap.dedent(dies))
    await eventually(lambda: has_noted(process.record.pid), "the file is known")
    signal_file.touch()
    assert await process.wait() == -signal.SIGKILL
    await process.stop()
    assert not os.path.exists(shared_name)


@needs_shm
def test_files_of_a_process_are_what_it_maps_and_what_it_binds(
    shared_name: str, tmp_path: Path
) -> None:
    me = [psutil.Process()]
    assert shared_name not in {file.path for file in files_of(me)}
    path = str(tmp_path / "socket")
    with open(shared_name, "w+b") as file, socket.socket(socket.AF_UNIX) as server:
        file.truncate(4096)
        with contextlib.closing(mmap.mmap(file.fileno(), 4096)):
            server.bind(path)
            found = {file.path: file.inode for file in files_of(me)}
    assert found[shared_name] == os.stat(shared_name).st_ino
    assert found[path] == os.stat(path).st_ino
    assert all(name == path or name.startswith("/dev/shm/") for name in found)


@needs_shm
def test_removal_spares_another_file_of_the_same_name(shared_name: str) -> None:
    Path(shared_name).write_bytes(b"ours")
    with open(shared_name, "r+b") as file, mmap.mmap(file.fileno(), 4):
        files = {file for file in files_of([psutil.Process()]) if file.path == shared_name}
        os.unlink(shared_name)
        Path(shared_name).write_bytes(b"theirs")
    remove_files(files)
    assert Path(shared_name).read_bytes() == b"theirs"


@needs_shm
def test_file_watch_looks_only_after_changes(
    shared_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, looks = [100.0], []
    monkeypatch.setattr("tuner.engine.left_behind.time.monotonic", lambda: now_s[0])
    changed = iter([1, 1, 1, 2, 2, 2])
    monkeypatch.setattr("tuner.engine.left_behind._shared_memory_changed_ns", lambda: next(changed))
    watch = FileWatch(lambda: looks.append(now_s[0]) or [])  # type: ignore[func-returns-value]
    for _ in range(6):
        watch.look_after_changes()
        now_s[0] += 1.0
    assert looks == [100.0, 101.0, 103.0, 104.0]


def test_notes_of_a_file_watch_can_be_read_though_the_last_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = [{LeftFile("/dev/shm/psm_1", 7)}, {LeftFile("/dev/shm/psm_1", 7)}, set()]
    here.append({LeftFile("/dev/shm/odd \udcff\n", 8)})
    looks = iter(here)
    monkeypatch.setattr("tuner.engine.left_behind.files_of", lambda _: next(looks))
    notes, noting = os.pipe()
    watch = FileWatch(list, noting)
    for _ in here:
        watch.look()
    os.write(noting, b'["/dev/shm/psm_')
    os.close(noting)
    assert read_notes(notes) == watch.seen == set().union(*here)
    os.close(notes)


def test_file_watch_goes_on_when_nobody_reads_its_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {LeftFile(f"/dev/shm/{number:0100}", number) for number in range(2000)}
    monkeypatch.setattr("tuner.engine.left_behind.files_of", lambda _: many)
    notes, noting = os.pipe()
    os.set_blocking(noting, False)
    watch = FileWatch(list, noting)
    watch.look()
    assert watch.seen == many
    os.close(noting)
    told = read_notes(notes)
    os.close(notes)
    assert 0 < len(told) < len(many)
    assert told < many


@needs_shm
async def test_shared_memory_of_the_dead_is_removed_when_the_supervisor_is_killed(
    trial: Trial, shared_name: str
) -> None:
    """An engine is dead already, and its tracker with it, when the supervisor is killed."""
    engine = f"{PRELUDE}{MAPS_SHARED.format(name=shared_name)}{SLEEPER}"
    process = await trial.spawn(f"child({engine!r})\n{STUBBORN}", ups=2)
    await eventually(lambda: has_noted(process.record.pid), "the file is known")
    [engine_pid] = trial.children()
    os.kill(engine_pid, signal.SIGKILL)
    assert os.path.exists(shared_name)
    os.kill(supervisor_of(process.record.pid), signal.SIGKILL)
    await process.wait()
    await process.stop()
    assert not os.path.exists(shared_name)


@pytest.mark.parametrize("name", ["tuner", "tuner-", "tuner-data", "tuner-12345678.d", "other"])
def test_remove_tmpdir_leaves_a_folder_of_another_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    remove_tmpdir(str(folder))
    assert folder.exists()


def test_remove_tmpdir_follows_no_link(tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").write_text("1 kg")
    private = tmp_path / "tuner-abcd1234"
    private.mkdir()
    (private / "link").symlink_to(treasure)
    remove_tmpdir(str(private))
    assert not private.exists()
    assert (treasure / "gold").exists()
