"""Servers of a running tuner under load, and their processes, for tests that end some of them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
import urllib.request
from pathlib import Path

import psutil
from leftovers import descendants, shared_memory
from tuning import LINE_DEADLINE_S, RunningTuner, server_process

ENGINE, WORKER = "VLLM::EngineCore", "VLLM::Worker"
"""How vLLM calls its processes; only among those that are known to be a server's."""

LOADED = 3
"""Requests at once that the measured load has, and the warm-up has not."""


class Launches:
    """The servers that one run of the tuner starts, one after another.

    Args:
        root: the processes of a server are found below this one.
    """

    def __init__(self, tuner: RunningTuner, study: Path, root: int) -> None:
        self._tuner = tuner
        self._study = study
        self._root = root
        self._seen: set[int] = set()
        self.processes: set[psutil.Process] = set()
        self.blocks: set[Path] = set()
        self.tmpdirs: set[Path] = set()

    def wait_for_load(self) -> dict[str, psutil.Process]:
        """Wait until the next server is under load; its processes by their names."""
        deadline = time.monotonic() + LINE_DEADLINE_S
        while True:
            assert self._tuner.process.poll() is None, self._tuner.said()
            assert time.monotonic() < deadline, self._tuner.said()
            with contextlib.suppress(ValueError, OSError, sqlite3.Error):
                record = server_process(self._study)
                if record["pgid"] not in self._seen and self._running() >= LOADED:
                    break
            time.sleep(0.05)
        self._seen.add(record["pgid"])
        self.tmpdirs.add(Path(record["tmpdir"]))
        server = descendants(self._root)
        self.processes |= set(server)
        self.blocks |= shared_memory(server)
        return {process.name(): process for process in server}

    def _running(self) -> float:
        """How many requests the newest server works on; 0 before it serves."""
        launches = (self._study / "trials").glob("*/launch.json")
        newest = max(launches, key=lambda path: path.stat().st_mtime_ns)
        return running_requests(json.loads(newest.read_text())["command"])


def running_requests(command: list[str]) -> float:
    """How many requests the server with this command line works on.

    Raises:
        OSError: it does not answer.
    """
    port = command[command.index("--port") + 1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
        page = answer.read().decode()
    lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
