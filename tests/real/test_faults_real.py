"""Faults of the real engine: the right cause, no survivor, and a study that goes on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml
from leftovers import descendants, of_server, shared_memory, wait_until_gone
from tuning import Json, Workplace, cpu_tiny, trial_attributes
from under_load import ENGINE, LOADED, WORKER, Launches, running_requests

from tuner import spec as spec_file
from tuner.engine.base import LaunchObserver, ProcessRecord
from tuner.engine.kernel_kills import oom_kills
from tuner.engine.vllm import VllmLauncher
from tuner.errors import ExitCode
from tuner.evaluate import ServerEvaluator
from tuner.load.prepared import PreparedWorkloads
from tuner.measuring.session import Asked
from tuner.types import EngineConfig, Failure, FailureCause, JsonValue, Stage, StudySpec

# --- under load, through the whole tuner -----------------------------------------------

SPACE = {
    "study": "faults",
    "search_space": {"max-num-seqs": [4, 5]},  # slow: the load lasts while a test looks on
    "constraints": [],
    "reference": {"max-num-seqs": 16},
    "server_args": {"kv-cache-memory-bytes": "16MiB", "max-model-len": 512},
    "budget": {"trials": 3},
}


@dataclass(frozen=True, slots=True)
class Study:
    """A study with three trials, in which the second loses its engine, then its worker, and the
    third hangs in its first start.

    Attributes:
        trials: what is written to each.
        folder: of the study.
    """

    code: int
    said: str
    trials: list[Json]
    launches: Launches
    folder: Path


@pytest.fixture(scope="module")
def study(fork_server, tiny_model, flag_cache, tmp_path_factory) -> Study:
    workplace = Workplace(tmp_path_factory.mktemp("faults"), flag_cache)
    space = cpu_tiny(fork_server.command, tiny_model, **SPACE)
    space["server"] |= {"hang_timeout": "8s"}
    name = workplace.write_space(space)
    with workplace.started("run", name) as tuner:
        launches = Launches(tuner, workplace.study("faults"), fork_server.pid)
        launches.wait_for_load()  # the reference: nothing happens to it
        launches.wait_for_load()[ENGINE].kill()
        launches.wait_for_load()[WORKER].kill()
        launches.wait_for_load()[ENGINE].suspend()
        launches.wait_for_load()
        code = tuner.process.wait(120)
        said = tuner.said()
    folder = workplace.study("faults")
    trials = [trial_attributes(folder, number) for number in range(3)]
    return Study(code, said, trials, launches, folder)


def test_engine_killed_under_load_is_a_crash_and_tried_once_more(study):
    assert study.code == ExitCode.OK, study.said
    [attempt] = study.trials[1]["tuner:attempts"]
    assert (attempt["cause"], attempt["stage"]) == ("crash", "load")


def test_worker_killed_under_load_is_named_as_vllm_lets_one_know(study):
    """Its engine asks for the exit code at once, and often too early to get one."""
    failure = study.trials[1]["tuner:failure"]
    log = Path(study.folder, "trials", "0001", "server.log").read_text()
    known = "died unexpectedly (exit code: -9)" in log
    assert known or "died unexpectedly (exit code: None)" in log
    # Where the kernel does not tell whom it kills, it is supposed to have done it.
    expected = "host_oom" if known and oom_kills() is None else "crash"
    assert (failure["cause"], failure["stage"]) == (expected, "load")


def test_engine_that_stands_still_under_load_hangs_and_is_tried_once_more(study):
    [attempt] = study.trials[2]["tuner:attempts"]
    assert (attempt["cause"], attempt["stage"]) == ("hang", "load")
    # How many run is what the server said last, some steps before it stood still.
    assert re.search(r"no token for 8 s while \d requests? runs? and \d+ wait", attempt["line"])


def test_study_goes_on_after_each_of_them(study):
    assert [trial["state"] for trial in study.trials] == ["measured", "infeasible", "measured"]
    assert "tuner:attempts" not in study.trials[0]
    assert "Traceback" not in study.said


def test_nothing_is_left_of_any_of_them(study):
    wait_until_gone(study.launches.processes)
    assert study.launches.blocks
    assert not any(block.exists() for block in study.launches.blocks)
    assert len(study.launches.tmpdirs) == 5
    assert not any(tmpdir.exists() for tmpdir in study.launches.tmpdirs)


# --- one server life -------------------------------------------------------------------


@dataclass(slots=True)
class Bench:
    """Measures configurations with the parts of the tuner, in this process."""

    spec: StudySpec
    folder: Path
    records: list[ProcessRecord] = field(default_factory=list)

    async def failure(self, **args: JsonValue) -> Failure:
        launcher = VllmLauncher(self.spec.server)
        evaluator = ServerEvaluator(launcher, Asked.of(self.spec), PreparedWorkloads())
        named = {name.replace("_", "-"): value for name, value in args.items()}
        config = EngineConfig({**self.spec.server.args, **named})
        observer = LaunchObserver(self.records.append, lambda _: None)
        outcome = await evaluator.evaluate(config, self.folder, observer)
        assert isinstance(outcome, Failure)
        return outcome

    async def loaded(self) -> None:
        """Return when the server is under load."""
        async with asyncio.timeout(120):
            while True:
                await asyncio.sleep(0.05)
                try:
                    command = json.loads((self.folder / "launch.json").read_text())["command"]
                    if await asyncio.to_thread(running_requests, command) >= LOADED:
                        return
                except (OSError, ValueError):
                    continue


@asynccontextmanager
async def bench_of(command: list[str], model: str | Path, folder: Path) -> AsyncIterator[Bench]:
    """A bench of whose servers nothing may be left."""
    space = cpu_tiny("vllm", model, **SPACE)
    space["server"]["command"] = [*command, "serve"]
    bench = Bench(spec_file.parse(yaml.safe_dump(space), Path("faults.yaml")), folder)
    yield bench
    assert bench.records
    for record in bench.records:
        assert of_server(record.pgid, record.tmpdir) == []
        assert not Path(record.tmpdir).exists()


@pytest.fixture
async def forked(fork_server, tiny_model, tmp_path) -> AsyncIterator[Bench]:
    async with bench_of([str(fork_server.command)], tiny_model, tmp_path) as bench:
        yield bench
    assert descendants(fork_server.pid) == []


async def test_kv_cache_too_small_for_one_request(forked):
    failure = await forked.failure(kv_cache_memory_bytes="1M")
    assert failure.cause is FailureCause.KV_TOO_SMALL
    assert failure.numbers["estimated_max_model_len_tokens"] > 0
    assert failure.exit_code == 1


async def test_host_memory_that_cannot_be_had(fork_server, tiny_model, tmp_path):
    """3 GiB of KV cache where a process may take 2 GiB more; the rest of a start takes one."""
    limited = ["prlimit", f"--as={2 * 2**30}", str(fork_server.command)]
    async with bench_of(limited, tiny_model, tmp_path) as bench:
        failure = await bench.failure(kv_cache_memory_bytes="3G")
        assert failure.cause is FailureCause.HOST_OOM
        assert failure.numbers["tried_to_allocate_gib"] == pytest.approx(3.0)
        assert failure.stage is not Stage.LOAD
        assert "DefaultCPUAllocator: can't allocate memory" in failure.line
    assert descendants(fork_server.pid) == []


async def test_port_that_somebody_took(forked, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr("tuner.engine.vllm.free_port", lambda _: port)
        failure = await forked.failure()
    assert failure.cause is FailureCause.PORT_IN_USE
    assert failure.exit_code == 1


async def test_flag_that_does_not_exist(forked):
    failure = await forked.failure(max_nun_seqs=8)
    assert failure.cause is FailureCause.BAD_CONFIG
    assert failure.exit_code == 2
    assert "--max-nun-seqs" in failure.line


async def test_model_that_does_not_exist(fork_server, tmp_path):
    async with bench_of([str(fork_server.command)], "nobody/no-such-model", tmp_path) as bench:
        failure = await bench.failure()
        assert failure.cause is FailureCause.MODEL_NOT_FOUND


async def test_api_server_killed_whose_engine_is_deaf(prepared_vllm, tiny_model, tmp_path):
    """With the plain vLLM: its engine and worker outlive their API server, and here TERM, too."""
    async with bench_of([str(prepared_vllm.command)], tiny_model, tmp_path) as bench:
        evaluating = asyncio.create_task(bench.failure(max_num_seqs=4))
        await bench.loaded()
        [record] = bench.records
        server = of_server(record.pgid, record.tmpdir)
        deaf = [process for process in server if process.name() in (ENGINE, WORKER)]
        blocks = shared_memory(server)
        assert len(deaf) == 2
        assert blocks
        for process in deaf:
            process.suspend()
        psutil.Process(record.pgid).kill()
        failure = await asyncio.wait_for(evaluating, 60)
        assert failure.exit_code == -signal.SIGKILL
        blind = oom_kills() is None
        assert failure.cause is (FailureCause.HOST_OOM if blind else FailureCause.CRASH)
        assert failure.stage is Stage.LOAD
        assert not any(os.path.exists(block) for block in blocks)
