"""The command `tuner` as a shell starts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tuner import entry

START = [sys.executable, "-m", "tuner.entry"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_command_runs_with_its_output_closed(closed: str) -> None:
    command = f'"{sys.executable}" -m tuner.entry version {closed}'
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_command_that_is_stopped_while_it_loads_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(name: str, *_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.__import__", stop)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130


def test_command_tells_its_version() -> None:
    done = subprocess.run([*START, "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tuner ")
