"""The memory of a start, against hand computations, and where it runs out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from simulated_builders import failed_start, plan, settings

from tuner.engine.simulated import memory_needs as needs
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.memory import MemoryPlan, plan_memory
from tuner.engine.simulated.profiles import DEVICES
from tuner.engine.simulated.sizes import said_gib, torch_gib, torch_size
from tuner.types import FailureCause, Stage
from tuner.units import GIB

A10 = DEVICES["a10-24g"]
CPU = DEVICES["cpu"]


def on_a10(**args):
    return settings("a10-24g", "llama-3.1-8b", **({"max_model_len": 4096} | args))


# --- what is needed --------------------------------------------------------------------


def test_activation_is_the_larger_of_forward_pass_and_sampling():
    made = on_a10()
    # 2048 tokens x (2 hidden + 3 intermediate) x 2 bytes, and 256 sequences x vocabulary x 10
    # bytes beside 2048 hidden states.
    assert needs.forward_bytes(made, 2048) == 2048 * (2 * 4096 + 3 * 14_336) * 2
    assert needs.sampler_bytes(made, 256) == 256 * 128_256 * 10
    assert needs.activation_bytes(made) == 256 * 128_256 * 10 + 2048 * 4096 * 2
    wide = on_a10(max_num_batched_tokens=8192)
    assert needs.activation_bytes(wide) == needs.forward_bytes(wide, 8192)


def test_activation_grows_with_batched_tokens_and_with_sequences():
    by_tokens = [needs.activation_bytes(on_a10(max_num_batched_tokens=n)) for n in (4096, 8192)]
    by_seqs = [needs.activation_bytes(on_a10(max_num_seqs=n)) for n in (256, 512)]
    assert by_tokens[0] < by_tokens[1]
    assert by_seqs[0] < by_seqs[1]


def test_graphs_take_no_memory_when_eager():
    assert needs.graph_bytes(on_a10(enforce_eager=True)) == 0
    assert 0.25 * GIB < needs.graph_bytes(on_a10()) < 0.75 * GIB
    assert needs.graph_bytes(on_a10(cudagraph_capture_sizes=[1, 2])) < 0.03 * GIB


def test_tensor_parallelism_divides_weights_and_kv_cache():
    alone = settings("h100-80g", "llama-3.1-8b")
    four = settings("h100-80g", "llama-3.1-8b", tensor_parallel_size=4)
    assert needs.weight_bytes(four) == needs.weight_bytes(alone) // 4
    assert needs.kv_bytes_per_token(four) == needs.kv_bytes_per_token(alone) // 4
    assert plan(four).kv_cache_tokens > 4 * plan(alone).kv_cache_tokens


# --- the KV cache ----------------------------------------------------------------------


def test_kv_cache_is_what_the_budget_leaves():
    made = on_a10()
    planned = plan(made)
    weights = 8_030_261_248 * 2 / GIB
    assert planned.weights_gib == pytest.approx(weights)
    left = 22.5 * 0.92 - weights - 0.1 - planned.activation_gib - planned.graph_estimate_gib
    assert planned.available_kv_gib == pytest.approx(left, abs=1e-6)
    assert planned.num_blocks == int(left * GIB) // (16 * 131_072)


@pytest.mark.parametrize(
    ("size", "blocks", "length", "tokens", "concurrency"),
    [
        ("16M", 128, 512, 4096, 8.0),
        ("64M", 512, 2048, 16_384, 8.0),
        ("4M", 32, 512, 1024, 2.0),
        ("16M", 128, 500, 4000, 8.0),  # whole blocks a request, tokens of its context
    ],
)
def test_kv_cache_in_bytes_as_the_real_cpu_engine_sizes_it(
    size, blocks, length, tokens, concurrency
):
    planned = plan(settings(kv_cache_memory_bytes=size, block_size=32, max_model_len=length))
    assert (planned.num_blocks, planned.kv_cache_tokens) == (blocks, tokens)
    assert planned.max_concurrency == concurrency


def test_fp8_doubles_the_blocks():
    one, other = (
        plan(settings(kv_cache_memory_bytes="16M", block_size=32, max_model_len=512, **more))
        for more in ({}, {"kv_cache_dtype": "fp8"})
    )
    assert other.num_blocks == 2 * one.num_blocks == 256


def test_blocks_override_wins_over_bytes():
    planned = plan(
        settings(
            kv_cache_memory_bytes="16M",
            num_gpu_blocks_override=32,
            block_size=32,
            max_model_len=512,
        )
    )
    assert planned.num_blocks == 32


@pytest.mark.parametrize(
    ("args", "estimate"),
    [
        ({"kv_cache_memory_bytes": "1M", "max_model_len": 2048, "block_size": 32}, 224),
        ({"kv_cache_memory_bytes": "2M", "max_model_len": 512, "block_size": 32}, 480),
        ({"num_gpu_blocks_override": 4, "kv_cache_memory_bytes": "64M"}, 384),
    ],
)
def test_kv_cache_too_small_for_one_request_names_the_longest_that_fits(args, estimate):
    failure = failed_start(settings(**args))
    assert failure.cause is FailureCause.KV_TOO_SMALL
    assert failure.stage is Stage.KV_ALLOCATION
    assert failure.numbers["estimated_max_model_len_tokens"] == estimate


def test_kv_cache_of_the_estimated_length_starts():
    made = on_a10(max_model_len=131_072)
    failure = failed_start(made)
    assert failure.numbers["needed_gib"] == 16.0
    longest = int(failure.numbers["estimated_max_model_len_tokens"])
    assert plan(replace(made, max_model_len=longest)).max_concurrency == pytest.approx(
        1.0, abs=0.01
    )
    assert isinstance(plan_memory(replace(made, max_model_len=longest + 16)), StartFailure)


def test_auto_fit_reduces_the_context_to_that_length():
    longest = failed_start(on_a10(max_model_len=131_072)).numbers["estimated_max_model_len_tokens"]
    planned = plan(on_a10(max_model_len="auto"))
    assert planned.max_model_len == longest
    assert planned.auto_fitted_from == 131_072
    assert plan(settings(max_model_len="auto", kv_cache_memory_bytes="1G")).auto_fitted_from is None


def test_less_than_a_block_is_no_kv_cache():
    failure = failed_start(settings(kv_cache_memory_bytes="64K", block_size=32))
    assert failure.cause is FailureCause.KV_NO_BLOCKS


# --- where a GPU runs out --------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "cause", "stage"),
    [
        ({"gpu_memory_utilization": 0.5}, FailureCause.KV_NO_BLOCKS, Stage.KV_ALLOCATION),
        ({"gpu_memory_utilization": 1.0}, FailureCause.BAD_CONFIG, Stage.LAUNCH),
        ({"max_num_batched_tokens": 131_072}, FailureCause.OOM_PROFILE, Stage.PROFILING),
        (
            {"max_num_seqs": 8192, "max_num_batched_tokens": 8192},
            FailureCause.OOM_WARMUP,
            Stage.PROFILING,
        ),
        ({"kv_cache_memory_bytes": "8G"}, FailureCause.OOM_KV_ALLOC, Stage.KV_ALLOCATION),
        (
            {"kv_cache_memory_bytes": 7_200_000_000},
            FailureCause.OOM_GRAPH_CAPTURE,
            Stage.GRAPH_CAPTURE,
        ),
        ({"gpu_memory_utilization": 0.98}, FailureCause.OOM_WARMUP, Stage.WARMUP),
        (
            {"kv_cache_memory_bytes": 7_200_000_000, "enforce_eager": True},
            FailureCause.OOM_WARMUP,
            Stage.KV_ALLOCATION,
        ),
        ({"block_size": 8}, FailureCause.BAD_CONFIG, Stage.KV_ALLOCATION),
        ({"kv_offloading_size": 512}, FailureCause.HOST_OOM, Stage.KV_ALLOCATION),
    ],
)
def test_start_on_a_gpu_fails_where_memory_ends(args, cause, stage):
    failure = failed_start(on_a10(**args))
    assert (failure.cause, failure.stage) == (cause, stage)
    assert failure.settings is not None
    assert failure.plan is not None


def test_weights_beyond_the_device_fail_while_loading():
    failure = failed_start(settings("h100-80g", "llama-3.1-70b"))
    assert (failure.cause, failure.stage) == (FailureCause.OOM_LOAD, Stage.LOADING)
    assert failure.numbers["total_gib"] == 79.15
    assert failure.numbers["free_gib"] < failure.numbers["tried_to_allocate_gib"]


def test_busy_device_is_the_environments_failure():
    busy = replace(A10, free_gib=12.0)
    failure = failed_start(settings(busy, "qwen2.5-1.5b"))
    assert failure.cause is FailureCause.DEVICE_BUSY
    assert failure.numbers == {
        "free_gib": 11.55,
        "total_gib": 22.5,
        "utilization": 0.92,
        "wanted_gib": 20.7,
    }


def test_graphs_take_what_the_estimate_missed_from_outside_the_budget():
    planned = plan(on_a10())
    context = 0.45
    used = planned.weights_gib + 0.1 + planned.graph_gib
    used += planned.num_blocks * 16 * 131_072 / GIB
    assert planned.graph_gib > planned.graph_estimate_gib > 0
    assert planned.headroom_gib == pytest.approx(22.5 - context - used, abs=1e-6)


def test_graph_estimate_can_be_switched_off():
    env = {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}
    without = settings("a10-24g", "llama-3.1-8b", env=env, max_model_len=4096)
    gained = plan(without).available_kv_gib - plan(on_a10()).available_kv_gib
    assert gained == pytest.approx(plan(on_a10()).graph_estimate_gib)


def test_host_tier_holds_its_gib_of_blocks():
    four = settings("h100-80g", "llama-3.1-8b", tensor_parallel_size=4, kv_offloading_size=16)
    assert plan(four).host_blocks == 16 * GIB // (16 * 131_072)


# --- a CPU -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "cause", "stage", "wanted"),
    [
        ({}, FailureCause.HOST_OOM, Stage.LAUNCH, 9.75),
        ({"kv_cache_memory_bytes": "400G"}, FailureCause.HOST_OOM, Stage.PROFILING, 400.0),
        ({"gpu_memory_utilization": 0.02}, FailureCause.KV_NO_BLOCKS, Stage.PROFILING, -0.46),
    ],
)
def test_start_on_a_cpu_fails_where_memory_ends(args, cause, stage, wanted):
    failure = failed_start(settings(**args))
    assert (failure.cause, failure.stage) == (cause, stage)
    assert failure.numbers["wanted_gib"] == wanted


def test_cpu_utilization_leaves_what_the_worker_does_not_take():
    planned = plan(settings(gpu_memory_utilization=0.5))
    weights = 35_660_800 * 2 / GIB
    assert planned.available_kv_gib == pytest.approx(10.6 * 0.5 - 0.61 - weights, abs=1e-6)


@pytest.mark.parametrize(
    ("args", "cause", "words"),
    [
        ({"block_size": 16}, FailureCause.BAD_CONFIG, "No common block size for 16 (CPU_ATTN"),
        ({"kv_offloading_size": 1}, FailureCause.UNSUPPORTED, "CPU Offloading is currently only"),
    ],
)
def test_cpu_worker_refuses_what_it_cannot_do(args, cause, words):
    failure = failed_start(settings(kv_cache_memory_bytes="64M", **args))
    assert failure.cause is cause
    assert words in failure.message


# --- laws ------------------------------------------------------------------------------

STARTS = st.fixed_dictionaries(
    {
        "gpu_memory_utilization": st.floats(0.3, 0.97),
        "max_num_seqs": st.integers(1, 1024),
        "max_num_batched_tokens": st.integers(1024, 32_768),
        "max_model_len": st.sampled_from([1024, 4096, 32_768]),
        "enforce_eager": st.booleans(),
        "kv_cache_dtype": st.sampled_from(["auto", "fp8"]),
    }
)


@given(STARTS)
@hypothesis_settings(deadline=None)
def test_memory_of_a_start_never_exceeds_the_device(args):
    made = settings("a10-24g", "llama-3.1-8b", **args)
    planned = plan_memory(made)
    if isinstance(planned, MemoryPlan):
        kv_gib = planned.num_blocks * 16 * needs.kv_bytes_per_token(made) / GIB
        used = planned.weights_gib + planned.non_torch_gib + kv_gib + planned.graph_gib
        assert used + planned.headroom_gib == pytest.approx(22.5 - 0.45, abs=1e-6)
        assert planned.headroom_gib >= 0
        assert kv_gib <= planned.available_kv_gib
        assert planned.max_concurrency >= 1


@given(STARTS, st.floats(0.001, 0.2))
@hypothesis_settings(deadline=None)
def test_more_utilization_never_means_less_kv_cache(args, more):
    low = plan_memory(settings("h100-80g", "llama-3.1-8b", **args))
    args = args | {"gpu_memory_utilization": min(0.98, args["gpu_memory_utilization"] + more)}
    high = plan_memory(settings("h100-80g", "llama-3.1-8b", **args))
    if isinstance(low, MemoryPlan):
        assert isinstance(high, MemoryPlan)
        assert high.num_blocks >= low.num_blocks


@given(st.floats(0, 300 * GIB))
def test_torch_sizes_are_read_back_as_they_are_said(size_bytes):
    said = torch_gib(size_bytes)
    assert torch_size(said) == torch_size(size_bytes / GIB)
    assert said == pytest.approx(size_bytes / GIB, rel=0.01, abs=2**-27)


def test_said_gib_has_two_digits():
    assert said_gib(math.pi * GIB) == 3.14
