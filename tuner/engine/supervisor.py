"""The small process between the tuner and a server, which outlives the tuner to clean up.

Forked by `tuner.engine.guardian`, which does the same for it. It reads one line from stdin,
an `Order` as JSON, starts the server in a further session with output to its own stderr (the
log file), and writes `Report`s to stdout as JSON lines. The end of stdin means that the tuner
wants the server ended, or is dead: TERM, grace, KILL, until no descendant remains. As a child
subreaper (Linux) it inherits whatever the server orphans, so that descent finds every process.

Imports only what is needed: a server's start waits for this.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from typing import Literal, TypeAlias, TypedDict

import psutil

from tuner.engine.left_behind import FileWatch, LeftFile, remove_files, remove_tmpdir
from tuner.engine.log_size import LogLimit
from tuner.engine.prctl import become_subreaper, signal_at_parent_s_death
from tuner.engine.reap import KILL_LIMIT_S, childless, descendants, describe, send

SETTLE_S = 2.0
"""How long the leader's exit may precede that of the others before they are killed.

vLLM's resource tracker unlinks shared memory in this time.
"""

_WATCH_S = 0.25
"""How often to look after the log's size and new shared memory, and to check that the tuner
lives, in case a fork of it holds the pipe open."""

_POLL_MS = 50
_KILL_POLL_S = 0.01
_SCAN_ENDING_S = 0.2
"""While it ends: a vLLM that is told to in its start goes on for seconds and makes more."""

_CONTROL, _REPORT, _LOG = 0, 1, 2


class Order(TypedDict):
    """What to start. The trial's private TMPDIR is the supervisor's own."""

    argv: list[str]
    env: dict[str, str]
    cwd: str | None
    grace_s: float
    tuner_pid: int


class Spawned(TypedDict):
    """The server's leader runs; `pid` is also its process group and session."""

    event: Literal["spawned"]
    pid: int
    create_time: float


class Refused(TypedDict):
    """The command could not be executed; the supervisor ends."""

    event: Literal["refused"]
    errno: int
    message: str
    filename: str


class Exited(TypedDict):
    """The leader has ended: exit code, or minus the signal."""

    event: Literal["exited"]
    code: int


class Gone(TypedDict):
    """All is over but for these, described for a person; the supervisor ends."""

    event: Literal["gone"]
    survivors: list[str]


Report: TypeAlias = Spawned | Refused | Exited | Gone


class Supervisor:
    """One server, from its start to the end of its last process.

    Args:
        before: the shared memory that was there before the server.
        notes: see `tuner.engine.left_behind.FileWatch`.
    """

    def __init__(self, order: Order, before: set[LeftFile], notes: int) -> None:
        self._order = order
        self._before = before
        self._guardian = os.getppid()
        self._server_pid = 0
        self._exited = False
        self._told_to_stop = False
        self._files = FileWatch(lambda: descendants(os.getpid()), notes)
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self._on_child)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_stop)

    def run(self) -> None:
        """Start the server, watch it, end it, report each step."""
        try:
            self._spawn()
        except OSError as error:
            _report(_refusal(error))
            return
        self._watch()
        survivors = self._end()
        remove_files(self._files.seen - self._before)
        remove_tmpdir(os.environ["TMPDIR"])
        _report({"event": "gone", "survivors": survivors})

    def _on_child(self, *_: object) -> None:
        """Nothing to do: the wake-up pipe ends the wait."""

    def _on_stop(self, *_: object) -> None:
        self._told_to_stop = True

    def _spawn(self) -> None:
        become_subreaper()
        # The last resort when tuner, supervisor and guardian are killed at once. TERM, not
        # KILL: the death of vLLM's API process would orphan its engine.
        end_with_supervisor = signal_at_parent_s_death(signal.SIGTERM)
        server = subprocess.Popen(
            self._order["argv"],
            env=self._order["env"],
            cwd=self._order["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=_LOG,
            stderr=_LOG,
            start_new_session=True,
            preexec_fn=end_with_supervisor,
        )
        self._server_pid = server.pid
        create_time = psutil.Process(server.pid).create_time()
        server.returncode = 0  # its exit is collected here, not by Popen
        _report({"event": "spawned", "pid": server.pid, "create_time": create_time})

    # --- while it runs ---

    def _watch(self) -> None:
        """Return when the server is to be ended."""
        poll = select.poll()
        poll.register(_CONTROL, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        if self._files.waker is not None:
            poll.register(self._files.waker, select.POLLIN)
        log = LogLimit(_LOG)
        while not self._told_to_stop:
            ready = {fd for fd, _ in poll.poll(_WATCH_S * 1000)}
            if self._woken in ready:
                self._collect()
            if _CONTROL in ready and not os.read(_CONTROL, 4096):
                return
            if self._is_orphan():
                return
            log.keep()
            self._files.look_after_changes()

    def _is_orphan(self) -> bool:
        """Whether the tuner or the guardian has died."""
        if os.getppid() != self._guardian:
            return True
        try:
            return psutil.Process(self._guardian).ppid() != self._order["tuner_pid"]
        except psutil.NoSuchProcess:
            return True

    def _collect(self) -> None:
        """Notice the leader's exit and clear away ended orphans."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        if self._note_exit():
            self._files.look()
        for child in psutil.Process().children():
            if child.pid != self._server_pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)

    def _note_exit(self) -> bool:
        """Report the leader's exit once; True if that was now.

        It stays uncollected: a zombie keeps its id, and with it that of the process group,
        from being given to strangers.
        """
        if self._exited:
            return False
        result = os.waitid(os.P_PID, self._server_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return False
        self._exited = True
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        _report({"event": "exited", "code": code})
        return True

    # --- the end ---

    def _end(self) -> list[str]:
        """TERM, grace, KILL; returns descriptions of what outlives it."""
        self._files.look()
        self._signal_all(signal.SIGTERM)
        self._note_exit()
        patience_s = SETTLE_S if self._exited else self._order["grace_s"]
        deadline = time.monotonic() + patience_s
        next_scan_s = time.monotonic() + _SCAN_ENDING_S
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while descendants(os.getpid()) and time.monotonic() < deadline:
            poll.poll(_POLL_MS)
            if time.monotonic() >= next_scan_s:
                self._files.look()
                next_scan_s = time.monotonic() + _SCAN_ENDING_S
            was_alive = not self._exited
            self._collect()
            if was_alive and self._exited:
                deadline = time.monotonic() + SETTLE_S
        return self._kill()

    def _kill(self) -> list[str]:
        self._files.look()
        self._signal_all(signal.SIGKILL)
        deadline = time.monotonic() + KILL_LIMIT_S
        while True:
            self._note_exit()
            remaining = descendants(os.getpid())
            if not remaining and self._exited and childless():
                return []
            if time.monotonic() >= deadline:
                return [describe(process) for process in remaining]
            send(remaining, signal.SIGKILL)
            time.sleep(_KILL_POLL_S)

    def _signal_all(self, number: signal.Signals) -> None:
        """Signal the group in one go, then descendants that have left it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._server_pid, number)
        send(
            [process for process in descendants(os.getpid()) if not self._in_group(process.pid)],
            number,
        )

    def _in_group(self, pid: int) -> bool:
        try:
            return os.getpgid(pid) == self._server_pid
        except ProcessLookupError:
            return True


def _refusal(error: OSError) -> Refused:
    return {
        "event": "refused",
        "errno": error.errno or 0,
        "message": error.strerror or str(error),
        "filename": str(error.filename or ""),
    }


def _report(report: Report) -> None:
    # A dead tuner reads nothing; the work goes on without it.
    with contextlib.suppress(BrokenPipeError):
        os.write(_REPORT, json.dumps(report).encode() + b"\n")


def _read_order() -> Order | None:
    """The tuner's order, None if it died before it gave one."""
    data = b""
    while not data.endswith(b"\n"):
        chunk = os.read(_CONTROL, 65536)
        if not chunk:
            return None
        data += chunk
    order: Order = json.loads(data)
    return order


def main(before: set[LeftFile], notes: int) -> None:
    """Supervise one server; returns when nothing of it is left.

    Args:
        before: the shared memory that was there before the server.
        notes: see `tuner.engine.left_behind.FileWatch`.
    """
    order = _read_order()
    if order is None:
        remove_tmpdir(os.environ["TMPDIR"])
    else:
        Supervisor(order, before, notes).run()
