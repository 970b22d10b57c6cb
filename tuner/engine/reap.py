"""Whose a process is, and how it is ended.

A server's processes are known by descent, by their session, and by marks in the environment
that all of them inherit; never by name. The supervisor uses the small parts and must start
quickly, so that nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tuner.engine.left_behind import files_of, is_private, remove_files, remove_tmpdir
from tuner.errors import EnvironmentProblem

if TYPE_CHECKING:
    from tuner.engine.base import ProcessRecord

SERVER_MARK = "TUNER_SERVER"
"""Environment variable that all processes of a server inherit: the path of its private TMPDIR.

TMPDIR itself is a mark, too, but a server may give its children another.
"""

KILL_LIMIT_S = 30.0
"""How long a process may take to vanish after KILL: unpinning 64 GiB takes many seconds."""

SUPERVISOR_LIMIT_S = 20.0
"""How long a supervisor whose tuner is dead may still need for its own clean-up."""

_CLOCK_TOLERANCE_S = 2.0
"""Start times count from a boot time in whole seconds, which moves as the clock is slewed."""

_POLL_S = 0.02

# --- processes -------------------------------------------------------------------------


def boot_id() -> str:
    """What distinguishes the process ids of now and here from all others.

    The machine's boot, and the namespace of a container: two that run the same image give
    the same ids to processes that start at the same time.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
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
    # An id may have got to a stranger between psutil's two looks at it: look a third time.
    family = {pid, *(process.pid for process in found)}
    return [process for process in found if is_alive(process) and _parent(process) in family]


def session(pid: int) -> int | None:
    """The id of a process' session, None if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def childless() -> bool:
    """Collect every ended child of this process; True if none is left.

    Since orphans become children of a subreaper, it then has no descendants either.
    """
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal each of them; one that has ended, or whose id was reused, is passed over."""
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            _send(process, number)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """Signal a process, not one that gets its id between the last look at it and the signal."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # before Linux 5.3, or forbidden by a sandbox
        process.send_signal(number)
        return
    try:
        if process.is_running():  # the descriptor stands for this one, and no later one
            signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


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
    files = files_of(seen.values())
    supervisor = seen.get(record.pid)
    if supervisor is not None:
        send([supervisor], signal.SIGTERM)
        resume(record.pid)
        _wait_gone(supervisor, SUPERVISOR_LIMIT_S)
    survivors = _kill_owned(record, seen)
    remove_files(files, record.create_time - _CLOCK_TOLERANCE_S)
    remove_tmpdir(record.tmpdir)
    if survivors:
        raise cannot_end([describe(process) for process in survivors])
    return sorted(seen)


def resume(supervisor_pid: int) -> None:
    """Let a supervisor go on that was stopped (SIGSTOP): it could not end its server."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(supervisor_pid, signal.SIGCONT)


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
    processes = _others()
    owned = {
        pid
        for pid, process in processes.items()
        if (supervisor is not None and pid == record.pid)
        or (leader is not None and session(pid) == record.pgid)
        or _has_mark(process, record.tmpdir)
    }
    parents = {pid: _parent(process) for pid, process in processes.items()}
    grown = owned
    while grown:
        grown = {pid for pid, parent in parents.items() if parent in grown} - owned
        owned |= grown
    return {pid: processes[pid] for pid in owned if is_alive(processes[pid])}


def _others() -> dict[int, psutil.Process]:
    """All processes but this one, by id."""
    found = {}
    for pid in psutil.pids():  # not `process_iter`: it remembers who had an id before
        with contextlib.suppress(psutil.NoSuchProcess):
            found[pid] = psutil.Process(pid)
    found.pop(os.getpid(), None)
    return found


def _same(pid: int, create_time: float) -> psutil.Process | None:
    """The process `pid` if it is the one that started at `create_time`."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) <= _CLOCK_TOLERANCE_S
    except psutil.NoSuchProcess:
        return None
    return process if same else None


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def _has_mark(process: psutil.Process, tmpdir: str) -> bool:
    """Whether it was started with this TMPDIR or mark, which also finds double forks."""
    if not is_private(tmpdir):
        return False
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return False
    return tmpdir in (environment.get("TMPDIR"), environment.get(SERVER_MARK))
