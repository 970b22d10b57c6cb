"""What vLLM's processes have in common and would leave behind: shared memory and a socket.

As with vLLM, which has Python's resource tracker for it, a small process removes both once the
others are gone, however they ended. It ignores SIGTERM; killed with them, it removes nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import signal
import socket
import uuid
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_SIZE = 4096

_held: list[object] = []
"""Keeps the mapping and the sockets open to the end of the process, and of its children."""


def share(not_its: socket.socket) -> None:
    """Make both, for this process and those that it forks from now on; start their remover.

    The block begins with the folder of temporary files, so that a test can tell whose it is.

    Args:
        not_its: the API process' socket; it must not stay open when that process is gone.
    """
    made = [path for path in (_make_block(), _make_socket()) if path is not None]
    if not made:
        return
    gone, alive = os.pipe()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        name_process("tracker")
        not_its.close()
        os.close(alive)
        _held.clear()
        os.read(gone, 1)  # ends when nobody holds the other end any more
        for path in made:
            path.unlink(missing_ok=True)
        os._exit(0)
    os.close(gone)


def name_process(name: str) -> None:
    """Be shown under this name, as vLLM's processes are; 15 characters count."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _make_block() -> Path | None:
    path = _SHARED_MEMORY / f"psm_{secrets.token_hex(4)}"
    try:
        with path.open("xb+") as file:
            file.truncate(_SIZE)
            block = mmap.mmap(file.fileno(), _SIZE)
    except OSError:
        return None  # no shared memory on this machine
    owner = os.environ.get("TMPDIR", "").encode()[: _SIZE - 1]
    block[: len(owner)] = owner
    _held.append(block)
    return path


def _make_socket() -> Path | None:
    """In the private folder that the tuner gives its servers; not in everybody's /tmp."""
    folder = os.environ.get("TMPDIR")
    if folder is None:
        return None
    path, bound = Path(folder, str(uuid.uuid4())), socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
    except OSError:  # the path is too long
        bound.close()
        return None
    _held.append(bound)
    return path
