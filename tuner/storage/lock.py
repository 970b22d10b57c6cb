"""At most one tuner works on a study."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tuner.engine.reap import boot_id
from tuner.errors import EnvironmentProblem
from tuner.storage.files import FILE_MODE

_PATIENCE_S = 0.5


class StudyLock:
    """An advisory lock on a file beside the database.

    The kernel drops it when its holder dies, however it dies, so there is no stale lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            EnvironmentProblem: another tuner works on this study.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            _lock_patiently(descriptor)
        except BlockingIOError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise EnvironmentProblem(
                f"another tuner works on this study (process {holder or 'unknown'})",
                "wait for it, stop it with Ctrl-C, or start another study with --study NAME",
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; safe to call without holding it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_held(self) -> bool:
        """Whether any process, this one included, holds it."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False


def _lock_patiently(descriptor: int) -> None:
    """Take the lock; who only looks whether it is held (`is_held`) has it for a moment.

    Raises:
        BlockingIOError: someone keeps it.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
        else:
            return


def this_process() -> dict[str, str | int]:
    """Enough to know later, on this machine, whether this process still runs."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()) or "",
    }


def is_gone(owner: Mapping[str, str | int | float]) -> bool:
    """Whether the process that `this_process` described is known to have ended.

    Of another machine's process nothing is known, so that it counts as running.
    """
    if owner["host"] != socket.gethostname():
        return False
    return _started(int(owner["pid"])) != owner.get("started")


def _started(pid: int) -> str | None:
    """When a process started, by a clock that nobody can set: the boot, and ticks since.

    None if there is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # proc(5): starttime is field 22; the second one, the name, may hold anything but ends in ).
    return f"{boot_id()}/{stat.rpartition(')')[2].split()[19]}"
