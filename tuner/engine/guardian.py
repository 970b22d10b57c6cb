"""The outermost process of a server: it cleans up after a supervisor that was killed.

Run as ``python -m tuner.engine.guardian`` by `tuner.engine.spawn`, in a session of its own.
It forks the supervisor, which inherits the pipes to the tuner, and waits. Whatever the
supervisor orphans becomes a child of the guardian, a subreaper as well; so nothing of a
server is left when any one of the three is killed, or the tuner with any one of the others.
"""

from __future__ import annotations

import os
import signal
import time

from tuner.engine import supervisor
from tuner.engine.left_behind import (
    files_of,
    read_notes,
    remove_files,
    remove_tmpdir,
    shared_memory,
)
from tuner.engine.prctl import become_subreaper, signal_at_parent_s_death
from tuner.engine.reap import KILL_LIMIT_S, childless, descendants, send

_POLL_S = 0.01
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Supervise one server; returns when nothing of it is left."""
    before = shared_memory()
    become_subreaper()
    end_with_guardian = signal_at_parent_s_death(signal.SIGTERM)
    guardian_pid = os.getpid()
    notes, noting = os.pipe()
    os.set_blocking(noting, False)
    supervisor_pid = os.fork()
    if supervisor_pid == 0:
        end_with_guardian()
        if os.getppid() == guardian_pid:  # else it has died before it was asked
            supervisor.main(before, noting)
        return
    os.close(noting)
    _close_pipes()
    _pass_signals_on(supervisor_pid)
    os.waitid(os.P_PID, supervisor_pid, os.WEXITED | os.WNOWAIT)
    _pass_no_signal_on()  # while its id is still its own
    if os.waitstatus_to_exitcode(os.waitpid(supervisor_pid, 0)[1]) == 0:
        return
    files = files_of(descendants(guardian_pid))
    _kill_descendants()
    remove_files((files | read_notes(notes)) - before)
    remove_tmpdir(os.environ["TMPDIR"])


def _close_pipes() -> None:
    """The end of either pipe has a meaning: only the supervisor may hold them."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _pass_signals_on(supervisor_pid: int) -> None:
    def tell(number: int, _: object) -> None:
        os.kill(supervisor_pid, number)

    for number in _STOPPING:
        signal.signal(number, tell)


def _pass_no_signal_on() -> None:
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)


def _kill_descendants() -> None:
    deadline = time.monotonic() + KILL_LIMIT_S
    while time.monotonic() < deadline:
        remaining = descendants(os.getpid())
        if not remaining and childless():
            return
        send(remaining, signal.SIGKILL)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
