"""What the log of a server tells: stage, memory facts, and the cause of a failure.

The files under `data/logs/` are whole logs of vLLM 0.32's CPU build; the lines in this file
are quoted from the sources and public reports of vLLM 0.4 to 0.33.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.engine.logs import LogReader, cause_of_exit
from tuner.types import Failure, FailureCause, MemoryFacts, Stage

LOGS = Path(__file__).parent / "data" / "logs"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 232.00 MiB. GPU 2 has a total "
    "capacity of 23.57 GiB of which 154.88 MiB is free. Including non-PyTorch memory, this process"
)


def read(*lines: str) -> LogReader:
    reader = LogReader()
    reader.feed("\n".join(lines) + "\n")
    return reader


def failed(reader: LogReader, exit_code: int | None = 1) -> Failure:
    failure = reader.failure(exit_code)
    assert failure is not None
    return failure


def read_file(name: str, piece: int = 1000) -> LogReader:
    reader = LogReader()
    data = (LOGS / name).read_bytes()
    for start in range(0, len(data), piece):
        reader.feed(data[start : start + piece])
    reader.finish()
    return reader


# --- whole logs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cause", "stage", "numbers"),
    [
        (
            "kv_too_small",
            FailureCause.KV_TOO_SMALL,
            Stage.KV_ALLOCATION,
            {
                "max_model_len_tokens": 2048,
                "needed_gib": 0.01,
                "available_gib": 0,
                "estimated_max_model_len_tokens": 224,
            },
        ),
        ("kv_no_blocks", FailureCause.KV_NO_BLOCKS, Stage.KV_ALLOCATION, {}),
        (
            "kv_larger_than_memory",
            FailureCause.HOST_OOM,
            Stage.PROFILING,
            {"available_gib": 9.14, "total_gib": 10.59, "wanted_gib": 400},
        ),
        (
            "util_too_high",
            FailureCause.HOST_OOM,
            Stage.LAUNCH,
            {
                "available_gib": 9.25,
                "total_gib": 10.59,
                "utilization": 0.999,
                "wanted_gib": 10.58,
            },
        ),
        ("block_size_16", FailureCause.BAD_CONFIG, Stage.KV_ALLOCATION, {}),
        (
            "seqs_gt_tokens",
            FailureCause.BAD_CONFIG,
            Stage.LAUNCH,
            {"max_num_batched_tokens": 32, "max_num_seqs": 64},
        ),
        ("bad_value", FailureCause.BAD_CONFIG, Stage.LAUNCH, {}),
        ("unknown_flag", FailureCause.BAD_CONFIG, Stage.LAUNCH, {}),
        ("offloading", FailureCause.UNSUPPORTED, Stage.KV_ALLOCATION, {}),
        ("model_missing", FailureCause.MODEL_NOT_FOUND, Stage.LAUNCH, {}),
        ("port_in_use", FailureCause.PORT_IN_USE, Stage.LAUNCH, {}),
    ],
)
def test_log_reader_finds_the_cause_in_a_real_log(
    name: str, cause: FailureCause, stage: Stage, numbers: dict[str, float]
) -> None:
    reader = read_file(f"cpu_0.32_{name}.log")
    failure = failed(reader)
    assert (failure.cause, failure.stage, failure.numbers) == (cause, stage, numbers)
    assert failure.line.partition(":")[0] in failure.excerpt
    assert reader.decisive or name == "offloading"


def test_log_reader_reads_a_good_start() -> None:
    reader = read_file("cpu_0.32_ok.log", piece=77)
    assert reader.stage is Stage.READY
    assert reader.failure() is None
    assert not reader.decisive
    assert reader.memory == MemoryFacts(
        vllm_version="0.32.0",
        kv_cache_gib=0.06,
        kv_cache_tokens=16384,
        max_concurrency=8.0,
        max_model_len_tokens=2048,
    )


def test_log_reader_shows_pydantic_complaints_with_their_fields() -> None:
    assert failed(read_file("cpu_0.32_bad_value.log")).line == (
        "pydantic_core._pydantic_core.ValidationError: 2 validation errors for SchedulerConfig"
        ": max_num_batched_tokens: Input should be greater than or equal to 1"
        "; max_num_seqs: Input should be greater than or equal to 1"
    )


# --- out of memory: where --------------------------------------------------------------

LOADING = "INFO [gpu_model_runner.py:1] Starting to load model org/model..."
LOADED = "Model loading took 15.2 GiB memory and 4.0 seconds"
SIZED = "Available KV cache memory: 50.12 GiB"
TOKENS = "GPU KV cache size: 1,024 tokens"
CAPTURING = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  10%|#"
CAPTURED = "Graph capturing finished in 12 secs, took 0.55 GiB"
READY = "INFO:     Application startup complete."


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ([], FailureCause.OOM_LOAD),
        ([LOADING], FailureCause.OOM_LOAD),
        ([LOADING, LOADED], FailureCause.OOM_PROFILE),
        ([LOADED, "Dynamo bytecode transform time: 3.05 s"], FailureCause.OOM_PROFILE),
        ([LOADED, CAPTURING], FailureCause.OOM_PROFILE),
        ([LOADED, SIZED, TOKENS], FailureCause.OOM_KV_ALLOC),
        ([LOADED, SIZED, TOKENS, CAPTURING], FailureCause.OOM_GRAPH_CAPTURE),
        ([LOADED, "# GPU blocks: 7823, # CPU blocks: 512"], FailureCause.OOM_KV_ALLOC),
        ([LOADED, SIZED, CAPTURING, CAPTURED], FailureCause.OOM_WARMUP),
        ([LOADED, SIZED, CAPTURED, READY], FailureCause.OOM_RUNTIME),
    ],
)
def test_log_reader_tells_the_stage_of_an_oom(before: list[str], cause: FailureCause) -> None:
    assert (
        failed(read(*before, f"(Worker pid=7) ERROR 01-01 00:00:00 [x.py:1] {OOM}")).cause is cause
    )


@pytest.mark.parametrize(
    ("frames", "cause"),
    [
        (["worker.py:load_model", "llama.py:make_layers"], FailureCause.OOM_LOAD),
        (["x/model_loader/utils.py:initialize_model"], FailureCause.OOM_LOAD),
        (["w.py:determine_num_available_blocks", "m.py:execute_model"], FailureCause.OOM_PROFILE),
        (["w.py:determine_available_memory", "r.py:profile_run"], FailureCause.OOM_PROFILE),
        (
            [
                "w.py:determine_available_memory",
                "r.py:profile_cudagraph_memory",
                "g.py:capture_model",
            ],
            FailureCause.OOM_PROFILE,
        ),
        (["e.py:initialize_cache", "c.py:_allocate_kv_cache"], FailureCause.OOM_KV_ALLOC),
        (["e.py:initialize_from_config", "r.py:capture_model"], FailureCause.OOM_GRAPH_CAPTURE),
        (
            ["e.py:initialize_from_config", "site-packages/torch/cuda/graphs.py:capture_end"],
            FailureCause.OOM_GRAPH_CAPTURE,
        ),
        (["e.py:initialize_from_config", "w.py:compile_or_warm_up_model"], FailureCause.OOM_WARMUP),
        (["w.py:initialize_kv_cache", "utils.py:pin_memory"], FailureCause.HOST_OOM),
    ],
)
def test_log_reader_believes_frames_more_than_stages(
    frames: list[str], cause: FailureCause
) -> None:
    lines = [
        f'  File "{frame.rpartition(":")[0]}", line 12, in {frame.rpartition(":")[2]}\n    call()'
        for frame in frames
    ]
    text = "\n".join(["Traceback (most recent call last):", *lines, OOM])
    tagged = [f"(EngineCore_0 pid=9) ERROR 08-21 07:23:34 [c.py:5] {x}" for x in text.split("\n")]
    assert failed(read("Loading safetensors checkpoint shards:  25%", *tagged)).cause is cause


# --- which line counts -----------------------------------------------------------------


def test_log_reader_takes_the_first_root_and_not_what_follows_from_it() -> None:
    reader = read(
        "(VllmWorker rank=1 pid=5) ERROR 05-01 10:00:00 [w.py:1] RuntimeError: CUDA out of memory "
        "occurred when warming up sampler with 256 dummy requests.",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    )
    failure = failed(reader)
    assert failure.cause is FailureCause.OOM_WARMUP
    assert failure.numbers == {"requests": 256}
    assert "DistBackendError" in failure.excerpt


def test_log_reader_prefers_a_root_to_the_hint_before_it() -> None:
    reader = read(
        "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: x",
        "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: y)",
    )
    assert failed(reader).cause is FailureCause.MODEL_NOT_FOUND


def test_log_reader_does_not_take_program_text_for_a_message() -> None:
    reader = read(
        "Traceback (most recent call last):",
        '  File "hub.py", line 3, in check',
        "    raise RepositoryNotFoundError(",
        "ValueError: something else",
    )
    failure = failed(reader)
    assert (failure.cause, failure.line) == (FailureCause.UNKNOWN, "ValueError: something else")


@pytest.mark.parametrize("level", ["INFO", "WARNING", "DEBUG"])
def test_log_reader_believes_no_failure_told_as_information(level: str) -> None:
    reader = read(f"(EngineCore pid=1) {level} 01-01 00:00:00 [x.py:1] prompt: CUDA out of memory")
    assert reader.failure() is None
    assert failed(reader).cause is FailureCause.UNKNOWN


def test_log_reader_shows_the_engines_exception_where_none_is_known() -> None:
    reader = read(
        "ImportError: cannot import name 'optional'",
        "(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] EngineCore failed to start.",
        "(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] Traceback (most recent call last):",
        "(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] my.LayerError: 'layers.7'",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    )
    failure = failed(reader)
    assert failure.cause is FailureCause.UNKNOWN
    assert failure.line == "my.LayerError: 'layers.7'"
    assert reader.decisive


def test_log_reader_forgets_what_a_start_survived() -> None:
    reader = read("NCCL error: retrying", READY)
    assert reader.failure() is None


def test_log_reader_ignores_requests_that_fail_while_serving() -> None:
    reader = read(READY, "ERROR:    ValueError: x cannot be converted to int")
    assert reader.failure() is None
    assert not reader.engine_dead


def test_log_reader_sees_the_engine_die_while_serving() -> None:
    reader = read(
        READY,
        "(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] EngineCore encountered a fatal error.",
        f"(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] {OOM}",
    )
    assert reader.engine_dead
    failure = failed(reader, exit_code=0)
    assert (failure.cause, failure.stage) == (FailureCause.OOM_RUNTIME, Stage.READY)


def test_log_reader_masks_secrets_in_what_it_quotes() -> None:
    reader = read(
        "--hf-token abc", "vllm: error: unrecognized arguments: --hf-token hf_" + "a" * 34
    )
    failure = failed(reader)
    assert "hf_a" not in failure.line + failure.excerpt
    assert "abc" not in failure.excerpt


def test_log_reader_keeps_a_bounded_part_of_a_long_log() -> None:
    reader = LogReader()
    for _ in range(300):
        reader.feed("x" * 10_000)
    reader.feed("\n" + "INFO spam\n" * 5000 + OOM + "\n")
    failure = failed(reader)
    assert failure.cause is FailureCause.OOM_LOAD
    assert len(failure.excerpt) < 60_000


# --- what belongs together -------------------------------------------------------------

SAMPLER = (
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. "
    "Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
)
TAG = "(Worker_TP{0} pid=1{0}) ERROR 01-01 00:00:00 [x.py:1] "


def test_log_reader_joins_what_torch_and_vllm_say_of_one_failure() -> None:
    reader = read(
        LOADED,
        "Traceback (most recent call last):",
        '  File "gpu_worker.py", line 12, in determine_available_memory',
        OOM,
        "The above exception was the direct cause of the following exception:",
        "Traceback (most recent call last):",
        '  File "gpu_worker.py", line 12, in profile_run',
        SAMPLER,
    )
    failure = failed(reader)
    assert (failure.cause, failure.stage) == (FailureCause.OOM_WARMUP, Stage.PROFILING)
    assert failure.numbers["requests"] == 256
    assert failure.numbers["total_gib"] == 23.57
    assert "256 dummy requests" in failure.line


def test_log_reader_keeps_tracebacks_of_processes_apart() -> None:
    first, second = TAG.format(0), TAG.format(1)
    reader = read(
        first + "Traceback (most recent call last):",
        first + '  File "w.py", line 1, in load_model',
        second + "Traceback (most recent call last):",
        second + '  File "w.py", line 1, in profile_run',
        second + "    self.model()",
        first + OOM,
        second + "KeyError: 'x'",
    )
    assert failed(reader).cause is FailureCause.OOM_LOAD


@pytest.mark.parametrize("then", [OOM, "RuntimeError: CUDA error: an illegal memory access"])
def test_log_reader_believes_a_root_more_than_a_rank_that_lost_its_peer(then: str) -> None:
    reader = read(
        TAG.format(1) + "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote "
        "process exited or there was a network error",
        TAG.format(0) + then,
    )
    assert failed(reader).cause is not FailureCause.NCCL


def test_log_reader_needs_no_next_line_to_decide() -> None:
    reader = read("ValueError: No available memory for the cache blocks. Try increasing `gpu_mem")
    assert reader.decisive
    assert reader.explained


@pytest.mark.parametrize(
    "line",
    [
        "Input prompt (10854 tokens) is too long and exceeds the capacity of block_manager",
        "ValueError: To serve at least one request with the model's max seq len (8192), (1.0 GiB "
        "KV cache is needed, which is larger than the available KV cache memory (0.5 GiB).",
    ],
)
def test_log_reader_sees_a_small_kv_cache_at_run_time_too(line: str) -> None:
    stamp = "" if "Error" in line else "WARNING 01-01 00:00:00 [s.py:1] "
    failure = failed(read(READY, stamp + line))
    assert (failure.cause, failure.stage) == (FailureCause.KV_TOO_SMALL, Stage.READY)


def test_log_reader_does_not_take_the_version_of_nccl() -> None:
    reader = read("NCCL version 2.21.5+cuda12.4", "       █  version 0.32.0")
    assert reader.memory.vllm_version == "0.32.0"


# --- several lives, and how they end ---------------------------------------------------

STOP = ["INFO:     Shutting down", "INFO:     Waiting for application shutdown."]


@pytest.mark.parametrize("code", [None, 0, -15, 143, 130])
@pytest.mark.parametrize("end", [[], STOP])
def test_log_reader_finds_no_failure_in_a_server_that_was_stopped(
    code: int | None, end: list[str]
) -> None:
    reader = read(READY, *end, *(["asyncio.exceptions.CancelledError", f"x\n{OOM}"] if end else []))
    reader.finish()
    assert reader.failure(code) is None


def test_log_reader_does_not_take_the_end_of_a_dead_engine_for_a_stop() -> None:
    dead = "ERROR 01-01 00:00:00 [c.py:1] EngineCore encountered a fatal error."
    assert failed(read(READY, dead, *STOP), 0).cause is FailureCause.CRASH


def test_log_reader_keeps_the_death_of_a_life_before() -> None:
    dead = "ERROR 01-01 00:00:00 [c.py:1] EngineCore encountered a fatal error."
    banner = "INFO 01-01 00:00:00 [a.py:1] vLLM API server version 0.11.0"
    reader = read(banner, READY, dead, "KeyError: 'x'", *STOP, banner, LOADING)
    assert reader.stage is Stage.LOADING
    reader.feed(READY + "\n")
    assert failed(reader, None).cause is FailureCause.CRASH


def test_log_reader_shows_how_an_unknown_start_ended() -> None:
    reader = read(LOADING, "Traceback (most recent call last):", "KeyError: 'layers.7'")
    assert reader.failure() is None
    reader.finish()
    failure = failed(reader, None)
    assert (failure.cause, failure.line) == (FailureCause.UNKNOWN, "KeyError: 'layers.7'")


# --- progress and hangs ----------------------------------------------------------------

BEAT = (
    "(Worker_TP{} pid=1{}) INFO 01-01 00:{:02d}:00 [shm_broadcast.py:501] No available shared "
    "memory broadcast block found in 60 seconds. This typically happens when some processes are "
    "hanging or doing some time-consuming work (e.g. compilation)."
)


def test_log_reader_counts_progress_but_not_heart_beats() -> None:
    reader = read(LOADING)
    assert reader.progress == 1
    for minute in range(10):
        reader.feed(BEAT.format(0, 0, minute) + "\n" + LOADING + "\n")
        reader.feed('INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable\n')
    assert reader.progress == 1
    reader.feed("Loading safetensors checkpoint shards:  25% Completed | 1/4\n")
    assert reader.progress == 2


@pytest.mark.parametrize(
    ("beats", "hangs"),
    [
        ([(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)], True),
        ([(0, 1), (0, 2), (0, 3), (0, 4)], False),
        ([(0, 1), (0, 6)], True),
        ([(rank, 1) for rank in range(8)], False),
    ],
)
def test_log_reader_calls_a_log_that_ends_in_heart_beats_a_hang(
    beats: list[tuple[int, int]], hangs: bool
) -> None:
    reader = read(LOADING, *(BEAT.format(rank, rank, minute) for rank, minute in beats))
    assert reader.failure() is None
    reader.finish()
    failure = reader.failure()
    assert (failure is not None) is hangs
    if failure is not None:
        assert (failure.cause, failure.stage) == (FailureCause.HANG, Stage.LOADING)
        assert "No available shared memory" in failure.line
    reader.feed(LOADED + "\n")
    reader.finish()
    assert reader.failure() is None


def stats(tokens: str, running: int, waiting: int) -> str:
    return (
        f"INFO 01-01 00:00:00 [loggers.py:1] Engine 000: Avg prompt throughput: {tokens} tokens/s, "
        f"Avg generation throughput: {tokens} tokens/s, Running: {running} reqs, Waiting: "
        f"{waiting} reqs, GPU KV cache usage: 0.1%, Prefix cache hit rate: 0.0%"
    )


@pytest.mark.parametrize(
    ("lines", "hangs"),
    [
        ([stats("0.0", 2, 1)] * 6, True),
        ([stats("0.0", 0, 3)] * 6, True),
        ([stats("0.0", 2, 1)] * 5, False),
        ([stats("0.0", 0, 0)] * 20, False),
        ([stats("0.0", 2, 1)] * 6 + [stats("5.0", 2, 1)], False),
        ([stats("5.0", 2, 1)] * 9, False),
    ],
)
def test_log_reader_calls_counters_that_stand_still_a_hang(lines: list[str], hangs: bool) -> None:
    reader = read(READY, *lines)
    reader.finish()
    failure = reader.failure()
    assert (failure is not None and failure.cause is FailureCause.HANG) is hangs


# --- exit codes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "stage", "cause"),
    [
        (2, Stage.LAUNCH, FailureCause.BAD_CONFIG),
        (-9, Stage.LOADING, FailureCause.HOST_OOM),
        (137, Stage.LOADING, FailureCause.HOST_OOM),
        (-6, Stage.LAUNCH, FailureCause.CRASH),
        (139, Stage.READY, FailureCause.CRASH),
        (-15, Stage.READY, FailureCause.UNKNOWN),
        (1, Stage.LAUNCH, FailureCause.UNKNOWN),
        (0, Stage.READY, FailureCause.CRASH),
    ],
)
def test_cause_of_exit(code: int, stage: Stage, cause: FailureCause) -> None:
    assert cause_of_exit(code, stage)[0] is cause


def test_log_reader_without_a_telling_line_goes_by_the_exit_code() -> None:
    reader = read("INFO 01-01 00:00:00 [x.py:1] hello")
    assert reader.failure() is None
    failure = failed(reader, -9)
    assert failure.cause is FailureCause.HOST_OOM
    assert "SIGKILL" in failure.line
