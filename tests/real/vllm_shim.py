"""Stands in for the `vllm` command, and has a fork server start it (see `fork_server.py`).

The fixture `forked_vllm` copies this file behind a `#!` line that names the prepared vLLM's
Python. Used as `vllm-forked serve MODEL --flags`: arguments, environment, working folder and
the three standard streams become those of a vLLM that is ready in 2 s instead of 30.

Signals TERM, INT, HUP, QUIT and the two user ones are passed on to all processes of that
vLLM, as a terminal or `killpg` would. It ends as vLLM ends: with its exit code, or killed by
the same signal. When this process is killed, the fork server kills its vLLM. A limit of its
address space (`ulimit -v`) becomes the limit of what its vLLM adds to the fork server's.

The socket is `fork.sock` beside this file, or what TUNER_FORK_SERVER names.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from types import FrameType

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main() -> int:
    beside = os.path.join(os.path.dirname(os.path.realpath(__file__)), "fork.sock")
    path = os.environ.get("TUNER_FORK_SERVER") or beside
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
        _send_request(server)
    except OSError as problem:
        print(f"vllm shim: no fork server at {path}: {problem}", file=sys.stderr)
        return 1

    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # it has just ended: its exit code is on the way
            server.send(bytes([number]))

    for number in FORWARDED:
        signal.signal(number, forward)
    answer = _read_to_the_end(server)
    if not answer:
        print("vllm shim: the fork server has gone", file=sys.stderr)
        return 1
    return _end_as(int(answer))


def _send_request(server: socket.socket) -> None:
    may_add, _ = resource.getrlimit(resource.RLIMIT_AS)
    request = {
        "argv": sys.argv[1:],
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "may_add_bytes": None if may_add == resource.RLIM_INFINITY else may_add,
    }
    body = json.dumps(request).encode()
    message = struct.pack("!I", len(body)) + body
    sent = socket.send_fds(server, [message], [0, 1, 2])
    server.sendall(message[sent:])


def _read_to_the_end(server: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := server.recv(64):
            parts.append(part)
    return b"".join(parts)


def _end_as(returncode: int) -> int:
    """End by the signal that ended vLLM (a negative code), or return its exit code."""
    if returncode < 0:
        number = -returncode
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return returncode


if __name__ == "__main__":
    sys.exit(main())
