"""Whole studies on the stand-in with faults in some launches, run in the test's process."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import optuna
import yaml
from stand_in import COMMAND, FAST, blocks_of, processes_of

from tuner.cli import main

SLOWER = {**FAST, "SIMULATED_SPEED": "8"}
"""So that a client on a busy machine is not what sets the pace: then nothing is measured."""

SPACE = {
    "study": "faulty",
    "server": {
        "command": COMMAND,
        "model": "tiny",
        "args": {"max-model-len": 512, "kv-cache-memory-bytes": "16MiB"},
        "startup_timeout": "20s",
    },
    "search_space": {"max-num-seqs": {"low": 4, "high": 64, "log": True}},
    "workload": {
        "kind": "synthetic",
        "input_tokens": 32,
        "output_tokens": 8,
        "requests": 16,
        "concurrency": 8,
        "warmup": 2,
        "request_timeout": "3s",
    },
    "budget": {"trials": 2},
}


class Tuning:
    """Runs studies on the stand-in in this process and reads what came out."""

    def __init__(self, folder, capsys):
        self.folder = folder
        self._capsys = capsys

    def run(self, *, search_space=None, trials=2, server=None, **env):
        """`tuner run`; its exit code."""
        document = {
            **SPACE,
            "server": {**SPACE["server"], "env": {**SLOWER, **env}, **(server or {})},
            "search_space": search_space or SPACE["search_space"],
            "budget": {"trials": trials},
        }
        Path("space.yaml").write_text(yaml.safe_dump(document))
        return call("run", "space.yaml")

    def once(self, fault, *, first=1, **more):
        """The same with a fault in the first launches alone."""
        counted = f"{fault} once={self.folder / 'launches'} first={first}"
        return self.run(SIMULATED_FAULT=counted, **more)

    def said(self):
        """What was printed since the last time."""
        captured = self._capsys.readouterr()
        return captured.out + captured.err

    def trials(self):
        """All trials as `tuner show --json` has them."""
        return [self._json("show", "faulty", str(t["number"])) for t in self.status()["trials"]]

    def status(self):
        return self._json("status", "faulty")

    def _json(self, *arguments):
        self._capsys.readouterr()
        assert call(*arguments, "--json") == 0
        return json.loads(self._capsys.readouterr().out)


def call(*arguments):
    try:
        main(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


@contextlib.contextmanager
def clean_up_checked(folder: Path, monkeypatch) -> Iterator[str]:
    """Nothing may be left of the servers of studies in `folder`: no process, no shared memory,
    no socket, no temporary file. Gives the folder for temporary files."""
    base = tempfile.mkdtemp(prefix="f", dir="/tmp")  # short, for the tuner to use it
    monkeypatch.setattr(tempfile, "tempdir", base)
    monkeypatch.setenv("TMPDIR", base)
    yield base
    left = left_behind(folder, base)
    assert not left, left
    os.rmdir(base)


def left_behind(folder: Path, tmpdir: str) -> list[str]:
    """Processes, shared memory, sockets and files that a tuner's servers should not leave."""
    files = [str(path) for path in Path(tmpdir).rglob("*")]
    blocks = [str(block) for block in blocks_of(tmpdir)]
    return [*processes_of(folder, tmpdir), *blocks, *files]


def assert_consistent(database: Path, *, waiting: int = 0) -> None:
    """Between two runs: what Optuna, the tuner and the trials' folders say is the same.

    Args:
        waiting: how many trials are owed.
    """
    url = f"sqlite:///{database}"
    (name,) = optuna.get_all_study_names(url)
    trials = optuna.load_study(study_name=name, storage=url).trials
    assert [t.number for t in trials] == list(range(len(trials)))
    states = [t.state for t in trials]
    assert states.count(optuna.trial.TrialState.RUNNING) == 0
    assert states.count(optuna.trial.TrialState.WAITING) == waiting
    complete = [t for t in trials if t.state is optuna.trial.TrialState.COMPLETE]
    assert len({frozenset(t.constraints) for t in complete}) <= 1
    for trial in complete:
        assert trial.user_attrs["state"] in ("measured", "infeasible")
        feasible = all(value <= 0 for value in trial.constraints.values())
        assert feasible == (trial.user_attrs["state"] == "measured")
        outcome = trial.user_attrs.get("tuner:measurement", trial.user_attrs.get("tuner:failure"))
        folder = database.parent / "trials" / f"{trial.number:04d}"
        assert json.loads((folder / "outcome.json").read_text())["outcome"] == outcome
        assert (folder / "server.log").is_file()
        assert (folder / "launch.json").is_file()
