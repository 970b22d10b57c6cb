"""Keeps a server's log from filling the disk, while the server writes it.

A server that is stuck in an error prints gigabytes an hour. What counts is at the log's head
(how it started) and at its tail (how it ended), so that the middle is given back to the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable

LOG_LIMIT_BYTES = 2**30
"""What a log may take on the disk: a hundred times the longest that a healthy trial writes."""

KEPT_BYTES = 64 * 2**20
"""So much of its head and of its tail is kept."""

_FALLOC_FL_KEEP_SIZE = 1  # linux/falloc.h
_FALLOC_FL_PUNCH_HOLE = 2
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's is


class LogLimit:
    """Watches the size of an open log that others append to.

    Args:
        descriptor: of the log, for appending.
        limit_bytes, kept_bytes: see `LOG_LIMIT_BYTES` and `KEPT_BYTES`.
    """

    def __init__(
        self, descriptor: int, limit_bytes: int = LOG_LIMIT_BYTES, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self._log = descriptor
        self._limit_bytes = limit_bytes
        self._kept_bytes = kept_bytes

    def keep(self) -> None:
        """Give the log's middle back to the disk if it takes more than the limit.

        Its length stays, so that positions in it do; a reader finds zero bytes in the hole.
        Where the file system has no holes, all but the head is cut off. A disk that is full or
        gone is left as it is: the server's supervisor has more to do than its log.
        """
        with contextlib.suppress(OSError):
            self._keep()

    def _keep(self) -> None:
        status = os.fstat(self._log)
        taken_bytes = status.st_blocks * _BLOCK_BYTES
        if taken_bytes <= self._limit_bytes:
            return
        start, end = self._kept_bytes, status.st_size - self._kept_bytes
        if end <= start:
            return
        note = (
            f"\n[the tuner took bytes {start} to {end} out of this log: it has grown beyond "
            f"{self._limit_bytes / 2**20:.0f} MiB]\n"
        ).encode()
        if _punch(self._log, start, end - start):
            self._write_at(start, note)
        else:
            os.ftruncate(self._log, start)
            os.write(self._log, note)

    def _write_at(self, position: int, note: bytes) -> None:
        # A second way to the file, because the descriptor itself appends, whatever one asks.
        try:
            log = os.open(f"/proc/self/fd/{self._log}", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:  # deleted meanwhile
            return
        try:
            os.pwrite(log, note, position)
        finally:
            os.close(log)


def _punch(descriptor: int, start: int, length: int) -> bool:
    """Make a hole in a file; False where that cannot be done."""
    fallocate = _fallocate()
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    return fallocate is not None and fallocate(descriptor, mode, start, length) == 0


def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """Linux's fallocate(2), None elsewhere."""
    if sys.platform != "linux":
        return None
    function: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "fallocate", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    return function
