"""Servers that misbehave as vLLM does, and worse, for tests that end them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import termios
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tuner.engine.process import SupervisedProcess

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


async def eventually(
    condition: Callable[[], object], what: str = "", limit_s: float = LIMIT_S
) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
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


@asynccontextmanager
async def trial_in(folder: Path) -> AsyncIterator[Trial]:
    """A trial, at the end of which nothing of its servers may be left."""
    trial = Trial(folder)
    yield trial
    for process in trial.started:
        await process.stop()
        assert not is_alive(process.record.pid)
        assert not is_alive(process.record.pgid)
        assert not os.path.exists(process.record.tmpdir)
    assert not [pid for pid in trial.children() if is_alive(pid)]


def supervisor_of(guardian: int) -> int:
    """The supervisor's id; its guardian's is in the record."""
    children = psutil.Process(guardian).children()
    [found] = [child.pid for child in children if os.getsid(child.pid) == guardian]
    return found


def has_noted(guardian: int) -> bool:
    """Whether the supervisor has told the guardian of any file that its server would leave.

    Notes lie in the only pipe that the guardian keeps, unread until the supervisor is dead.
    """
    folder = f"/proc/{guardian}/fd"
    pipes = [name for name in os.listdir(folder) if "pipe:" in os.readlink(f"{folder}/{name}")]
    for name in pipes:
        end = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            waiting = fcntl.ioctl(end, termios.FIONREAD, bytes(4))
        finally:
            os.close(end)
        if int.from_bytes(waiting, sys.byteorder) > 0:
            return True
    return False


MAPS_SHARED = """
with open({name!r}, "w+b") as file:
    file.truncate(1 << 20)
    shared = mmap.mmap(file.fileno(), 1 << 20)
"""
