"""The middle of a log that grows beyond all bounds is given back, while it is written."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from misbehaving import Trial, eventually, trial_in

from tuner.engine import log_size
from tuner.engine.log_size import LogLimit

MIB = 2**20


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    path = tmp_path / "server.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    yield path, descriptor
    os.close(descriptor)


def taken_bytes(path: Path) -> int:
    return os.stat(path).st_blocks * 512


def write(descriptor: int, letter: bytes, mib: int) -> None:
    for _ in range(mib):
        os.write(descriptor, (letter * 1023 + b"\n") * 1024)


def test_keep_leaves_a_log_within_the_limit_alone(log: tuple[Path, int]) -> None:
    path, descriptor = log
    write(descriptor, b"a", 8)
    LogLimit(descriptor, 8 * MIB + 65536, MIB).keep()
    assert path.read_bytes().count(b"a") == 8 * 1023 * 1024


def test_keep_leaves_head_and_tail_and_says_what_it_took(log: tuple[Path, int]) -> None:
    path, descriptor = log
    limit = LogLimit(descriptor, 8 * MIB, MIB)
    write(descriptor, b"a", 1)
    write(descriptor, b"b", 10)
    write(descriptor, b"c", 1)
    limit.keep()
    os.write(descriptor, b"the last words\n")
    data = path.read_bytes()
    assert len(data) == 12 * MIB + len(b"the last words\n")
    assert data[:MIB].count(b"a") == 1023 * 1024
    assert data[11 * MIB :].count(b"c") == 1023 * 1024
    assert data.endswith(b"\nthe last words\n")
    note = data[MIB : 2 * MIB].strip(b"\0\n").decode()
    assert note == (
        f"[the tuner took bytes {MIB} to {11 * MIB} out of this log: it has grown beyond 8 MiB]"
    )
    assert taken_bytes(path) < 3 * MIB


def test_keep_holds_a_log_that_goes_on_growing(log: tuple[Path, int]) -> None:
    path, descriptor = log
    limit = LogLimit(descriptor, 8 * MIB, MIB)
    for letter in b"abcdefghijkl":
        write(descriptor, bytes([letter]), 4)
        limit.keep()
        assert taken_bytes(path) < 9 * MIB
    data = path.read_bytes()
    assert len(data) == 48 * MIB
    assert data.startswith(b"aaa")
    assert data.endswith(b"lll\n")


def test_keep_does_not_take_a_hole_for_a_big_log(log: tuple[Path, int]) -> None:
    path, descriptor = log
    os.ftruncate(descriptor, 2**40)
    os.write(descriptor, b"end\n")
    LogLimit(descriptor, 8 * MIB, MIB).keep()
    assert path.stat().st_size == 2**40 + 4
    with path.open("rb") as file:
        file.seek(2**40)
        assert file.read() == b"end\n"


def test_keep_cuts_the_log_where_there_can_be_no_holes(
    log: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_size, "_punch", lambda *_: False)
    path, descriptor = log
    write(descriptor, b"a", 12)
    LogLimit(descriptor, 8 * MIB, MIB).keep()
    os.write(descriptor, b"the last words\n")
    data = path.read_bytes()
    assert data[:MIB].count(b"a") == 1023 * 1024
    assert b"the tuner took bytes" in data[MIB:]
    assert data.endswith(b"the last words\n")
    assert len(data) < MIB + 200


def test_keep_survives_a_disk_that_takes_nothing_any_more(
    log: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path, descriptor = log
    write(descriptor, b"a", 12)
    monkeypatch.setattr(log_size.os, "pwrite", full)
    LogLimit(descriptor, 8 * MIB, MIB).keep()
    assert path.stat().st_size == 12 * MIB


@pytest.fixture
async def trial(tmp_path: Path) -> AsyncIterator[Trial]:
    async with trial_in(tmp_path) as trial:
        yield trial


async def test_supervisor_keeps_the_log_of_a_server_that_writes_without_end(trial: Trial) -> None:
    """A reserved GiB stands for what it has written; the rest is real."""
    code = """
    say("up")
    os.posix_fallocate(1, 0, 1100 << 20)
    line = (b"x" * 1023 + bytes([10])) * 64
    while True:
        os.write(1, line)
        time.sleep(0.01)
    """
    process = await trial.spawn(code)
    await eventually(lambda: trial.log.stat().st_size > 1100 * MIB, "it writes")
    await eventually(lambda: taken_bytes(trial.log) < 512 * MIB, "its middle is given back")
    await asyncio.sleep(0.1)
    await process.stop()
    with trial.log.open("rb") as file:
        assert file.read(3) == b"up\n"
        file.seek(64 * MIB)
        assert file.read(100).startswith(b"\n[the tuner took bytes")
        file.seek(-10, os.SEEK_END)
        assert file.read() == b"xxxxxxxxx\n"
    trial.log.write_text("")  # or the end of the test would read it all
