"""The prepared vLLM and its fork server do what the other tests on the real engine rely on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import prepare_vllm
import psutil
import pytest
from leftovers import descendants, shared_memory, wait_until_gone
from serving import START_DEADLINE_S, Running, started

FLAGS = {
    "--load-format": "dummy",
    "--max-model-len": "512",
    "--block-size": "32",
    "--kv-cache-memory-bytes": "8M",
}


@contextmanager
def tiny_server(
    command: Path, model: Path, folder: Path, flags: dict[str, str] | None = None, **env: str
) -> Iterator[Running]:
    words = [word for option in (FLAGS | (flags or {})).items() for word in option]
    with started([command, "serve", model, "--enforce-eager", *words], folder, **env) as running:
        yield running


def test_prepare_vllm_returns_at_once_when_done(prepared_vllm):
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, prepare_vllm.__file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert str(prepared_vllm.command) in done.stdout
    assert time.monotonic() - begun < 15


def test_prepare_vllm_keeps_what_it_did_not_make(prepared_vllm, tmp_path):
    own = tmp_path / "weights.txt"
    own.write_text("mine")
    with pytest.raises(prepare_vllm.CannotPrepare, match="holds something else"):
        prepare_vllm.prepare_model(tmp_path, prepared_vllm.prefix)
    assert own.read_text() == "mine"


def test_forked_server_serves_and_leaves_nothing(fork_server, tiny_model, tmp_path):
    with tiny_server(fork_server.command, tiny_model, tmp_path) as running:
        running.wait_until_ready()
        assert running.complete(tiny_model)["completion_tokens"] == 7
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
    with tiny_server(
        fork_server.command, tiny_model, tmp_path, VLLM_LOGGING_LEVEL="WARNING"
    ) as running:
        running.wait_until_ready()
        log = running.log.read_text()
    assert "WARNING" in log
    assert " INFO " not in "\n".join(line for line in log.splitlines() if "pid=" in line)


@pytest.mark.parametrize("when", ["starting", "ready"])
def test_forked_server_dies_with_its_shim(fork_server, tiny_model, tmp_path, when):
    with tiny_server(fork_server.command, tiny_model, tmp_path) as running:
        if when == "ready":
            running.wait_until_ready()
        deadline = time.monotonic() + START_DEADLINE_S
        while not (processes := descendants(fork_server.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.process.kill()
        wait_until_gone(processes)
    assert descendants(fork_server.pid) == []


def test_forked_server_leaves_no_memory_when_stopped_in_its_start(
    fork_server, tiny_model, tmp_path
):
    with tiny_server(fork_server.command, tiny_model, tmp_path) as running:
        deadline = time.monotonic() + START_DEADLINE_S
        while not (blocks := shared_memory(descendants(fork_server.pid))):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)  # the engine is on its way: now it dies without clearing up
        processes = descendants(fork_server.pid)
        running.process.send_signal(signal.SIGTERM)
        # It ends at once; the server itself swallows the signal.
        psutil.wait_procs(processes, timeout=3)
        running.process.kill()
        wait_until_gone(processes)
    assert not any(block.exists() for block in blocks)


def test_forked_server_ends_with_its_engine(fork_server, tiny_model, tmp_path):
    with tiny_server(fork_server.command, tiny_model, tmp_path) as running:
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
    with tiny_server(fork_server.command, tiny_model, tmp_path, flags) as running:
        assert running.returncode() == returncode
    assert line in running.log.read_text()
    assert descendants(fork_server.pid) == []
