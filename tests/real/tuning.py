"""The command `tuner` as a person uses it, and what it leaves in its study."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prepare_vllm
import yaml

COMMAND_DEADLINE_S = 240.0
LINE_DEADLINE_S = 120.0
END_DEADLINE_S = 60.0

Json = dict[str, Any]


def cpu_tiny(command: str | Path, model: str | Path, **sections: Any) -> Json:
    """`search_spaces/cpu_tiny.yaml` with another command and model, a small load, and `sections`
    in place of its own; `server_args` are added to its fixed flags."""
    path = prepare_vllm.ROOT / "search_spaces" / "cpu_tiny.yaml"
    space: Json = yaml.safe_load(path.read_text())
    space["server"] |= {"command": [str(command), "serve"], "model": str(model)}
    space["server"]["args"] |= sections.pop("server_args", {})
    # 16 times 64 + 160 tokens: 3584 in all, of 4096 that 16 MiB of KV cache hold, or 1024 of 4.
    space["workload"] |= {"requests": 16, "concurrency": 16, "output_tokens": 160}
    return space | sections


@dataclass(frozen=True, slots=True)
class Done:
    """A `tuner` that has ended."""

    code: int
    out: str
    err: str

    def json(self) -> Json:
        document: Json = json.loads(self.out)
        return document


@dataclass(frozen=True, slots=True)
class RunningTuner:
    """A `tuner` in a session of its own, as on a terminal, with its output in a file."""

    process: subprocess.Popen[bytes]
    output: Path

    def said(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until it has said `text` that often."""
        deadline = time.monotonic() + LINE_DEADLINE_S
        while self.said().count(text) < times:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """`kill -9`, of this process alone."""
        self.process.kill()
        self.process.wait()

    def returncode(self) -> int:
        return self.process.wait(timeout=END_DEADLINE_S)


@dataclass(frozen=True, slots=True)
class Workplace:
    """A folder in which `tuner` is used.

    Attributes:
        cache: holds what `tuner` remembers of vLLM's flags, instead of the user's own.
    """

    folder: Path
    cache: Path

    def write_space(self, space: Json) -> str:
        """Write `NAME.yaml`; returns its name."""
        name = f"{space['study']}.yaml"
        (self.folder / name).write_text(yaml.safe_dump(space, sort_keys=False))
        return name

    def tuner(self, *words: str | Path) -> Done:
        """Use `tuner` and wait for its end."""
        done = subprocess.run(
            _command(words),
            cwd=self.folder,
            env=self._env(),
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    @contextmanager
    def started(self, *words: str | Path) -> Iterator[RunningTuner]:
        """Start `tuner`, to be stopped by the test, else killed at its end."""
        output = self.folder / "tuner.out"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                _command(words),
                cwd=self.folder,
                env=self._env(),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield RunningTuner(process, output)
        finally:
            process.kill()
            process.wait()

    def study(self, name: str) -> Path:
        return self.folder / "studies" / name

    def _env(self) -> dict[str, str]:
        return os.environ | {"XDG_CACHE_HOME": str(self.cache)}


def _command(words: tuple[str | Path, ...]) -> list[str]:
    return [sys.executable, "-m", "tuner.cli", *map(str, words)]


# --- its database ----------------------------------------------------------------------

_TABLES = (
    "trials",
    "trial_params",
    "trial_values",
    "trial_user_attributes",
    "trial_system_attributes",
)
_FINISHED = "select trial_id from trials where state = 'COMPLETE'"


def finished_rows(study: Path) -> set[tuple[object, ...]]:
    """Every row that belongs to a finished trial, with its table's name."""
    with closing(sqlite3.connect(study / "study.db")) as database:
        return {
            (table, *row)
            for table in _TABLES
            for row in database.execute(f"select * from {table} where trial_id in ({_FINISHED})")
        }


def finished_files(study: Path) -> dict[Path, int]:
    """The files of finished trials, and when each was last written (ns)."""
    with closing(sqlite3.connect(study / "study.db")) as database:
        numbers = [
            n for (n,) in database.execute("select number from trials where state='COMPLETE'")
        ]
    folders = [study / "trials" / f"{number:04d}" for number in numbers]
    return {path: path.stat().st_mtime_ns for folder in folders for path in folder.iterdir()}


def server_process(study: Path) -> Json:
    """The record of the running trial's server (`tuner.engine.base.ProcessRecord`)."""
    query = (
        "select value_json from trial_user_attributes join trials using (trial_id) "
        "where key = 'tuner:process' and state = 'RUNNING'"
    )
    with closing(sqlite3.connect(study / "study.db")) as database:
        [(text,)] = database.execute(query)
    record: Json = json.loads(text)
    return record


def trial_attributes(study: Path, number: int) -> Json:
    """What the tuner has written to a trial, by key."""
    query = (
        "select key, value_json from trial_user_attributes join trials using (trial_id) "
        "where number = ?"
    )
    with closing(sqlite3.connect(study / "study.db")) as database:
        return {key: json.loads(text) for key, text in database.execute(query, (number,))}
