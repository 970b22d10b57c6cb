"""What the exit code of a server's process says where its log says nothing."""

from __future__ import annotations

import signal

from tuner.types import FailureCause, Stage

ORDERLY_CODES = frozenset({0, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 130})
"""Of a server that somebody stopped."""

KILLED_FOR_MEMORY = "killed with SIGKILL, as the kernel does when memory runs out"
"""Supposed: who sees the process live asks the kernel (`tuner.engine.kernel_kills`)."""


def cause_of_exit(code: int, stage: Stage) -> tuple[FailureCause, str]:
    """What an exit code alone says, and in words.

    vLLM ends with 2 when argparse refuses, with 1 for everything else before it is ready, and
    with 0 also when its engine dies later. Negative codes are signals; 128 + n is how a shell
    or a container reports them.
    """
    number = -code if code < 0 else code - 128
    if code < 0 or 128 < code < 192:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        if number == signal.SIGKILL:
            return FailureCause.HOST_OOM, KILLED_FOR_MEMORY
        crashed = number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)
        return (FailureCause.CRASH if crashed else FailureCause.UNKNOWN), f"ended by {name}"
    if code == 2:
        return FailureCause.BAD_CONFIG, "exit code 2: vLLM refused its arguments"
    serving = stage in (Stage.READY, Stage.LOAD)
    cause = FailureCause.CRASH if serving else FailureCause.UNKNOWN
    return cause, f"ended with exit code {code}"
