"""The prepared vLLM and its fork server do what the other tests on the real engine rely on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import prepare_vllm
import psutil
import pytest

START_DEADLINE_S = 90.0
END_DEADLINE_S = 30.0
FLAGS = {
    "--load-format": "dummy",
    "--max-model-len": "512",
    "--block-size": "32",
    "--kv-cache-memory-bytes": "8M",
}


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
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < deadline, self.log.read_text()[-3000:]
                time.sleep(0.05)

    def returncode(self) -> int:
        return self.process.wait(timeout=START_DEADLINE_S)


@contextmanager
def started(
    command: Path, model: Path, folder: Path, flags: dict[str, str] | None = None, **env: str
) -> Iterator[Running]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = FLAGS | (flags or {}) | {"--host": "127.0.0.1", "--port": str(port)}
    words = [word for option in options.items() for word in option]
    log = folder / "server.log"
    tmpdir = Path(tempfile.mkdtemp(prefix="tuner-"))  # vLLM leaves its sockets behind
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(command), "serve", str(model), "--enforce-eager", *words],
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


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _gone, alive = psutil.wait_procs(processes, timeout=END_DEADLINE_S)
    assert alive == []


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in processes)
    return {Path(path) for path in re.findall(r"/dev/shm/psm_\w+", maps)}


def complete(running: Running, model: Path) -> dict[str, int]:
    body = {"model": str(model), "prompt": "a list of", "max_tokens": 7, "ignore_eos": True}
    request = urllib.request.Request(
        f"{running.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage: dict[str, int] = json.load(answer)["usage"]
    return usage


def test_prepare_vllm_returns_at_once_when_done(prepared_vllm):
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, prepare_vllm.__file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert str(prepared_vllm.command) in done.stdout
    assert time.monotonic() - begun < 2


def test_prepare_vllm_keeps_what_it_did_not_make(prepared_vllm, tmp_path):
    own = tmp_path / "weights.txt"
    own.write_text("mine")
    with pytest.raises(prepare_vllm.CannotPrepare, match="holds something else"):
        prepare_vllm.prepare_model(tmp_path, prepared_vllm.prefix)
    assert own.read_text() == "mine"


def test_forked_server_serves_and_leaves_nothing(fork_server, tiny_model, tmp_path):
    with started(fork_server.command, tiny_model, tmp_path) as running:
        running.wait_until_ready()
        assert complete(running, tiny_model)["completion_tokens"] == 7
        processes = descendants(fork_server.pid)
        names = {process.name() for process in processes}
        blocks = shared_memory(processes)
        assert {"VLLM::EngineCore", "VLLM::Worker"} <= names
        assert blocks
        assert any(running.tmpdir.iterdir())
        running.process.send_signal(signal.SIGTERM)
        assert running.returncode() == 0
    assert descendants(fork_server.pid) == []
    assert not any(block.exists() for block in blocks)


def test_forked_server_reads_its_own_environment(fork_server, tiny_model, tmp_path):
    with started(
        fork_server.command, tiny_model, tmp_path, VLLM_LOGGING_LEVEL="WARNING"
    ) as running:
        running.wait_until_ready()
        log = running.log.read_text()
    assert "WARNING" in log
    assert " INFO " not in "\n".join(line for line in log.splitlines() if "pid=" in line)


@pytest.mark.parametrize("when", ["starting", "ready"])
def test_forked_server_dies_with_its_shim(fork_server, tiny_model, tmp_path, when):
    with started(fork_server.command, tiny_model, tmp_path) as running:
        if when == "ready":
            running.wait_until_ready()
        deadline = time.monotonic() + START_DEADLINE_S
        while not (processes := descendants(fork_server.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.process.kill()
        wait_until_gone(processes)
    assert descendants(fork_server.pid) == []


def test_forked_server_ends_with_its_engine(fork_server, tiny_model, tmp_path):
    with started(fork_server.command, tiny_model, tmp_path) as running:
        running.wait_until_ready()
        processes = descendants(fork_server.pid)
        [engine] = [process for process in processes if process.name() == "VLLM::EngineCore"]
        engine.kill()
        assert running.returncode() == 0, "what the plain command returns, too"
    assert descendants(fork_server.pid) == []
    assert "EngineDeadError" in running.log.read_text()


@pytest.mark.parametrize(
    ("flags", "returncode", "line"),
    [
        ({"--kv-cache-memory-bytes": "1M"}, 1, "ValueError: To serve at least one request"),
        ({"--max-num-seqs": "64", "--max-num-batched-tokens": "32"}, 1, "greater than or equal"),
        ({"--max-num-seqs": "many"}, 2, "vllm serve: error: argument --max-num-seqs"),
        ({"--swap-space": "4"}, 2, "vllm: error: unrecognized arguments: --swap-space 4"),
    ],
)
def test_forked_server_refuses_as_the_plain_command(
    fork_server, tiny_model, tmp_path, flags, returncode, line
):
    with started(fork_server.command, tiny_model, tmp_path, flags) as running:
        assert running.returncode() == returncode
    assert line in running.log.read_text()
    assert descendants(fork_server.pid) == []
