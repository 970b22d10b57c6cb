"""Whether it was the kernel that killed a process for lack of memory, or somebody else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from tuner.engine.log_exit import KILLED_FOR_MEMORY
from tuner.types import Failure, FailureCause

_COUNTERS = Path("/proc/vmstat")

_BY_SOMEBODY = "by somebody, not by the kernel for memory"

_SAYS_KILLED = re.compile(
    r"SIGKILL|: -9\b|^Killed$|: line \d+:\s+\d+ Killed\b|Command terminated by signal 9"
    r"|Exit Code:\s+137\b"
)
"""Lines that tell of the kill, but not who did it. Those of the kernel itself are not here."""


def oom_kills() -> int | None:
    """How many processes the kernel has killed for lack of memory since the boot.

    Of the whole machine (Linux 4.13 and newer), also for the limit of a control group, so that
    a server in a container is counted. None where the kernel does not tell.
    """
    try:
        counters = _COUNTERS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"^oom_kill (\d+)$", counters, re.M)
    return None if found is None else int(found[1])


def with_killer(failure: Failure, kills_before: int | None) -> Failure:
    """`failure` as a crash where it was taken for the kernel's doing and the kernel did nothing.

    What kills for memory without the kernel (systemd-oomd, earlyoom) counts as somebody: that a
    configuration was to blame must be certain, and a crash is tried once more.

    Args:
        kills_before: `oom_kills` when the server was started.
    """
    if failure.cause is not FailureCause.HOST_OOM or not _SAYS_KILLED.search(failure.line):
        return failure
    if kills_before is None or oom_kills() != kills_before:
        return failure
    is_by_exit = failure.line == KILLED_FOR_MEMORY
    said = "killed with SIGKILL" if is_by_exit else failure.line.rstrip(" .")
    line = f"{said} {_BY_SOMEBODY}" if is_by_exit else f"{said} ({_BY_SOMEBODY})"
    return replace(failure, cause=FailureCause.CRASH, line=line)
