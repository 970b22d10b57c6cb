"""Step times against hand computations of the roofline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from simulated_builders import settings

from tuner.engine.simulated.profiles import DEVICES, MODELS
from tuner.engine.simulated.scheduler import Batch
from tuner.engine.simulated.step_time import StepTimes

BARE = replace(
    DEVICES["h100-80g"],
    bandwidth_gb_per_s=1000.0,
    flops_per_s=1e14,
    step_overhead_s=0.0,
    sequence_overhead_s=0.0,
    launch_overhead_s=0.0,
)
LLAMA = MODELS["llama-3.1-8b"]
HEAD = 128_256 * 4096
LAYERS = LLAMA.matrix_parameters - HEAD
KV_BYTES = 131_072
PAIR_FLOPS = 4 * 32 * 32 * 128


def times(device=BARE, **args):
    return StepTimes(settings(device, "llama-3.1-8b", **args))


def prefill(tokens, before=0):
    batch = Batch()
    batch.requests = [None]
    batch.prefill_tokens = tokens
    batch.prefill_context = before + tokens
    batch.prefill_pairs = tokens * before + tokens * (tokens + 1) // 2
    return batch


def test_small_decode_reads_weights_and_kv_cache():
    (step_s,) = times().of_decodes(1, 1000, 1)
    weights_s = LLAMA.matrix_parameters * 2 / 1e12
    assert step_s == pytest.approx(weights_s + 1000 * KV_BYTES / 1e12)


def test_large_prefill_multiplies_matrices_and_attends():
    step_s = times().of(prefill(8192))
    matrices_s = (2 * LAYERS * 8192 + 2 * HEAD) / 1e14
    attention_s = PAIR_FLOPS * (8192 * 8193 // 2) / 1e14
    assert step_s == pytest.approx(matrices_s + attention_s)


def test_chunk_attends_to_what_was_computed_before():
    alone, after = times().of(prefill(1024)), times().of(prefill(1024, before=4096))
    assert after - alone == pytest.approx(PAIR_FLOPS * 1024 * 4096 / 1e14)


def test_overheads_add_to_every_step():
    device = replace(BARE, step_overhead_s=0.01, sequence_overhead_s=0.001)
    (bare_s,) = times().of_decodes(8, 100, 1)
    (step_s,) = times(device).of_decodes(8, 100, 1)
    assert step_s - bare_s == pytest.approx(0.01 + 8 * 0.001)


def test_eager_steps_wait_for_the_host():
    device = replace(BARE, launch_overhead_s=1e-3)
    (graph_s,) = times(device).of_decodes(1, 10, 1)
    (eager_s,) = times(device, enforce_eager=True).of_decodes(1, 10, 1)
    assert eager_s == pytest.approx(32e-3)
    assert graph_s < eager_s


def test_blocks_from_the_host_come_over_the_link_meanwhile():
    batch = prefill(16)
    without_s = times().of(batch)
    batch.link_blocks = 100
    link_s = 100 * 16 * KV_BYTES / (DEVICES["h100-80g"].host_link_gb_per_s * 1e9)
    assert times().of(batch) == pytest.approx(max(without_s, link_s))
    batch.link_blocks = 100_000
    assert times().of(batch) == pytest.approx(1000 * link_s)


def test_tensor_parallelism_divides_the_work_and_pays_for_all_reduce():
    (one_s,) = times().of_decodes(1, 1000, 1)
    (four_s,) = times(tensor_parallel_size=4).of_decodes(1, 1000, 1)
    assert one_s / 4 < four_s < one_s
    reduce_s = 64 * 12e-6 + 64 * 4096 * 2 * 1.5 / (DEVICES["h100-80g"].peer_link_gb_per_s * 1e9)
    assert four_s == pytest.approx(one_s / 4 + reduce_s)


@given(st.integers(1, 256), st.integers(1, 100_000), st.integers(1, 50))
@hypothesis_settings(deadline=None)
def test_several_decodes_take_as_long_as_each_alone(requests, context, steps):
    together = times().of_decodes(requests, context, steps)
    alone = [times().of_decodes(requests, context + step * requests, 1)[0] for step in range(steps)]
    assert together == alone


@given(
    st.floats(1.01, 10.0),
    st.sampled_from(["bandwidth_gb_per_s", "flops_per_s"]),
    st.integers(1, 8192),
)
@hypothesis_settings(deadline=None)
def test_a_faster_device_is_never_slower(factor, field, tokens):
    faster = replace(BARE, **{field: getattr(BARE, field) * factor})
    assert times(faster).of(prefill(tokens)) <= times().of(prefill(tokens))
    assert times(faster).of_decodes(4, tokens, 1)[0] <= times().of_decodes(4, tokens, 1)[0]
