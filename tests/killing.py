"""A `tuner run` in a process of its own, and the seeded moments at which something is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Any

import optuna
import psutil

PATIENCE_S = 60.0
_LOOK_S = 0.002


class Phase(StrEnum):
    """What the tuner is doing when it happens."""

    OPENING = "opening"
    STARTING = "starting"
    MEASURING = "measuring"
    STOPPING = "stopping"
    STORING = "storing"


LONGEST_S = {
    Phase.OPENING: 1.5,  # importing, opening the database, asking for the flags
    Phase.STARTING: 0.4,
    Phase.MEASURING: 0.4,
    Phase.STOPPING: 0.3,
    Phase.STORING: 0.06,  # some twenty writes of a millisecond or two
}
"""How long after the phase has begun it may happen: roughly what it lasts."""


class Run:
    """A running `tuner run`, its output in a file.

    Args:
        folder: of the study, `studies/NAME`.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self._folder = folder
        self._known = self._trials()
        self.output = folder.parent.with_suffix(".out")
        with self.output.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tuner.cli", "run", *words],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    def _trials(self) -> set[str]:
        with contextlib.suppress(OSError):
            return set(os.listdir(self._folder / "trials"))
        return set()

    def wait_for(self, phase: Phase, chance: random.Random, trial: int = 1) -> bool:
        """Wait for a random moment of a phase.

        Args:
            trial: of which trial of this run, from 1.

        Returns:
            Whether it has come; False if the tuner ended before.
        """
        begun = _SIGNS[phase]
        deadline_s = time.monotonic() + PATIENCE_S
        while sum(begun(self._folder / "trials" / name) for name in self._new()) < trial:
            if phase is Phase.OPENING:
                break
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline_s, self.said()
            time.sleep(_LOOK_S)
        time.sleep(chance.uniform(0.0, LONGEST_S[phase]))
        return True

    def count_from_here(self) -> None:
        """Trials that have begun so far are none of those that `wait_for` counts."""
        self._known = self._trials()

    def _new(self) -> set[str]:
        return self._trials() - self._known

    def kill(self) -> None:
        """`kill -9`; returns when it is gone."""
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        """The end of its output, and of that of the runs before it."""
        return self.output.read_text()[-3000:]

    def children(self) -> list[psutil.Process]:
        """The processes that it has started itself."""
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def descendants(self) -> list[psutil.Process]:
        """All that it has started, and what those have."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _log_says(words: bytes) -> Callable[[Path], bool]:
    def said(trial: Path) -> bool:
        with contextlib.suppress(OSError):
            return words in (trial / "server.log").read_bytes()
        return False

    return said


_SIGNS: dict[Phase, Callable[[Path], bool]] = {
    Phase.OPENING: lambda _trial: True,
    Phase.STARTING: lambda trial: (trial / "launch.json").exists(),
    Phase.MEASURING: _log_says(b"Application startup complete"),
    Phase.STOPPING: _log_says(b"shutdown triggered"),
    Phase.STORING: lambda trial: (trial / "outcome.json").exists(),
}
"""By which a trial's folder shows that the phase has begun."""


def kill_quietly(process: psutil.Process) -> None:
    """`kill -9` of a process that may have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)


def trials_of(database: Path) -> list[optuna.trial.FrozenTrial]:
    """All trials; none while there is no study yet. Makes no tables where they are missing."""
    if not database.is_file():
        return []
    with closing(sqlite3.connect(database)) as connection:
        made = connection.execute("select count(*) from sqlite_master where name = 'studies'")
        if made.fetchone() == (0,) or not connection.execute("select * from studies").fetchall():
            return []
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
    storage = optuna.storages.RDBStorage(f"sqlite:///{database}")
    try:
        (name,) = optuna.get_all_study_names(storage)
        return optuna.load_study(study_name=name, storage=storage).get_trials()
    finally:
        storage.remove_session()
        storage.engine.dispose()


def finished(trials: list[optuna.trial.FrozenTrial]) -> dict[int, tuple[Any, ...]]:
    """All that is stored of the trials that count, by number."""
    return {
        t.number: (t.params, t.values, t.constraints, t.user_attrs, t.datetime_complete)
        for t in trials
        if t.state is optuna.trial.TrialState.COMPLETE
    }
