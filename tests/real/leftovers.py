"""Whose processes and shared memory there are, so that a test can see that none is left.

Processes are known by descent, session and private temporary folder, never by name.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

END_DEADLINE_S = 30.0
"""From the end of a tuner or of a shim to that of the last process; 6 s at most were seen."""


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def of_server(session: int, tmpdir: str) -> list[psutil.Process]:
    """All processes of a server's session, or with its private TMPDIR in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            same_session = os.getsid(process.pid) == session
            if same_session or process.environ().get("TMPDIR") == tmpdir:
                found.append(process)
    return found


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Python's shared memory blocks that these processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found |= {Path(path) for path in re.findall(r"/dev/shm/psm_\w+", maps)}
    return found


def wait_until_gone(processes: Iterable[psutil.Process]) -> None:
    _gone, alive = psutil.wait_procs(list(processes), timeout=END_DEADLINE_S)
    assert alive == []
