"""What to change after a failure: the direction, the numbers, and nothing that is so already."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engine.advice import advice
from tuner.types import EngineConfig, Failure, FailureCause, MemoryFacts, Stage

OUT_OF_DEVICE_MEMORY = [
    FailureCause.OOM_PROFILE,
    FailureCause.OOM_KV_ALLOC,
    FailureCause.OOM_WARMUP,
    FailureCause.OOM_GRAPH_CAPTURE,
    FailureCause.OOM_RUNTIME,
]
TOO_SMALL = [FailureCause.KV_NO_BLOCKS, FailureCause.KV_TOO_SMALL, FailureCause.STATE_BLOCKS]


def advised(cause, line="", *, stage=Stage.LAUNCH, config=None, version=None, **numbers):
    facts = MemoryFacts(vllm_version=version)
    settings = None if config is None else EngineConfig(config)
    return advice(Failure(cause, stage, line, numbers, memory=facts), settings)


def has(steps, *words):
    """Whether one step holds all the words."""
    return any(all(word in step for word in words) for step in steps)


# --- the table -------------------------------------------------------------------------


@pytest.mark.parametrize("cause", [c for c in FailureCause if c is not FailureCause.NONE])
@pytest.mark.parametrize("stage", Stage)
def test_every_cause_has_advice_at_every_stage(cause, stage):
    steps = advised(cause, stage=stage)
    assert steps
    assert len(set(steps)) == len(steps)


def test_no_failure_has_no_advice():
    assert advised(FailureCause.NONE) == ()


@pytest.mark.parametrize("cause", OUT_OF_DEVICE_MEMORY)
def test_out_of_memory_wants_less_of_the_device(cause):
    steps = advised(cause, config={"gpu-memory-utilization": 0.9})
    assert has(steps, "lower gpu-memory-utilization from 0.9 to 0.85")
    assert not has(steps, "raise gpu-memory-utilization")


@pytest.mark.parametrize("cause", TOO_SMALL)
def test_too_small_a_cache_wants_more_of_the_device(cause):
    steps = advised(cause, config={"gpu-memory-utilization": 0.9})
    assert has(steps, "raise gpu-memory-utilization from 0.9, to 0.95 at most")
    assert not has(steps, "lower gpu-memory-utilization")


def test_weights_that_do_not_fit_want_neither():
    steps = advised(FailureCause.OOM_LOAD, total_gib=23.57, tried_to_allocate_gib=0.23)
    assert not has(steps, "lower gpu-memory-utilization")
    assert not has(steps, "raise gpu-memory-utilization")
    assert steps[0].startswith("raise tensor-parallel-size")
    assert "23.57 GiB" in steps[0]
    assert has(steps, "quantized")
    assert has(steps, "cpu-offload-gb")


# --- numbers ---------------------------------------------------------------------------


def test_kv_too_small_names_the_length_that_fits():
    steps = advised(
        FailureCause.KV_TOO_SMALL,
        max_model_len_tokens=262144.0,
        needed_gib=24.0,
        available_gib=3.18,
        estimated_max_model_len_tokens=34736.0,
    )
    assert steps[0] == "set max-model-len to at most 34736: that is what fits now"


def test_kv_too_small_computes_the_length_where_vllm_does_not_say_it():
    steps = advised(
        FailureCause.KV_TOO_SMALL, max_model_len_tokens=32768, needed_gib=0.95, available_gib=0.93
    )
    assert "max-model-len to about 32064" in steps[0]  # 32768 * 0.93 / 0.95, down to 16


def test_kv_too_small_says_that_offload_is_no_help():
    steps = advised(FailureCause.KV_TOO_SMALL, config={"kv-offloading-size": 64})
    assert has(steps, "kv-offloading-size does not help")


def test_state_blocks_names_the_exact_number():
    steps = advised(FailureCause.STATE_BLOCKS, max_num_seqs=1024, available_blocks=614)
    assert steps[0].startswith("set max-num-seqs to at most 614")


def test_warm_up_halves_the_requests_that_it_ran():
    steps = advised(FailureCause.OOM_WARMUP, requests=1024)
    assert steps[0].startswith("set max-num-seqs to at most 512")


def test_graph_capture_steps_down_by_what_was_missing():
    steps = advised(
        FailureCause.OOM_GRAPH_CAPTURE,
        config={"gpu-memory-utilization": 0.98},
        tried_to_allocate_gib=0.016,
        free_gib=0.0,
        total_gib=24.0,
    )
    assert steps[0].startswith("lower gpu-memory-utilization from 0.98 to 0.96")


def test_desktop_names_the_share_that_is_free():
    steps = advised(FailureCause.DEVICE_BUSY, free_gib=3.22, total_gib=4.0, utilization=0.9)
    assert has(steps, "who holds 0.8 GiB")
    assert has(steps, "at most 0.80")


def test_host_memory_counts_what_offloading_really_takes():
    steps = advised(FailureCause.HOST_OOM, config={"kv-offloading-size": 400})
    assert has(steps, "lower kv-offloading-size from 400", "768 GiB")
    assert not has(steps, "cpu-offload-gb")


def test_cpu_build_names_the_share_of_host_memory_that_is_free():
    steps = advised(FailureCause.HOST_OOM, utilization=0.999, available_gib=9.25, total_gib=10.59)
    assert "at most 0.87" in steps[0]


@pytest.mark.parametrize(("version", "has_it"), [("0.17.1", True), ("0.18.0", False), (None, True)])
def test_host_memory_names_swap_space_where_it_exists(version, has_it):
    assert has(advised(FailureCause.HOST_OOM, version=version), "swap-space") is has_it


@pytest.mark.parametrize(
    ("version", "flag"),
    [("0.11.0", "cudagraph_capture_sizes"), ("0.13.0", "max-cudagraph-capture-size")],
)
def test_graph_sizes_are_named_as_the_version_does(version, flag):
    assert has(advised(FailureCause.OOM_GRAPH_CAPTURE, version=version), flag)


# --- what is so already ----------------------------------------------------------------


@pytest.mark.parametrize("cause", OUT_OF_DEVICE_MEMORY + TOO_SMALL)
def test_eager_server_is_not_told_to_be_eager(cause):
    steps = advised(cause, config={"enforce-eager": True})
    assert not has(steps, "enforce-eager")
    assert not has(steps, "capture-size")


@pytest.mark.parametrize("cause", TOO_SMALL)
def test_utilization_is_not_raised_beyond_what_is_safe(cause):
    assert not has(advised(cause, config={"gpu-memory-utilization": 0.95}), "gpu-memory-util")


@pytest.mark.parametrize("cause", OUT_OF_DEVICE_MEMORY)
def test_utilization_is_not_lowered_where_it_is_low(cause):
    assert not has(advised(cause, config={"gpu-memory-utilization": 0.5}), "gpu-memory-util")


def test_fixed_cache_size_is_the_lever_where_it_is_set():
    config = {"kv-cache-memory-bytes": 1048576, "gpu-memory-utilization": 0.8}
    more = advised(FailureCause.KV_TOO_SMALL, config=config)
    less = advised(FailureCause.OOM_RUNTIME, config=config)
    assert has(more, "raise kv-cache-memory-bytes above 1048576")
    assert has(less, "lower kv-cache-memory-bytes below 1048576")
    assert not has((*more, *less), "gpu-memory-utilization from")


def test_fp8_cache_is_not_advised_twice():
    assert not has(advised(FailureCause.KV_TOO_SMALL, config={"kv-cache-dtype": "fp8_e5m2"}), "fp8")


def test_known_values_are_halved():
    steps = advised(
        FailureCause.OOM_RUNTIME, config={"max-num-seqs": 256, "max-num-batched-tokens": 8192}
    )
    assert has(steps, "lower max-num-seqs from 256 to 128")
    assert has(steps, "lower max-num-batched-tokens from 8192 to 4096")


def test_one_device_needs_no_word_of_nccl():
    assert has(advised(FailureCause.HANG, config={"tensor-parallel-size": 2}), "NCCL_P2P_DISABLE=1")
    assert not has(advised(FailureCause.HANG, config={"max-num-seqs": 8}), "NCCL_P2P_DISABLE=1")


# --- the machine, the model, what vLLM refuses -----------------------------------------


@pytest.mark.parametrize(
    ("cause", "line", "words"),
    [
        (
            FailureCause.MODEL_NOT_FOUND,
            "Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/mnt/llama'.",
            ("/mnt/llama", "mounted"),
        ),
        (
            FailureCause.MODEL_NOT_FOUND,
            "LocalEntryNotFoundError: Cannot find the requested files in the disk cache",
            ("hub can be reached",),
        ),
        (
            FailureCause.MODEL_NOT_FOUND,
            "ValueError: Invalid repository ID or local directory specified: 'org/modle'.",
            ("org/modle", "spelled"),
        ),
        (FailureCause.MODEL_ACCESS, "403 Client Error", ("fine-grained",)),
        (
            FailureCause.BAD_CONFIG,
            "vllm: error: unrecognized arguments: --disable_log_requests --swap-space=4",
            ("remove --disable-log-requests", "--no-enable-log-requests"),
        ),
        (
            FailureCause.BAD_CONFIG,
            "vllm: error: argument --max-num-seqs: invalid int value: 'x'",
            ("mend the value of --max-num-seqs",),
        ),
        (
            FailureCause.BAD_CONFIG,
            "VLLM_PORT 'tcp://10.43.1.39:8000' appears to be a URI.",
            ("Service", "enableServiceLinks: false"),
        ),
        (
            FailureCause.UNSUPPORTED,
            "fp8_e5m2 kv-cache is not supported with fp8 checkpoints.",
            ("kv-cache-dtype to fp8 or fp8_e4m3",),
        ),
        (
            FailureCause.DISK_FULL,
            "OSError: [Errno 28] No space left on device: '/root/.cache/x'",
            ("df -h /root/.cache/x",),
        ),
        (FailureCause.DISK_FULL, "Insufficient space in /dev/shm", ("--shm-size",)),
        (FailureCause.DEVICE_BUSY, "RuntimeError: No CUDA GPUs are available", ("--gpus all",)),
        (FailureCause.NCCL, "ncclSystemError", ("--shm-size",)),
        (FailureCause.CRASH, "CUDA error: an illegal memory access", ("PIECEWISE",)),
        (FailureCause.COMPILE_CACHE, "", ("VLLM_CACHE_ROOT",)),
        (FailureCause.PORT_IN_USE, "", ("VLLM_PORT",)),
        (FailureCause.STARTUP_TIMEOUT, "", ("startup_timeout",)),
    ],
)
def test_line_decides_what_is_advised(cause, line, words):
    assert has(advised(cause, line), *words)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"max_num_batched_tokens": 32, "max_num_seqs": 64}, "at least 64"),
        ({"max_num_batched_tokens": 8192, "max_model_len_tokens": 9216}, "at least 9216"),
        ({"derived_max_model_len_tokens": 40960.0}, "at most 40960"),
        ({"free_gib": 79.0, "total_gib": 80.0, "utilization": 0.99}, "at most 0.98"),
    ],
)
def test_refused_configuration_is_told_the_limit(numbers, words):
    assert has(advised(FailureCause.BAD_CONFIG, **numbers), words)


def test_server_that_was_stopped_from_outside_is_told_so():
    failure = Failure(FailureCause.UNKNOWN, Stage.LOADING, "ended by SIGTERM", exit_code=143)
    assert "told to stop" in advice(failure)[0]


NUMBER_NAMES = [
    "needed_gib",
    "available_gib",
    "total_gib",
    "free_gib",
    "utilization",
    "wanted_gib",
    "requests",
    "max_num_seqs",
    "available_blocks",
    "max_model_len_tokens",
    "estimated_max_model_len_tokens",
    "initial_free_gib",
    "current_free_gib",
    "tried_to_allocate_gib",
    "max_num_batched_tokens",
    "derived_max_model_len_tokens",
]
FLAGS = [
    "gpu-memory-utilization",
    "max-num-seqs",
    "max-num-batched-tokens",
    "kv-cache-dtype",
    "enforce-eager",
    "kv-cache-memory-bytes",
    "kv-offloading-size",
    "cpu-offload-gb",
    "tensor-parallel-size",
    "quantization",
]
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)


@given(
    cause=st.sampled_from([c for c in FailureCause if c is not FailureCause.NONE]),
    stage=st.sampled_from(Stage),
    line=st.text(max_size=80),
    numbers=st.dictionaries(st.sampled_from(NUMBER_NAMES), st.floats()),
    args=st.dictionaries(st.sampled_from(FLAGS), VALUES),
    version=st.none() | st.text(max_size=12),
)
def test_advice_never_raises(cause, stage, line, numbers, args, version):
    failure = Failure(cause, stage, line, numbers, memory=MemoryFacts(vllm_version=version))
    assert advice(failure, EngineConfig(args))
