"""The files that a server leaves behind: shared memory, sockets, its temporary folder.

They are known by the processes that hold them, never by name. The supervisor uses this and
must start quickly, so that nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import psutil

TMPDIR_PREFIX = "tuner-"
"""How the name of a server's private temporary folder begins."""

_PRIVATE = re.compile(TMPDIR_PREFIX + "[a-z0-9_]{8}")  # as `tempfile.mkdtemp` names it
_SHARED_MEMORY = "/dev/shm"
_IN_CREATE = 0x100  # linux/inotify.h
_UNIX_SOCKETS = "/proc/self/net/unix"

_MAPPING_S = 0.1
"""A file is made first and mapped then: a look at once, for a server that is killed as soon as
that, and one so much later."""

_LOOKING_SHARE = 0.1
"""Of the time, at most, for looks after changes: they hold up the server's own memory calls."""


class LeftFile(NamedTuple):
    """A file in /dev/shm or a socket; the inode tells it from a later one of the same name."""

    path: str
    inode: int


def files_of(processes: Iterable[psutil.Process]) -> set[LeftFile]:
    """The files that these processes would leave behind if they were killed now (Linux).

    Those directly in /dev/shm that they have mapped (vLLM's message queues and its offload
    region), and the sockets that they have bound to a path. Files in folders below /dev/shm
    are left out: models and caches are kept there.
    """
    found = set()
    bound = _bound_sockets()
    for process in processes:
        found |= _mapped(process.pid)
        for inode in _socket_inodes(process.pid) if bound else ():
            if (path := bound.get(inode)) is not None and (inode := _inode(path)):
                found.add(LeftFile(path, inode))
    return found


def shared_memory() -> set[LeftFile]:
    """What lies directly in /dev/shm now, whoever made it."""
    try:
        with os.scandir(_SHARED_MEMORY) as entries:
            return {LeftFile(entry.path, entry.inode()) for entry in entries}
    except OSError:
        return set()


class FileWatch:
    """Collects the files of processes that come and go.

    Args:
        processes: those that live now.
        notes: a descriptor to write the files to that are new, for `read_notes`.

    Attributes:
        seen: all files that any of them had at a look.
        waker: a descriptor that can be read when a file came to /dev/shm; None where there is
            none, so that changes are only seen when one looks after them.
    """

    def __init__(
        self, processes: Callable[[], Iterable[psutil.Process]], notes: int | None = None
    ) -> None:
        self.seen: set[LeftFile] = set()
        self._processes = processes
        self._notes = notes
        self.waker = _watch_shared_memory()
        self._changed_ns = 0
        self._due_s: list[float] = []
        self._rested_s = 0.0

    def look(self) -> None:
        """Note what they would leave behind if they were killed now."""
        start_s = time.monotonic()
        found = files_of(self._processes())
        if self._notes is not None and not found <= self.seen:
            _write_notes(self._notes, found - self.seen)
        self.seen |= found
        end_s = time.monotonic()
        self._rested_s = end_s + (end_s - start_s) / _LOOKING_SHARE

    def look_after_changes(self) -> None:
        """Look if files came to /dev/shm since the last time; costs next to nothing else."""
        if self.waker is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self.waker, 65536)
        now_s = time.monotonic()
        changed_ns = _shared_memory_changed_ns()
        if changed_ns != self._changed_ns:
            self._changed_ns = changed_ns
            self._due_s = [now_s, now_s + _MAPPING_S]
        if self._due_s and now_s >= max(self._due_s[0], self._rested_s):
            self._due_s.pop(0)
            self.look()


def read_notes(notes: int) -> set[LeftFile]:
    """What a `FileWatch` has written to the other end of a pipe; that must be closed."""
    data = b""
    while chunk := os.read(notes, 65536):
        data += chunk
    *lines, _ = data.split(b"\n")  # the last one may be cut off by a KILL
    return {LeftFile(*json.loads(line)) for line in lines}


def remove_files(files: Iterable[LeftFile], since_s: float = 0.0) -> None:
    """Unlink those that still exist; their processes have ended.

    Args:
        since_s: files older than this (seconds since the epoch) are left alone.
    """
    in_use = set(_bound_sockets().values())  # someone else's by now
    for file in files:
        try:
            status = os.stat(file.path, follow_symlinks=False)
            mode = status.st_mode
            same = status.st_ino == file.inode and (stat.S_ISREG(mode) or stat.S_ISSOCK(mode))
            if same and status.st_ctime >= since_s and file.path not in in_use:
                os.unlink(file.path)
        except OSError:
            continue


def remove_tmpdir(path: str) -> None:
    """Delete a server's private temporary folder; any other path is left alone."""
    if is_private(path):
        shutil.rmtree(path, ignore_errors=True)


def is_private(tmpdir: str) -> bool:
    """Whether this can be the path of a server's private temporary folder.

    The path may come from a study that someone else has made, and its folder is deleted.
    """
    return os.path.isabs(tmpdir) and _PRIVATE.fullmatch(os.path.basename(tmpdir)) is not None


def _write_notes(notes: int, files: Iterable[LeftFile]) -> None:
    for file in files:
        # A full pipe, after some thousand files, or one that nobody reads any more.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(notes, json.dumps(file).encode() + b"\n")


def _watch_shared_memory() -> int | None:
    """A descriptor of inotify(7); None where that is not to be had."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:  # a user may have some hundred
        return None
    if libc.inotify_add_watch(descriptor, _SHARED_MEMORY.encode(), _IN_CREATE) < 0:
        os.close(descriptor)
        return None
    return descriptor


def _shared_memory_changed_ns() -> int:
    """When a file was last made in /dev/shm or taken from it."""
    try:
        return os.stat(_SHARED_MEMORY).st_mtime_ns
    except OSError:
        return 0


def _mapped(pid: int) -> set[LeftFile]:
    found = set()
    try:
        with open(f"/proc/{pid}/maps", errors="surrogateescape") as maps:
            for line in maps:
                if _SHARED_MEMORY not in line:
                    continue
                # address, permissions, offset, device, inode, path
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6 and os.path.dirname(fields[5]) == _SHARED_MEMORY:
                    found.add(LeftFile(fields[5], int(fields[4])))
    except OSError:  # it has ended, or is someone else's
        return found
    return found


def _bound_sockets() -> dict[int, str]:
    """The path of each socket that is bound to one, by the socket's own inode."""
    bound = {}
    try:
        with open(_UNIX_SOCKETS, errors="surrogateescape") as sockets:
            for line in sockets:
                # number, references, protocol, flags, type, state, inode, path
                fields = line.rstrip("\n").split(maxsplit=7)
                if len(fields) == 8 and fields[7].startswith("/"):
                    bound[int(fields[6])] = fields[7]
    except OSError:
        return {}
    return bound


def _socket_inodes(pid: int) -> set[int]:
    """The inodes of a process' open sockets."""
    found: set[int] = set()
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found


def _inode(path: str) -> int:
    """Of the file at `path`, 0 if there is none."""
    try:
        return os.stat(path, follow_symlinks=False).st_ino
    except OSError:
        return 0
