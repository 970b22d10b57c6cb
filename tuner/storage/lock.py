"""At most one tuner works on a study."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tuner.errors import EnvironmentProblem


class StudyLock:
    """An advisory lock on `<directory>/lock`.

    The kernel drops it when its holder dies, however it dies, so there is no stale lock.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            EnvironmentProblem: another tuner works on this study.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
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
