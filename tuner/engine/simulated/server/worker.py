"""A worker of the engine's: a process that only lives, and whose death is the engine's."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from datetime import datetime

from tuner.engine.simulated.log_format import LogWriter, Pids
from tuner.engine.simulated.server.log_output import Log
from tuner.engine.simulated.server.shared import name_process

_WATCH_S = 0.05


def start_worker() -> int:
    """Fork it from the engine's process; it ends when that is gone, as vLLM's do."""
    engine = os.getpid()
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        name_process("VLLM::Worker")
        while os.getppid() == engine:
            time.sleep(_WATCH_S)
        os._exit(0)
    return pid


def kill_worker(pid: int, version: str) -> None:
    """Kill it, and say what vLLM's engine says of that before it ends itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pids = Pids(os.getppid(), os.getpid(), pid)
    writer = LogWriter(pids, datetime.now(), "")
    died = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."
    writer.say("engine", "multiproc_executor.py:315", died, level="ERROR")
    fatal = (
        "EngineCore encountered a fatal error.\n"
        "Traceback (most recent call last):\n"
        "RuntimeError: Executor failed."
    )
    writer.say("engine", "core.py:1215", fatal, level="ERROR")
    Log(pids, version).lines(entry for _, entry in writer.entries)
