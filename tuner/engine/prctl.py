"""What Linux's prctl(2) does for a process and its children; nothing elsewhere."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Let this process inherit the orphans among its descendants."""
    if (prctl := _prctl()) is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_at_parent_s_death(number: signal.Signals) -> Callable[[], None]:
    """For a child to call after its fork: the kernel signals it when its parent dies.

    Found beforehand, because little may be done between fork and exec. The parent is the
    thread that forked: use it where that is the main one.
    """
    prctl = _prctl()

    def ask() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    return ask


def _prctl() -> Callable[[int, int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function: ctypes._NamedFuncPointer = ctypes.CDLL(None).prctl
    function.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return function
