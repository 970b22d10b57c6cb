"""Whose a process is, how it is ended, and what it leaves behind.

A server's processes are known by descent, by their session, and by the private TMPDIR that
all of them inherit; never by name. The supervisor uses the small parts and must start
quickly, so that nothing heavy is imported here.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from tuner.errors import EnvironmentProblem

if TYPE_CHECKING:
    from tuner.engine.base import ProcessRecord

TMPDIR_PREFIX = "tuner-"
"""How the name of a server's private temporary folder begins."""

KILL_LIMIT_S = 30.0
"""How long a process may take to vanish after KILL: unpinning 64 GiB takes many seconds."""

SUPERVISOR_LIMIT_S = 20.0
"""How long a supervisor whose tuner is dead may still need for its own clean-up."""

_CLOCK_TOLERANCE_S = 2.0
"""Start times count from a boot time in whole seconds, which moves as the clock is slewed."""

_POLL_S = 0.02
_SHARED_MEMORY = "/dev/shm"


class SharedFile(NamedTuple):
    """A file in /dev/shm; the inode tells it from a later one of the same name."""

    path: str
    inode: int


# --- processes -------------------------------------------------------------------------


def boot_id() -> str:
    """What distinguishes the machine's current boot from any other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{psutil.boot_time():.0f}"


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs or holds anything.

    A zombie holds nothing, unless a thread of it is stuck in the kernel: then only its
    main thread is dead, and GPU memory may still be held.
    """
    try:
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[psutil.Process]:
    """All living processes that come from `pid`, without itself.

    One whose parent ends during the look is missed; the next look finds it again below a
    subreaper.
    """
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if is_alive(process)]


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal each of them; one that has ended, or whose id was reused, is passed over."""
    for process in processes:
        try:
            process.send_signal(number)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def describe(process: psutil.Process) -> str:
    """Process id, name and state, for a person: `4711 (VLLM::Worker, disk-sleep)`."""
    try:
        return f"{process.pid} ({process.name()}, {process.status()})"
    except psutil.Error:
        return f"{process.pid}"


def cannot_end(survivors: Collection[str]) -> EnvironmentProblem:
    """The exception that names processes which outlive KILL."""
    return EnvironmentProblem(
        f"the server's process {', '.join(survivors)} cannot be ended",
        "It is stuck in the kernel, most often in the device driver: look at `dmesg` and "
        "`nvidia-smi`; the machine may need a reboot before the next run.",
    )


# --- what they leave behind ------------------------------------------------------------


def shared_files(processes: Iterable[psutil.Process]) -> set[SharedFile]:
    """The files directly in /dev/shm that these processes have mapped (Linux).

    Files in folders below it are left out: models and caches are kept there.
    """
    found = set()
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/maps", errors="surrogateescape") as maps:
                for line in maps:
                    # address, permissions, offset, device, inode, path
                    fields = line.rstrip("\n").split(maxsplit=5)
                    if len(fields) == 6 and os.path.dirname(fields[5]) == _SHARED_MEMORY:
                        found.add(SharedFile(fields[5], int(fields[4])))
        except OSError:
            continue
    return found


def remove_shared(files: Iterable[SharedFile], since_s: float) -> None:
    """Unlink those that still exist and are not older than `since_s` (seconds since the epoch)."""
    for file in files:
        try:
            status = os.stat(file.path, follow_symlinks=False)
            same = status.st_ino == file.inode and stat.S_ISREG(status.st_mode)
            if same and status.st_ctime >= since_s:
                os.unlink(file.path)
        except OSError:
            continue


def remove_tmpdir(path: str) -> None:
    """Delete a server's private temporary folder; any other path is left alone."""
    if _is_private(path):
        shutil.rmtree(path, ignore_errors=True)


def _is_private(tmpdir: str) -> bool:
    return os.path.isabs(tmpdir) and os.path.basename(tmpdir).startswith(TMPDIR_PREFIX)


# --- what a dead tuner left ------------------------------------------------------------


def reap(record: ProcessRecord) -> list[int]:
    """End what is left of a recorded server and remove its shared memory and TMPDIR.

    Only processes that are beyond doubt the recorded ones are touched: of the same boot,
    and with the recorded start times, descended from such, or with the server's private
    TMPDIR in their environment. A living supervisor is asked first, for it cleans up by
    itself. Blocks, for up to `SUPERVISOR_LIMIT_S + KILL_LIMIT_S`.

    Returns:
        The ids of the processes that were there and have ended.

    Raises:
        EnvironmentProblem: some cannot be ended.
    """
    if record.boot_id != boot_id():
        remove_tmpdir(record.tmpdir)
        return []
    seen = _owned(record)
    shared = shared_files(seen.values())
    supervisor = seen.get(record.pid)
    if supervisor is not None:
        send([supervisor], signal.SIGTERM)
        _wait_gone(supervisor, SUPERVISOR_LIMIT_S)
    survivors = _kill_owned(record, seen)
    remove_shared(shared, record.create_time - _CLOCK_TOLERANCE_S)
    remove_tmpdir(record.tmpdir)
    if survivors:
        raise cannot_end([describe(process) for process in survivors])
    return sorted(seen)


def _wait_gone(process: psutil.Process, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _kill_owned(record: ProcessRecord, seen: dict[int, psutil.Process]) -> list[psutil.Process]:
    """KILL until nothing is found any more; adds to `seen`, returns what outlives it."""
    if _same(record.pgid, record.create_time) is not None:
        _kill_group(record.pgid)
    deadline = time.monotonic() + KILL_LIMIT_S
    while True:
        seen.update(_owned(record))
        living = [process for process in seen.values() if is_alive(process)]
        if not living or time.monotonic() >= deadline:
            return living
        send(living, signal.SIGKILL)
        time.sleep(_POLL_S)


def _kill_group(pgid: int) -> None:
    # In one go: a member that forks meanwhile cannot let its child escape.
    try:
        os.killpg(pgid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _owned(record: ProcessRecord) -> dict[int, psutil.Process]:
    """The recorded server's living processes and its supervisor, by id."""
    supervisor = _same(record.pid, record.supervisor_create_time)
    leader = _same(record.pgid, record.create_time)
    processes = {process.pid: process for process in psutil.process_iter()}
    processes.pop(os.getpid(), None)
    owned = {
        pid
        for pid, process in processes.items()
        if (supervisor is not None and pid == record.pid)
        or (leader is not None and _session(pid) == record.pgid)
        or _has_tmpdir(process, record.tmpdir)
    }
    parents = {pid: _parent(process) for pid, process in processes.items()}
    grown = owned
    while grown:
        grown = {pid for pid, parent in parents.items() if parent in grown} - owned
        owned |= grown
    return {pid: processes[pid] for pid in owned if is_alive(processes[pid])}


def _same(pid: int, create_time: float) -> psutil.Process | None:
    """The process `pid` if it is the one that started at `create_time`."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) <= _CLOCK_TOLERANCE_S
    except psutil.NoSuchProcess:
        return None
    return process if same else None


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def _has_tmpdir(process: psutil.Process, tmpdir: str) -> bool:
    """Whether it was started with this TMPDIR, the mark that also finds double forks."""
    if not _is_private(tmpdir):
        return False
    try:
        return process.environ().get("TMPDIR") == tmpdir
    except psutil.Error:
        return False
