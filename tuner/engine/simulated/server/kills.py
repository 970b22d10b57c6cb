"""Processes of the server that are killed, as by the kernel or a stranger."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable


def kill(name: str, engine: int, lose_worker: Callable[[], None]) -> None:
    """Strike with one of the kinds `KILLS`; may not return.

    Args:
        engine: that process' id.
        lose_worker: lets the engine kill its worker.
    """
    if name == "worker_killed":
        lose_worker()
        return
    me = os.getpid()
    if name == "group_killed" and os.getpgrp() == me:  # else it would be somebody else's, too
        os.killpg(me, signal.SIGKILL)
    if name != "server_killed":
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
    if name != "engine_killed":
        os.kill(me, signal.SIGKILL)
