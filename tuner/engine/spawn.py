"""Starting a supervisor with its command, and collecting it when it has ended.

Everything here blocks, for a bounded time; `tuner.engine.process` runs it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import psutil

from tuner.engine.base import ProcessRecord
from tuner.engine.left_behind import TMPDIR_PREFIX, remove_tmpdir
from tuner.engine.reap import (
    KILL_LIMIT_S,
    SERVER_MARK,
    SUPERVISOR_LIMIT_S,
    boot_id,
    cannot_end,
    reap,
    resume,
    send,
)
from tuner.engine.supervisor import Order, Refused, Report
from tuner.errors import EnvironmentProblem
from tuner.own_process import own_command, own_environment

SPAWN_LIMIT_S = 30.0
"""How long executing the command may take, on a slow disk or an overloaded machine."""

_TMPDIR_LONGEST = 60
"""vLLM puts sockets named by a UUID (36 characters) there; a socket's path has 107 at most."""

_SERVER_ENV = {"SPT_NOENV": "1"}
"""Keeps `setproctitle`, which vLLM uses, from overwriting /proc/<pid>/environ: `reap` reads it."""


class Lines:
    """Reports as they arrive on a pipe."""

    def __init__(self, pipe: BinaryIO) -> None:
        self.fd = pipe.fileno()
        self._rest = b""

    def read(self) -> list[Report] | None:
        """What one read brings; None at the end.

        Raises:
            BlockingIOError: nothing is there.
        """
        data = os.read(self.fd, 65536)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Started:
    """A running supervisor and command.

    Attributes:
        supervisor: its guardian, which ends last (see `tuner.engine.guardian`).
        control: closing it makes the supervisor end the command, then itself.
        lines: the supervisor's reports; they end with the supervisor.
        early: reports that came together with the first one.
    """

    supervisor: subprocess.Popen[bytes]
    record: ProcessRecord
    control: BinaryIO
    lines: Lines
    early: Sequence[Report]


def start(
    argv: list[str], env: dict[str, str], cwd: Path | None, log_path: Path, grace_s: float
) -> Started:
    """Start supervisor and command; on an exception nothing is left of them."""
    with contextlib.ExitStack() as undo:
        tmpdir = _make_tmpdir()
        undo.callback(remove_tmpdir, tmpdir)
        supervisor = _start_supervisor(tmpdir, log_path)
        undo.callback(_dismiss, supervisor)
        control = cast(BinaryIO, supervisor.stdin)
        order: Order = {
            "argv": argv,
            "env": {**env, **_SERVER_ENV, "TMPDIR": tmpdir, SERVER_MARK: tmpdir},
            "cwd": None if cwd is None else str(cwd),
            "grace_s": grace_s,
            "tuner_pid": os.getpid(),
        }
        with contextlib.suppress(BrokenPipeError):  # then it has no first report either
            _write_all(control.fileno(), json.dumps(order).encode() + b"\n")
        lines = Lines(cast(BinaryIO, supervisor.stdout))
        first, *early = _first_reports(lines, log_path)
        if first["event"] == "refused":
            raise _refused(argv[0], cwd, first)
        if first["event"] != "spawned":
            raise AssertionError(first)
        record = ProcessRecord(
            pid=supervisor.pid,
            pgid=first["pid"],
            create_time=first["create_time"],
            supervisor_create_time=psutil.Process(supervisor.pid).create_time(),
            boot_id=boot_id(),
            tmpdir=tmpdir,
        )
        undo.pop_all()
        return Started(supervisor, record, control, lines, early)


def _make_tmpdir() -> str:
    base = tempfile.gettempdir()
    if len(base) > _TMPDIR_LONGEST - len(TMPDIR_PREFIX) - 9:
        base = "/tmp"
    try:
        return tempfile.mkdtemp(prefix=TMPDIR_PREFIX, dir=base)
    except OSError as error:
        raise EnvironmentProblem(
            f"no temporary folder can be made in {base}: {error.strerror}",
            "Free some space there, or set TMPDIR to a short path that can be written.",
        ) from error


def _start_supervisor(tmpdir: str, log_path: Path) -> subprocess.Popen[bytes]:
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EnvironmentProblem(
            f"the server's log {log_path} cannot be written: {error.strerror}",
            "Check the folder's permissions and the space on its disk.",
        ) from error
    try:
        return subprocess.Popen(
            own_command("tuner.engine.guardian"),
            env=own_environment(TMPDIR=tmpdir),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            start_new_session=True,
        )
    finally:
        os.close(log)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _first_reports(lines: Lines, log_path: Path) -> list[Report]:
    """Wait for the first report; what comes with it is returned too."""
    deadline = time.monotonic() + SPAWN_LIMIT_S
    while select.select([lines.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        reports = lines.read()
        if reports is None:
            raise EnvironmentProblem(
                "the server's supervisor ended before it started the server",
                f"Its error is at the end of {log_path}.",
            )
        if reports:
            return reports
    raise EnvironmentProblem(
        f"the server command was not executed within {SPAWN_LIMIT_S:.0f} s",
        "The machine is overloaded, or the disk that holds the command does not answer.",
    )


def _refused(command: str, cwd: Path | None, refusal: Refused) -> EnvironmentProblem:
    """Why the command could not be executed, and what to do."""
    if cwd is not None and refusal["filename"] == str(cwd) != command:
        return EnvironmentProblem(
            f"the working folder {cwd} cannot be used: {refusal['message']}",
            "Create it, or start the tuner elsewhere.",
        )
    if refusal["errno"] == errno.ENOENT and not os.path.exists(command):
        return EnvironmentProblem(
            f"the server command {command} is not found",
            "Activate the environment that vLLM is installed in, or write the command's "
            "full path under `server: command:`.",
        )
    hints = {
        errno.ENOENT: "Its first line (#!) names an interpreter that does not exist.",
        errno.EACCES: f"Make it executable: chmod +x {command}",
        errno.ENOEXEC: "It is no program for this machine, or a script without a #! line.",
        errno.E2BIG: "Its arguments and environment together are too long.",
    }
    return EnvironmentProblem(
        f"the server command {command} cannot be executed: {refusal['message']}",
        hints.get(refusal["errno"], "Try the command by hand."),
    )


def _dismiss(guardian: subprocess.Popen[bytes]) -> None:
    """End a supervisor whose server is not wanted; it takes the server with it."""
    cast(BinaryIO, guardian.stdin).close()
    _wait_or_kill(guardian, SUPERVISOR_LIMIT_S)
    cast(BinaryIO, guardian.stdout).close()


def kill_supervisor(started: Started) -> None:
    """KILL a supervisor that hangs; its guardian ends the server then."""
    guardian = started.supervisor
    if guardian.poll() is not None:
        return
    resume(guardian.pid)
    with contextlib.suppress(psutil.NoSuchProcess):
        send(psutil.Process(guardian.pid).children(), signal.SIGKILL)


def _wait_or_kill(guardian: subprocess.Popen[bytes], limit_s: float) -> None:
    try:
        guardian.wait(limit_s)
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.wait()


def bury(started: Started, survivors: list[str] | None) -> EnvironmentProblem | None:
    """Collect an ended supervisor, and do its work if it did not come to that.

    Args:
        survivors: what it said could not be ended, None if it ended without a word.
    """
    _wait_or_kill(started.supervisor, KILL_LIMIT_S + SUPERVISOR_LIMIT_S)
    started.control.close()
    cast(BinaryIO, started.supervisor.stdout).close()
    if survivors is not None:
        return cannot_end(survivors) if survivors else None
    try:
        reap(started.record)
    except EnvironmentProblem as problem:
        return problem
    return None
