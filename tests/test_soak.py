"""A study of many quick trials in one process: nothing piles up in the tuner.

Forty trials here, which tell of files, threads, tasks, processes and time, but not of memory:
five hundred do, with `python -m pytest tests/test_soak.py --long`, or with
`python tests/bench/soak.py`.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "bench" / "soak.py"


def test_soak_finds_nothing_that_grows(long_form):
    trials = 500 if long_form else 40
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--trials", str(trials), "--every", "10"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


@pytest.mark.parametrize(
    ("name", "growth"),
    [("files", 0.02), ("threads", 0.02), ("tasks", 0.02), ("children", 0.02), ("rss_kib", 200.0)],
)
def test_what_grows_finds_what_grows(soak, name, growth):
    flat = soak.Sample(0, 90_000.0, 12, 6, 3, 1, 60.0, 0.5)
    samples = [replace(flat, trial=n) for n in range(500)]
    assert list(soak.what_grows(samples)) == []
    grown = [replace(s, **{name: type(getattr(s, name))(getattr(s, name) + growth * s.trial)})
             for s in samples]  # fmt: skip
    (line,) = soak.what_grows(grown)
    assert line.startswith("memory" if name == "rss_kib" else name)


def test_what_grows_does_not_judge_memory_by_few_trials(soak):
    samples = [soak.Sample(n, 9e4 + 200.0 * n, 12, 6, 3, 1, 60.0, 0.5) for n in range(240)]
    assert list(soak.what_grows(samples[:40])) == []
    (line,) = soak.what_grows(samples)
    assert line.startswith("memory")


def test_what_grows_finds_work_that_is_done_for_all_trials_again(soak):
    samples = [soak.Sample(n, 9e4, 12, 6, 3, 1, 60.0 + 1.0 * n, 0.5) for n in range(500)]
    (line,) = soak.what_grows(samples)
    assert line == "processor time: 84 -> 554 ms a trial in 470 trials"
