"""A server's life from launch to stop, with the stand-in for vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
import pytest
from fake_nvml import FakeGpu, FakeNvml
from stand_in import COMMAND, FAST, MODULE

from tuner.engine.base import LaunchObserver, ProcessRecord
from tuner.engine.vllm import LaunchTiming, VllmLauncher, check_model_folder, served_name
from tuner.engine.vllm_server import VllmServer
from tuner.errors import EnvironmentProblem
from tuner.metrics.device import DeviceMonitor
from tuner.types import (
    EngineConfig,
    Failure,
    FailureCause,
    JsonValue,
    Progress,
    ServerSpec,
    Stage,
)

LOGS = Path(__file__).parent / "data" / "logs"
ENV = {**FAST, "SIMULATED_DEVICE": "a10-24g"}
SERVER = ServerSpec(tuple(COMMAND), "org/tiny", {}, ENV, 20.0)
SMALL: dict[str, JsonValue] = {"max-model-len": 512, "kv-cache-memory-bytes": "8M"}
TIMING = LaunchTiming(poll_s=0.05, decisive_grace_s=0.3, stop_grace_s=1.0)


class Watch:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.records: list[ProcessRecord] = []
        self.progress: list[Progress] = []

    @property
    def observer(self) -> LaunchObserver:
        return LaunchObserver(self.records.append, self.progress.append)

    @property
    def alive(self) -> list[int]:
        """Processes of the launches that still run."""
        groups = {record.pgid for record in self.records}
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found += [process.pid] if os.getpgid(process.pid) in groups else []
            except (psutil.Error, ProcessLookupError):
                continue
        return found


@pytest.fixture(autouse=True)
def no_kernel_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills none of these servers, whatever else it does meanwhile."""
    monkeypatch.setattr("tuner.engine.kernel_kills.oom_kills", lambda: 7)
    monkeypatch.setattr("tuner.engine.vllm_server.oom_kills", lambda: 7)


@asynccontextmanager
async def launched(
    tmp_path: Path,
    args: Mapping[str, JsonValue] = SMALL,
    *,
    server: ServerSpec = SERVER,
    watch: Watch | None = None,
    timing: LaunchTiming = TIMING,
    **env: str,
) -> AsyncIterator[VllmServer | Failure]:
    watch = watch or Watch()
    launcher = VllmLauncher(server, timing=timing)
    started = await launcher.launch(EngineConfig(args, env), tmp_path, watch.observer)
    try:
        yield started
    finally:
        if isinstance(started, VllmServer):
            await started.stop()
        assert not watch.alive


def ready(started: VllmServer | Failure) -> VllmServer:
    assert isinstance(started, VllmServer), started
    return started


def failed(started: VllmServer | Failure) -> Failure:
    assert isinstance(started, Failure)
    return started


async def complete(server: VllmServer, count: int = 1) -> list[int]:
    """Statuses of so many completions; 0 where the connection broke."""

    async def one(session: aiohttp.ClientSession) -> int:
        body = {"model": server.model_name, "prompt": "a b c", "max_tokens": 4}
        try:
            async with session.post(f"{server.base_url}/v1/completions", json=body) as response:
                return response.status
        except aiohttp.ClientError:
            return 0

    async with aiohttp.ClientSession() as session:
        return [await one(session) for _ in range(count)]


# --- a good life -----------------------------------------------------------------------


async def test_launch_gives_a_server_that_serves(tmp_path: Path) -> None:
    watch = Watch()
    async with launched(tmp_path, watch=watch) as started:
        server = ready(started)
        assert await complete(server) == [200]
        assert server.model_name == "org/tiny"
        assert server.memory.vllm_version == "0.32.0+simulated.x50"
        assert server.memory.simulated
        assert server.memory.kv_cache_tokens == 2048
        assert server.memory.max_model_len_tokens == 512
        assert server.memory.max_concurrency == 4.0
        assert server.memory.weights_gib == 0.07
        assert 0 < (server.memory.startup_s or 0) < 20
        assert server.examine() is None
        assert (server.device_use().host_peak_gib or 0) > 0
    assert len(watch.records) == 1
    assert {p.activity for p in watch.progress} == {"starting"}
    assert watch.progress[0].detail == "starting Python and importing vLLM"


async def test_launch_records_the_command_without_secrets(tmp_path: Path) -> None:
    server = replace(SERVER, env={**ENV, "HF_TOKEN": "hf_secret"})
    args = {**SMALL, "max-num-seqs": 16}
    async with launched(tmp_path, args, server=server, A="1") as started:
        base_url = ready(started).base_url
    record = json.loads((tmp_path / "launch.json").read_text())
    assert record["command"][:5] == [sys.executable, "-m", MODULE, "serve", "org/tiny"]
    assert record["command"][-2:] == ["--port", base_url.rpartition(":")[2]]
    assert record["env"] == {**ENV, "HF_TOKEN": "***", "A": "1"}
    assert "hf_secret" not in (tmp_path / "launch.json").read_text()
    assert "--max-num-seqs 16" in record["shell"]
    assert "Application startup complete" in (tmp_path / "server.log").read_text()


async def test_launch_waits_until_a_completion_works(tmp_path: Path) -> None:
    async with launched(tmp_path, SIMULATED_FAULT="not_yet seconds=0.7") as started:
        server = ready(started)
        assert (server.memory.startup_s or 0) > 0.7
        assert await complete(server) == [200]


async def test_launch_does_not_pass_an_api_key_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key")
    script = tmp_path / "show_env.py"
    script.write_text("import os; print('KEY', os.environ.get('VLLM_API_KEY'), flush=True)")
    server = replace(SERVER, command=("{python}", str(script), "serve"))
    async with launched(tmp_path, server=server) as started:
        failed(started)
    assert "KEY None" in (tmp_path / "server.log").read_text()


# --- starts that fail ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "fault", "cause", "exit_code"),
    [
        ({"kv-cache-memory-bytes": "4M"}, "", FailureCause.KV_TOO_SMALL, 1),
        ({"kv-cache-memory-bytes": "1k"}, "", FailureCause.KV_NO_BLOCKS, 1),
        ({"max-num-seqs": 4096, "max-num-batched-tokens": 64}, "", FailureCause.BAD_CONFIG, 1),
        (SMALL, "oom_warmup", FailureCause.OOM_WARMUP, 1),
        ({"no-such-flag": 1}, "", FailureCause.BAD_CONFIG, 2),
        (SMALL, "oom_load", FailureCause.OOM_LOAD, 1),
        (SMALL, "oom_profile", FailureCause.OOM_PROFILE, 1),
        (SMALL, "host_oom exit=-9", FailureCause.CRASH, -9),
        (SMALL, "model_not_found", FailureCause.MODEL_NOT_FOUND, 1),
        (SMALL, "port_in_use", FailureCause.PORT_IN_USE, 1),
    ],
)
async def test_launch_says_why_a_start_fails(
    tmp_path: Path,
    args: dict[str, JsonValue],
    fault: str,
    cause: FailureCause,
    exit_code: int,
) -> None:
    async with launched(tmp_path, args, SIMULATED_FAULT=fault) as started:
        failure = failed(started)
    assert (failure.cause, failure.exit_code) == (cause, exit_code)
    assert failure.log_path == tmp_path / "server.log"
    assert failure.line
    assert failure.excerpt


async def test_launch_gives_the_numbers_of_a_kv_cache_that_is_too_small(tmp_path: Path) -> None:
    args: dict[str, JsonValue] = {"kv-cache-memory-bytes": "4M", "max-model-len": 2048}
    async with launched(tmp_path, args) as started:
        failure = failed(started)
    assert failure.stage is Stage.PROFILING  # vLLM says nothing when bytes are given
    assert failure.numbers["estimated_max_model_len_tokens"] == 1008
    assert failure.memory.weights_gib == 0.07


async def test_launch_gives_up_at_the_time_limit(tmp_path: Path) -> None:
    server = replace(SERVER, startup_timeout_s=3.0)
    begin_s = time.monotonic()
    async with launched(tmp_path, server=server, SIMULATED_FAULT="hang_start") as started:
        failure = failed(started)
    assert failure.cause is FailureCause.STARTUP_TIMEOUT  # 3 s are no time to call it a hang
    assert failure.stage is Stage.LOADING
    assert failure.line == (
        "not ready after 3s, still loading the weights (/health: ClientConnectorError): "
        "raise server.startup_timeout"
    )
    assert time.monotonic() - begin_s < 10


async def test_launch_tells_a_hang_from_a_start_that_takes_long(tmp_path: Path) -> None:
    server = replace(SERVER, startup_timeout_s=4.0)
    fault = "hang_start stage=graph_capture"
    timing = replace(TIMING, quiet_s=1.0)
    async with launched(tmp_path, server=server, timing=timing, SIMULATED_FAULT=fault) as started:
        failure = failed(started)
    assert failure.cause is FailureCause.HANG
    assert re.fullmatch(
        r"not ready after 4s: no progress since [012]s, while capturing CUDA graphs "
        r"\(last line: .*Capturing.*\)",
        failure.line,
    )


async def test_launch_does_not_call_a_start_a_hang_that_still_says_something_new(
    tmp_path: Path,
) -> None:
    server = replace(SERVER, startup_timeout_s=4.0, command=talks(tmp_path, every_s=0.2))
    async with launched(tmp_path, server=server, timing=replace(TIMING, quiet_s=1.0)) as started:
        failure = failed(started)
    assert failure.cause is FailureCause.STARTUP_TIMEOUT
    assert "still loading the weights" in failure.line


def talks(tmp_path: Path, every_s: float) -> tuple[str, ...]:
    """The command of a server that loads shard after shard."""
    script = tmp_path / "talks.py"
    script.write_text(
        "import time\n"
        "for shard in range(1000):\n"
        "    print(f'Loading safetensors checkpoint shards:  0% Completed | {shard}/1000', "
        "flush=True)\n"
        f"    time.sleep({every_s})\n"
    )
    return ("{python}", str(script), "serve")


async def test_launch_does_not_take_an_older_server_on_its_port_for_its_own(
    tmp_path: Path,
) -> None:
    """Our process lives, and somebody else's answers; its page says since when it has run."""
    script = tmp_path / "older.py"
    script.write_text(OLDER_SERVER)
    server = replace(SERVER, command=("{python}", str(script), "serve"))
    async with launched(tmp_path, server=server) as started:
        failure = failed(started)
    assert failure.cause is FailureCause.PORT_IN_USE
    assert "older than this launch" in failure.line
    assert failure.exit_code is None


OLDER_SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/v1/models":
            self.say(json.dumps({"data": [{"id": "org/tiny", "max_model_len": 512}]}))
        else:
            self.say("process_start_time_seconds 1.7e9\\n")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.say("{}")

    def say(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


async def test_launch_ends_a_server_that_says_it_failed_and_lingers(tmp_path: Path) -> None:
    script = tmp_path / "lingers.py"
    script.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ValueError: No available memory for the cache blocks.', flush=True)\n"
        "time.sleep(60)\n"
    )
    server = replace(SERVER, command=("{python}", str(script), "serve"))
    begin_s = time.monotonic()
    async with launched(tmp_path, server=server) as started:
        assert failed(started).cause is FailureCause.KV_NO_BLOCKS
    assert time.monotonic() - begin_s < 10


async def test_launch_classifies_a_real_log(tmp_path: Path) -> None:
    log = LOGS / "cpu_0.32_kv_too_small.log"
    async with launched(tmp_path, SIMULATED_FAULT=f"replay file={log}") as started:
        failure = failed(started)
    assert failure.cause is FailureCause.KV_TOO_SMALL
    assert failure.memory.vllm_version == "0.32.0"


async def test_launch_fails_where_completions_are_refused(tmp_path: Path) -> None:
    # The stand-in answers 400 when prompt and output do not fit the context.
    async with launched(tmp_path, {**SMALL, "max-model-len": 2}) as started:
        failure = failed(started)
    assert failure.cause is FailureCause.UNSUPPORTED
    assert "a completion is answered with 400" in failure.line


# --- what the user has to mend ---------------------------------------------------------


async def test_launch_refuses_a_command_that_is_not_there(tmp_path: Path) -> None:
    server = replace(SERVER, command=("no-such-program-here", "serve"))
    with pytest.raises(EnvironmentProblem, match="no-such-program-here"):
        async with launched(tmp_path, server=server):
            pass


def test_check_model_folder_refuses_what_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="is not there"):
        check_model_folder(str(tmp_path / "none"))
    with pytest.raises(EnvironmentProblem, match=r"has no config\.json"):
        check_model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model_folder(str(tmp_path))
    check_model_folder("org/model")


@pytest.mark.parametrize(
    ("value", "name"), [(None, "org/tiny"), ("a", "a"), (["a", "b"], "a"), ([], "org/tiny")]
)
def test_served_name(value: JsonValue, name: str) -> None:
    assert served_name(SERVER, EngineConfig({"served-model-name": value})) == name


async def test_launch_uses_the_served_name(tmp_path: Path) -> None:
    async with launched(tmp_path, {**SMALL, "served-model-name": ["a", "b"]}) as started:
        assert await complete(ready(started)) == [200]
        assert ready(started).model_name == "a"


# --- death -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "cause", "exit_code"),
    [
        ("oom_runtime", FailureCause.OOM_RUNTIME, 0),
        ("server_killed", FailureCause.CRASH, -9),
    ],
)
async def test_died_tells_of_a_death_under_load(
    tmp_path: Path, fault: str, cause: FailureCause, exit_code: int
) -> None:
    async with launched(tmp_path, SIMULATED_FAULT=fault) as started:
        server = ready(started)
        dying = asyncio.create_task(server.died())
        await complete(server, 10)
        failure = await asyncio.wait_for(dying, 10)
        # Whether the engine's words or the process' end are seen first is chance.
        assert failure.cause is cause
        assert failure.exit_code in (exit_code, None)
        assert failure.memory.kv_cache_tokens == 2048
        assert server.examine() == failure


async def test_died_tells_of_an_engine_that_dies_with_exit_code_0(tmp_path: Path) -> None:
    async with launched(tmp_path, SIMULATED_FAULT="crash stage=load after=2") as started:
        await complete(ready(started))
        failure = await asyncio.wait_for(ready(started).died(), 10)
    assert failure.cause is FailureCause.CRASH
    assert "illegal memory access" in failure.line
    assert failure.stage is Stage.READY


async def test_died_tells_of_a_dead_engine_behind_a_living_process(tmp_path: Path) -> None:
    async with launched(tmp_path, SIMULATED_FAULT="engine_dead after=2") as started:
        await complete(ready(started))
        failure = await asyncio.wait_for(ready(started).died(), 10)
    assert failure.cause is FailureCause.CRASH
    assert failure.exit_code is None


async def test_died_is_not_called_by_stop(tmp_path: Path) -> None:
    async with launched(tmp_path) as started:
        server = ready(started)
        dying = asyncio.create_task(server.died())
        await server.stop()
        await asyncio.sleep(0.1)
        assert not dying.done()
        dying.cancel()


# --- nothing survives ------------------------------------------------------------------


async def test_stop_ends_an_engine_that_ignores_signals(tmp_path: Path) -> None:
    watch = Watch()
    async with launched(
        tmp_path, watch=watch, SIMULATED_FAULT="ignore_term; leave_engine"
    ) as started:
        ready(started)
        assert len(watch.alive) >= 2  # API server and engine, and who guards them
    assert watch.alive == []


async def test_launch_leaves_nothing_when_it_is_cancelled(tmp_path: Path) -> None:
    watch, under_way = Watch(), asyncio.Event()
    observer = LaunchObserver(watch.records.append, lambda _: under_way.set())
    config = EngineConfig(SMALL, {"SIMULATED_FAULT": "hang_start"})
    launcher = VllmLauncher(SERVER, timing=TIMING)
    launching = asyncio.create_task(launcher.launch(config, tmp_path, observer))
    await under_way.wait()
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert watch.alive == []


async def test_launch_leaves_nothing_when_its_observer_fails(tmp_path: Path) -> None:
    watch = Watch()

    def refuse(record: ProcessRecord) -> None:
        watch.records.append(record)
        raise EnvironmentProblem("the disk is full")

    launcher = VllmLauncher(SERVER, timing=TIMING)
    with pytest.raises(EnvironmentProblem, match="the disk is full"):
        await launcher.launch(
            EngineConfig(SMALL), tmp_path, LaunchObserver(refuse, watch.progress.append)
        )
    assert watch.alive == []


async def test_launch_waits_until_the_last_server_s_device_memory_is_free(tmp_path: Path) -> None:
    gpu = FakeGpu("H100", "GPU-1", total_gib=80.0, used_gib=0.5)
    launcher = VllmLauncher(SERVER, device=DeviceMonitor({}, FakeNvml([gpu])), timing=TIMING)
    first = await launcher.launch(EngineConfig(SMALL), tmp_path, Watch().observer)
    ready(first)
    gpu.used_gib = 70.0
    assert ready(first).device_use().device_peak_gib == (70.0,)
    await ready(first).stop()

    watch, under_way = Watch(), asyncio.Event()

    def note(progress: Progress) -> None:
        watch.progress.append(progress)
        under_way.set()

    observer = LaunchObserver(watch.records.append, note)
    launching = asyncio.create_task(launcher.launch(EngineConfig(SMALL), tmp_path, observer))
    await under_way.wait()
    assert watch.progress[0].activity == "waiting for device memory"
    assert "69.5 GiB" in watch.progress[0].detail
    assert watch.records == []
    gpu.used_gib = 0.6
    second = ready(await launching)
    assert second.device_use().device_peak_gib == pytest.approx((0.6,))
    await second.stop()


async def test_server_tells_the_energy_of_its_devices(tmp_path: Path) -> None:
    gpu = FakeGpu("H100", "GPU-1", energy_mj=5_000)
    launcher = VllmLauncher(SERVER, device=DeviceMonitor({}, FakeNvml([gpu])), timing=TIMING)
    server = ready(await launcher.launch(EngineConfig(SMALL), tmp_path, Watch().observer))
    server.device_use()
    start_s = time.perf_counter()
    server.device_use()
    gpu.energy_mj = 65_000
    server.device_use()
    assert server.energy_j(start_s, time.perf_counter()) == 60.0
    assert server.energy_j(start_s - 3600, start_s) is None, "it did not live then"
    await server.stop()


async def test_launch_after_a_failed_one_does_not_read_its_log(tmp_path: Path) -> None:
    launcher = VllmLauncher(SERVER, timing=TIMING)
    taken = EngineConfig(SMALL, {"SIMULATED_FAULT": "port_in_use"})
    first = failed(await launcher.launch(taken, tmp_path, Watch().observer))
    assert first.cause is FailureCause.PORT_IN_USE
    slow = EngineConfig(
        SMALL, {"SIMULATED_FAULT": "slow_start seconds=1.5"}
    )  # longer than decisive_grace_s
    second = ready(await launcher.launch(slow, tmp_path, Watch().observer))
    await second.stop()
    assert "already in use" in (tmp_path / "server.1.log").read_text()
    assert "already in use" not in (tmp_path / "server.log").read_text()
