"""One load by one client against the benchmark's server: what it cost, how true its times are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from bench.load_clients import Client, Run, Timed
from bench.load_server import Record

SAMPLE_S = 0.2
LIMIT_S = 150.0
_NANOSECONDS = 1e-9


@dataclass(frozen=True)
class Level:
    """A load.

    Attributes:
        step_s: from token to token of a stream; 0 for as fast as they are taken.
    """

    streams: int
    requests: int
    tokens: int
    step_s: float


@dataclass(frozen=True)
class Found:
    """What one client did at one level.

    Attributes:
        answers: that the client counts as served.
        tokens_per_s: over the time from the first request to the last token.
        cpu_us_per_token: of the client's processes, in that time.
        server_us_per_token: of the server.
        ttft_error_s, gap_error_s: of each answer and each gap between tokens: how far what the
            client says lies from what the server did.
    """

    answers: int
    tokens_per_s: float
    cpu_us_per_token: float
    server_us_per_token: float
    ttft_error_s: np.ndarray
    gap_error_s: np.ndarray


class ClientFailed(Exception):
    """The client did not end well; the message holds the end of what it said."""


def measure(client: Client, level: Level) -> Found:
    """Run a client at a level.

    Raises:
        ClientFailed: it ended with an error, or not at all, or left no results.
    """
    with tempfile.TemporaryDirectory(prefix="tuner-load-") as name:
        folder = Path(name)
        with _serving(level, folder / "record.npz") as port:
            prompts = tuple(prompt(number) for number in range(level.requests))
            url = f"http://127.0.0.1:{port}"
            run = Run(url, prompts, level.streams, level.tokens, folder)
            samples = _run_client(client, run)
        record = Record.read(folder / "record.npz")
        try:
            answers = list(client.read(run))
        except (OSError, LookupError, ValueError) as problem:
            raise ClientFailed(f"{client.version} left no usable results: {problem!r}") from problem
        return judge(record, answers, samples, each_token=client.each_token)


def prompt(number: int) -> str:
    """Some 32 words; what else it is does not matter to the server."""
    return f"request {number} " + "word " * 30


def judge(
    record: Record,
    answers: Sequence[Timed],
    samples: Sequence[tuple[float, float]],
    *,
    each_token: bool,
) -> Found:
    """Set what a client says beside what the server did.

    Args:
        samples: (time, processor seconds so far) of the client, rising.
        each_token: whether gaps are single ones, or the mean of each answer.
    """
    start_s, end_s = float(record.received_s.min()), float(record.after_s.max())
    times_s, spent_s = zip(*samples, strict=True)
    cpu_s = float(np.interp(end_s, times_s, spent_s) - np.interp(start_s, times_s, spent_s))
    tokens = len(record.writer)
    rows = {int(number): row for row, number in enumerate(record.numbers)}
    order = np.argsort(record.writer, kind="stable")
    bounds = np.searchsorted(record.writer[order], np.arange(len(record.numbers) + 1))
    ttft_errors, gap_errors = [], []
    for answer in answers:
        row = rows[answer.number]
        written = order[bounds[row] : bounds[row + 1]]
        before_s, after_s = record.before_s[written], record.after_s[written]
        received_s = record.received_s[row]
        ttft_errors.append(
            outside(answer.ttft_s, before_s[0] - received_s, after_s[0] - received_s)
        )
        if each_token:
            low_s, high_s = before_s[1:] - after_s[:-1], after_s[1:] - before_s[:-1]
        else:
            gaps = max(1, len(written) - 1)
            low_s = (before_s[-1:] - after_s[0]) / gaps
            high_s = (after_s[-1:] - before_s[0]) / gaps
        if len(answer.gaps_s) == len(low_s):
            gap_errors.append(outside(answer.gaps_s, low_s, high_s))
    return Found(
        answers=len(answers),
        tokens_per_s=tokens / (end_s - start_s),
        cpu_us_per_token=cpu_s / tokens * 1e6,
        server_us_per_token=record.cpu_s / tokens * 1e6,
        ttft_error_s=np.asarray(ttft_errors),
        gap_error_s=np.concatenate(gap_errors) if gap_errors else np.array([]),
    )


def outside(value: np.ndarray | float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """How far a value lies outside of what is possible; the server knows no better."""
    return np.maximum(0.0, np.maximum(low - value, value - high))


@contextlib.contextmanager
def _serving(level: Level, record: Path) -> Iterator[int]:
    command = [sys.executable, str(Path(__file__).parent / "load_server.py")]
    command += ["--record", str(record), "--step", str(level.step_s)]
    command += ["--tokens", str(level.tokens), "--streams", str(level.streams)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=30.0)


def _run_client(client: Client, run: Run) -> list[tuple[float, float]]:
    log = run.folder / "client.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            client.command(run),
            env=os.environ | client.env,
            cwd=run.folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    meter = CpuMeter(process.pid)
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < deadline_s:
            meter.sample()
            time.sleep(SAMPLE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode != 0:
        end = log.read_text(errors="replace")[-2000:]
        raise ClientFailed(f"{client.version} ended with {process.returncode}: {end}")
    return meter.samples


class CpuMeter:
    """Processor time of a process and its descendants, those that have ended included.

    Attributes:
        samples: (time, seconds so far).
    """

    def __init__(self, pid: int) -> None:
        self.samples: list[tuple[float, float]] = []
        self._process = psutil.Process(pid)
        self._threads_ns: dict[str, int] = {}

    def sample(self) -> None:
        """Look at all threads there are."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self._process, *self._process.children(recursive=True)):
                self._look_at(process.pid)
        total_s = sum(self._threads_ns.values()) * _NANOSECONDS
        self.samples.append((time.perf_counter(), total_s))

    def _look_at(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            for task in os.scandir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"{task.path}/schedstat") as stat:
                    self._threads_ns[task.path] = int(stat.read().split()[0])
