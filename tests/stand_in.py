"""Servers of the stand-in for vLLM, for tests that talk to one themselves."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import psutil

MODULE = "tuner.engine.simulated"
COMMAND = ["{python}", "-m", MODULE, "serve"]
"""For a space file."""

FAST = {"SIMULATED_DEVICE": "cpu", "SIMULATED_SPEED": "50", "SIMULATED_START_SPEED": "1000"}
"""A small device without the wait for its start."""

TINY_CONFIG = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 4096,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

T = TypeVar("T")


def write_tiny_model(folder: Path) -> None:
    """A model's folder with 4096 bytes of KV cache a token, as the profile `tiny` has."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))


def until(condition: Callable[[], T | None], limit_s: float = 20.0) -> T:
    """What `condition` gives once that is not None."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if (result := condition()) is not None:
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {limit_s} s")


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the stand-in to its end."""
    return subprocess.run(
        [sys.executable, "-m", MODULE, *words],
        env={**os.environ, **FAST, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


class StandIn:
    """A running server; ended, with its engine, at the end of a `with`."""

    def __init__(self, *flags: str, model: str = "tiny", **env: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end)
        self._tmpdir = tempfile.TemporaryDirectory(prefix="s", dir="/tmp")  # short, for a socket
        listen = ["--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE, "serve", model, *listen, *flags],
            env={**os.environ, "TMPDIR": self._tmpdir.name, **FAST, **env},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Not the tracker: that ends by itself and removes what the others shared.
        for member in self.members():
            if is_named(member, "tracker"):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        self.process.wait(20)
        until(lambda: True if not self.members() else None)
        for block in blocks_of(self._tmpdir.name):  # of a server that lost its tracker
            block.unlink()
        self._tmpdir.cleanup()
        self._output.close()

    def blocks(self) -> list[Path]:
        """Its shared memory."""
        return blocks_of(self._tmpdir.name)

    def members(self) -> list[int]:
        """Its living processes, the engine's too when it has outlived the server's."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid:
                    found += [process.pid] if process.status() != psutil.STATUS_ZOMBIE else []
            except (ProcessLookupError, psutil.Error):
                continue
        return found

    @property
    def engine_pid(self) -> int:
        """The engine's process."""
        return next(pid for pid in self.members() if is_engine(pid))

    @property
    def log(self) -> str:
        """All output so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def ready(self) -> Self:
        """Wait until it serves."""

        def health() -> bool | None:
            assert self.process.poll() is None, self.log
            return True if self.health() == 200 else None

        until(health)
        return self

    def health(self) -> int | None:
        """The status of /health; None where nobody answers."""
        try:
            return self.ask("GET", "/health")[0]
        except OSError:
            return None

    def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Status and text of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body)
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def post(self, path: str, **body: object) -> dict[str, object]:
        """The JSON of a good answer."""
        status, text = self.ask("POST", path, body)
        assert status == 200, text
        document: dict[str, object] = json.loads(text)
        return document

    def stream(self, path: str = "/v1/completions", **body: object) -> list[object]:
        """The events of a streamed answer; the last one is "[DONE]"."""
        status, text = self.ask("POST", path, {**body, "stream": True})
        assert status == 200, text
        return list(events(text))

    def metric(self, name: str) -> float:
        """The one value of a metric."""
        _, page = self.ask("GET", "/metrics")
        values = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        assert len(values) == 1, page
        return float(values[0].rpartition(" ")[2])


def is_engine(pid: int) -> bool:
    """Whether it is the engine's process."""
    return is_named(pid, "VLLM::EngineCor")


def is_named(pid: int, name: str) -> bool:
    """Whether a process of the stand-in has given itself this name; False if it is gone."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name().startswith(name)
    return False


def blocks_of(tmpdir: str) -> list[Path]:
    """Shared memory of stand-ins whose folder of temporary files is, or lies in, `tmpdir`."""
    found = []
    for path in Path("/dev/shm").glob("psm_*"):
        with contextlib.suppress(OSError):
            if path.read_bytes()[:4096].startswith(tmpdir.encode()):
                found.append(path)
    return found


def events(text: str) -> Iterator[object]:
    """The events of a stream's text."""
    for line in text.split("\n\n"):
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def processes_in(folder: Path, *, but: Sequence[int] = ()) -> list[str]:
    """Processes that run in a folder, described; this one does not count."""
    return _processes(lambda process: process.cwd() == str(folder.resolve()), but)


def processes_of(folder: Path, tmpdir: str) -> list[str]:
    """Processes that run in a folder, or whose folder of temporary files lies in `tmpdir`."""
    cwd, below = str(folder.resolve()), f"{tmpdir}/"
    return _processes(
        lambda process: (
            process.cwd() == cwd or process.environ().get("TMPDIR", "").startswith(below)
        )
    )


def _processes(wanted: Callable[[psutil.Process], bool], but: Sequence[int] = ()) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in (os.getpid(), *but) and wanted(process):
                found.append(f"{process.pid} {process.cmdline()}")
    return found
