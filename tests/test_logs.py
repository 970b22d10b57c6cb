"""What the log of a server tells: stage, memory facts, and the cause of a failure.

The files under `data/logs/` are whole logs of vLLM 0.32's CPU build; the lines in this file
are quoted from the sources and public reports of vLLM 0.4 to 0.33.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


# --- any input


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_log_reader_never_fails(pieces: list[bytes]) -> None:
    reader = LogReader()
    for piece in pieces:
        reader.feed(piece)
    reader.finish()
    assert reader.failure(1) is not None


@given(st.integers(1, 4000))
def test_log_reader_does_not_mind_where_the_log_is_cut(piece: int) -> None:
    whole, cut = read_file("cpu_0.32_seqs_gt_tokens.log", 10**9), LogReader()
    data = (LOGS / "cpu_0.32_seqs_gt_tokens.log").read_bytes()
    for start in range(0, len(data), piece):
        cut.feed(data[start : start + piece])
    cut.finish()
    assert cut.failure(1) == whole.failure(1)
