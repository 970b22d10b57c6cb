"""A server command as a person starts it, and questions to it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_DEADLINE_S = 90.0
ANSWER_DEADLINE_S = 60.0


@dataclass(slots=True)
class Running:
    """A server command that was started."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    tmpdir: Path

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < deadline, self.log.read_text()[-3000:]
                time.sleep(0.05)

    def get(self, path: str) -> str:
        """The body of an answer 200.

        Raises:
            urllib.error.URLError, ConnectionError, TimeoutError: another answer, or none.
        """
        with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:
            body: bytes = answer.read()
        return body.decode()

    def complete(self, model: Path) -> dict[str, int]:
        """The `usage` of a completion of seven tokens."""
        body = {"model": str(model), "prompt": "a list of", "max_tokens": 7, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_DEADLINE_S) as answer:
            usage: dict[str, int] = json.load(answer)["usage"]
        return usage

    def returncode(self) -> int:
        return self.process.wait(timeout=START_DEADLINE_S)


@contextmanager
def started(command: Sequence[str | Path], folder: Path, **env: str) -> Iterator[Running]:
    """Start `command` with a free port appended; its log and end are taken care of."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "served.log"
    tmpdir = Path(tempfile.mkdtemp(prefix="tuner-"))  # vLLM leaves its sockets behind
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*map(str, command), "--host", "127.0.0.1", "--port", str(port)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(tmpdir)} | env,
        )
    try:
        yield Running(process, f"http://127.0.0.1:{port}", log, tmpdir)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(tmpdir, ignore_errors=True)
