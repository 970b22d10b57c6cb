"""The simulated log: what `tuner.engine.logs` reads from it is what was meant.

Where a whole log of the real vLLM is at hand (`data/logs`), the simulated start with the same
flags on the same machine must read the same.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from simulated_builders import failed_start, plan, refused, settings

from tuner.engine.logs import LogReader
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.log_format import LogEntry
from tuner.engine.simulated.profiles import DEVICES
from tuner.engine.simulated.words import Pids, lines_of, start_lines
from tuner.types import FailureCause, MemoryFacts, Stage

LOGS = Path(__file__).parent / "data" / "logs"

RECORDED_ON = replace(DEVICES["cpu"], total_gib=10.59, free_gib=9.25, context_gib=0.044)
"""The machine of `data/logs`; its worker took little when it was asked (9.25 -> 9.14 GiB)."""


def read(entries: list[LogEntry]) -> LogReader:
    reader = LogReader()
    reader.feed("".join(entry.text + "\n" for entry in entries))
    reader.finish()
    return reader


def read_file(name: str) -> LogReader:
    reader = LogReader()
    reader.feed((LOGS / name).read_bytes())
    reader.finish()
    return reader


def assert_reads_back(failure: StartFailure, stage: Stage | None = None) -> None:
    reader = read(lines_of(failure))
    found = reader.failure(failure.exit_code)
    assert found is not None
    assert found.cause is failure.cause
    assert without_device(found.numbers) == failure.numbers
    assert found.stage is (stage or failure.stage)


def without_device(numbers):
    """Which device it was is not the memory model's matter."""
    return {name: value for name, value in numbers.items() if name != "device_index"}


# --- a start that goes well ------------------------------------------------------------


def test_start_lines_of_a_cpu_read_as_the_real_log():
    made = settings(
        RECORDED_ON,
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=67_108_864,
        max_model_len=2048,
    )
    reader = read(start_lines(made, plan(made)))
    assert reader.stage is Stage.READY
    assert reader.failure() is None
    real = read_file("cpu_0.32_ok.log").memory
    expected = replace(real, vllm_version="0.32.0+simulated", simulated=True)
    assert reader.memory == expected


@pytest.mark.parametrize("eager", [False, True])
def test_start_lines_of_a_gpu_tell_its_memory(eager):
    made = settings("a10-24g", "llama-3.1-8b", max_model_len=4096, enforce_eager=eager)
    planned = plan(made)
    reader = read(start_lines(made, planned))
    assert reader.stage is Stage.READY
    assert not reader.decisive
    assert reader.memory == MemoryFacts(
        vllm_version="0.32.0+simulated",
        weights_gib=14.96,
        kv_cache_gib=round(planned.available_kv_gib, 2),
        kv_cache_tokens=planned.kv_cache_tokens,
        max_concurrency=round(planned.max_concurrency, 2),
        max_model_len_tokens=4096,
        graph_gib=None if eager else round(planned.graph_gib, 2),
        simulated=True,
    )


def test_start_lines_tell_the_fitted_context():
    made = settings("a10-24g", "llama-3.1-8b", max_model_len="auto")
    reader = read(start_lines(made, plan(made)))
    assert reader.memory.max_model_len_tokens == plan(made).max_model_len < 131_072


def test_start_lines_carry_processes_dates_and_times():
    made = settings("h100-80g", "llama-3.1-70b", tensor_parallel_size=4, max_model_len=8192)
    entries = start_lines(
        made, plan(made), port=8123, pids=Pids(11, 22, 33), begun=datetime(2026, 5, 4, 10, 0, 0)
    )
    texts = [entry.text for entry in entries]
    assert texts[0].startswith("(APIServer pid=11) INFO 05-04 10:00:00 [")
    assert any(text.startswith("(EngineCore pid=22) INFO 05-04 10:0") for text in texts)
    assert any(text.startswith("(Worker_TP0 pid=33) ") for text in texts)
    assert any("http://0.0.0.0:8123" in text for text in texts)
    times = [entry.after_s for entry in entries]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(plan(made).startup_s)


def test_start_lines_know_their_stages():
    made = settings("a10-24g", "llama-3.1-8b", max_model_len=4096)
    reader = LogReader()
    for entry in start_lines(made, plan(made)):
        reader.feed(entry.text + "\n")
        assert reader.stage is entry.stage


# --- starts that fail ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("kv_too_small", {"kv_cache_memory_bytes": "1M", "block_size": 32, "max_model_len": 2048}),
        ("kv_no_blocks", {"kv_cache_memory_bytes": 1000, "block_size": 32, "max_model_len": 2048}),
        ("kv_larger_than_memory", {"kv_cache_memory_bytes": "400G"}),
        ("util_too_high", {"gpu_memory_utilization": 0.999}),
        ("block_size_16", {"kv_cache_memory_bytes": "64M", "block_size": 16}),
        ("offloading", {"kv_cache_memory_bytes": "64M", "kv_offloading_size": 1}),
    ],
)
def test_failed_start_reads_as_the_real_log(name, args):
    failure = failed_start(settings(RECORDED_ON, enforce_eager=True, **args))
    assert_reads_back(failure)
    real = read_file(f"cpu_0.32_{name}.log").failure(1)
    simulated = read(lines_of(failure)).failure(1)
    assert real is not None
    assert simulated is not None
    assert (simulated.cause, simulated.stage) == (real.cause, real.stage)
    assert simulated.numbers == real.numbers
    assert simulated.line.split("(")[0] == real.line.split("(")[0]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("seqs_gt_tokens", {"max_num_seqs": 64, "max_num_batched_tokens": 32}),
        ("bad_value", {"max_num_seqs": -1}),
    ],
)
def test_refused_configuration_reads_as_the_real_log(name, args):
    failure = refused(**args)
    assert_reads_back(failure)
    real = read_file(f"cpu_0.32_{name}.log").failure(1)
    simulated = read(lines_of(failure)).failure(1)
    assert real is not None
    assert simulated is not None
    assert simulated.line == real.line


GPU_FAILURES = {
    "oom_load": ("llama-3.1-70b", {}),
    "oom_profile": ("llama-3.1-8b", {"max_num_batched_tokens": 131_072}),
    "oom_profile_sampler": (
        "llama-3.1-8b",
        {"max_num_seqs": 8192, "max_num_batched_tokens": 8192},
    ),
    "kv_no_blocks": ("llama-3.1-8b", {"gpu_memory_utilization": 0.5}),
    "kv_too_small": ("llama-3.1-8b", {"max_model_len": 131_072}),
    "kv_too_small_in_bytes": (
        "llama-3.1-8b",
        {"max_model_len": 131_072, "kv_cache_memory_bytes": "1G"},
    ),
    "oom_kv_alloc": ("llama-3.1-8b", {"kv_cache_memory_bytes": "8G"}),
    "oom_graph_capture": ("llama-3.1-8b", {"kv_cache_memory_bytes": 7_200_000_000}),
    "oom_warmup": ("llama-3.1-8b", {"gpu_memory_utilization": 0.98}),
    "oom_warmup_eager": (
        "llama-3.1-8b",
        {"kv_cache_memory_bytes": 7_200_000_000, "enforce_eager": True},
    ),
    "budget": ("llama-3.1-8b", {"gpu_memory_utilization": 1.0}),
    "block_size": ("llama-3.1-8b", {"block_size": 8}),
    "host_oom": ("llama-3.1-8b", {"kv_offloading_size": 512}),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", GPU_FAILURES)
def test_failed_start_of_a_gpu_reads_back(name, ranks):
    model, args = GPU_FAILURES[name]
    device = DEVICES["a10-24g"]
    if ranks == 2:
        # The same on devices half as large: engine and worker become processes of their own.
        device = replace(device, total_gib=11.6, free_gib=11.6)
        args = args | {"tensor_parallel_size": 2}
    assert_reads_back(failed_start(settings(device, model, **({"max_model_len": 4096} | args))))


def test_device_busy_reads_back():
    busy = replace(DEVICES["a10-24g"], free_gib=12.0)
    assert_reads_back(failed_start(settings(busy, "qwen2.5-1.5b")))


def test_parser_refusal_reads_back():
    assert_reads_back(refused(max_num_seqs="abc"))


SILENT = {FailureCause.HANG, FailureCause.NONE}
"""A start that hangs says nothing, the tuner sees it by the clock; nor does one that works."""


@pytest.mark.parametrize("cause", [c for c in FailureCause if c not in SILENT])
def test_every_cause_can_be_said_while_starting(cause):
    stage = {
        FailureCause.OOM_LOAD: Stage.LOADING,
        FailureCause.OOM_PROFILE: Stage.PROFILING,
        FailureCause.OOM_KV_ALLOC: Stage.KV_ALLOCATION,
        FailureCause.OOM_WARMUP: Stage.WARMUP,
        FailureCause.OOM_GRAPH_CAPTURE: Stage.GRAPH_CAPTURE,
        FailureCause.OOM_RUNTIME: Stage.LOAD,
    }.get(cause, Stage.LAUNCH)
    code = {FailureCause.CRASH: -11, FailureCause.OOM_RUNTIME: 0}.get(cause, 1)
    made = settings("a10-24g", "llama-3.1-8b", max_model_len=4096)
    failure = StartFailure(cause, stage, exit_code=code, settings=made, plan=plan(made))
    entries = lines_of(failure)
    if stage is Stage.LOAD:
        entries = [*start_lines(made, plan(made)), *entries]
    found = read(entries).failure(code)
    assert found is not None
    assert found.cause is cause


@pytest.mark.parametrize(
    ("cause", "numbers"),
    [
        (
            FailureCause.OOM_RUNTIME,
            {"tried_to_allocate_gib": 0.25, "total_gib": 22.5, "free_gib": 0.125},
        ),
        (FailureCause.CRASH, {}),
        (FailureCause.HANG, {}),
        (FailureCause.NCCL, {}),
        (FailureCause.HOST_OOM, {}),
    ],
)
def test_death_of_a_serving_engine_reads_back(cause, numbers):
    made = settings("a10-24g", "llama-3.1-8b", max_model_len=4096)
    failure = StartFailure(cause, Stage.LOAD, exit_code=0, numbers=numbers, settings=made)
    reader = read([*start_lines(made, plan(made)), *lines_of(failure)])
    found = reader.failure(0)
    assert found is not None
    assert (found.cause, found.stage) == (cause, Stage.READY)
    assert without_device(found.numbers) == numbers
    assert reader.engine_dead


def test_hanging_start_ends_in_the_middle_without_a_word():
    made = settings("a10-24g", "llama-3.1-8b", max_model_len=4096)
    failure = StartFailure(FailureCause.HANG, Stage.LOADING, settings=made, plan=plan(made))
    reader = read(lines_of(failure))
    assert reader.stage is Stage.LOADING
    assert reader.failure() is None


@pytest.mark.parametrize("stage", list(Stage)[:7])
def test_failure_at_any_stage_cuts_the_log_there(stage):
    made = settings("a10-24g", "llama-3.1-8b", max_model_len=4096)
    failure = StartFailure(FailureCause.UNKNOWN, stage, settings=made, plan=plan(made))
    found = read(lines_of(failure)).failure(1)
    assert found is not None
    assert found.stage is stage
