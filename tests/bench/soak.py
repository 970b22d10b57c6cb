"""Soak: a long study of quick trials on the stand-in, in one process; nothing may pile up.

    python tests/bench/soak.py --trials 500

After each trial, when its server has ended, it looks at the tuner's own memory, open files,
threads, asyncio tasks, child processes and processor time, prints them now and then, and ends
with exit code 1 and the reason if something grows that should not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console

from tuner.commands import run
from tuner.records import StudyRecord, TrialRecord
from tuner.report.console import ConsoleListener

SPACE: dict[str, Any] = {
    "study": "soak",
    "server": {
        "command": ["{python}", "-m", "tuner.engine.simulated", "serve"],
        "model": "tiny",
        "args": {"max-model-len": 512, "kv-cache-memory-bytes": "16MiB"},
        "env": {
            "SIMULATED_DEVICE": "cpu",
            "SIMULATED_SPEED": "1",  # the client must not be the bottleneck
            "SIMULATED_START_SPEED": "2000",
            # Failures are trials, too: some of the starts, some under load.
            "SIMULATED_FAULT": (
                "oom_load when='max-num-seqs % 10 == 3'; "
                "oom_runtime after=3 when='max-num-seqs % 10 == 7'"
            ),
        },
    },
    "search_space": {
        "max-num-seqs": {"low": 4, "high": 203},
        "max-num-batched-tokens": {"low": 512, "high": 2048},
    },
    "workload": {
        "kind": "synthetic",
        "input_tokens": 16,
        "output_tokens": 4,
        "requests": 8,
        "concurrency": 4,
        "warmup": 1,
    },
}

WARM_AFTER = 20
"""Trials after which everything that is made once has been made."""

WINDOW = 10
"""Trials that a figure is the median of."""

RECORD_KIB = 64.0
"""Memory that a trial may cost for good. It is kept four times as a record of some 8 KiB: in
Optuna's cache of the database, in the sampler's mirror of it, in the search's set of what is
known, and as the last `StudyRecord`; 26 KiB were measured."""

TELLS_OF_MEMORY = 200
"""Trials between the two windows below which memory is not judged: an allocator's noise is more
than they would leak. Files, threads, tasks and processes are counted, so that few tell."""

LOOKING_BACK_MS = 0.6
"""Processor time by which a trial may take longer for each trial before it: the study is read
anew three times a trial (25 µs a record), and TPE models all of it (70 µs); 0.14 ms were
measured. At 500 trials it is a tenth of a second in a trial of minutes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the tuner's process has after a trial."""

    trial: int
    rss_kib: float
    files: int
    threads: int
    tasks: int
    children: int
    cpu_ms: float
    """Its own, in this trial."""
    wall_s: float


class Watching(ConsoleListener):
    """The command's own listener, which takes a sample after each trial."""

    samples: list[Sample] = []  # noqa: RUF012 (there is one study)
    every = 50

    def trial_finished(self, trial: TrialRecord, study: StudyRecord) -> None:
        """See `tuner.study.Listener`."""
        super().trial_finished(trial, study)
        now = _sample(len(self.samples))
        self.samples.append(now)
        if now.trial % self.every == 0:
            print(json.dumps(asdict(now)), flush=True)


_clock = {"cpu": time.process_time(), "wall": time.monotonic()}


def _sample(trial: int) -> Sample:
    me = psutil.Process()
    cpu, wall = time.process_time(), time.monotonic()
    sample = Sample(
        trial=trial,
        rss_kib=me.memory_info().rss / 1024,
        files=me.num_fds(),
        threads=me.num_threads(),
        tasks=len(asyncio.all_tasks()),
        children=len(me.children(recursive=True)),
        cpu_ms=round((cpu - _clock["cpu"]) * 1000, 1),
        wall_s=round(wall - _clock["wall"], 3),
    )
    _clock.update(cpu=time.process_time(), wall=time.monotonic())
    return sample


def soak(trials: int, folder: Path) -> list[Sample]:
    """Run the study in `folder`; a sample for each trial."""
    os.chdir(folder)
    space = folder / "space.yaml"
    space.write_text(yaml.safe_dump({**SPACE, "budget": {"trials": trials}}))
    run.ConsoleListener = Watching  # type: ignore[misc]
    run.run_study(space, run.RunOptions(), Console(file=StringIO(), force_terminal=False))
    return Watching.samples


def what_grows(samples: Sequence[Sample]) -> Iterator[str]:
    """What piles up, a line each.

    Raises:
        ValueError: there are too few trials to tell.
    """
    if len(samples) < WARM_AFTER + 2 * WINDOW:
        raise ValueError(f"{len(samples)} trials are too few")
    warm = samples[WARM_AFTER : WARM_AFTER + WINDOW]
    end = samples[-WINDOW:]
    trials = end[0].trial - warm[0].trial
    for name in ("files", "threads", "tasks", "children"):
        before, after = (max(getattr(s, name) for s in window) for window in (warm, end))
        if after > before + (_POOL if name == "threads" else 0):
            yield f"{name}: {before} -> {after} in {trials} trials"
    rss, cpu = (
        [statistics.median(getattr(s, name) for s in window) for window in (warm, end)]
        for name in ("rss_kib", "cpu_ms")
    )
    if trials >= TELLS_OF_MEMORY and rss[1] - rss[0] > RECORD_KIB * trials + _RSS_NOISE_KIB:
        yield f"memory: {rss[0]:.0f} -> {rss[1]:.0f} KiB in {trials} trials"
    if cpu[1] > 1.5 * cpu[0] + LOOKING_BACK_MS * trials:
        yield f"processor time: {cpu[0]:.0f} -> {cpu[1]:.0f} ms a trial in {trials} trials"


_POOL = min(32, (os.cpu_count() or 1) + 4)
"""asyncio's threads for calls that block: made as they are needed, so many at most."""

_RSS_NOISE_KIB = 4096.0
"""An allocator's arena more or less."""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--every", type=int, default=50, help="print every so many trials")
    asked = parser.parse_args()
    Watching.every = asked.every
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        samples = soak(asked.trials, Path(folder))
        os.chdir("/")
    print(json.dumps(asdict(samples[-1])))
    grown = list(what_grows(samples))
    for line in grown:
        print(f"grows: {line}", file=sys.stderr)
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
