"""Flags -> values in effect, and what vLLM's parser and configuration check refuse."""

from __future__ import annotations

import pytest
from simulated_builders import refused, settings

from tuner.types import FailureCause, Stage


@pytest.mark.parametrize(
    ("device", "args", "seqs", "tokens"),
    [
        ("a10-24g", {}, 256, 2048),
        ("h100-80g", {}, 1024, 8192),
        ("h200-141g", {}, 1024, 8192),
        ("cpu", {}, 128, 2048),
        ("h100-80g", {"performance_mode": "throughput"}, 2048, 16384),
        ("h100-80g", {"max_num_batched_tokens": 512}, 512, 512),
        ("h100-80g", {"max_num_seqs": 4, "max_model_len": 1000}, 4, 4000),
        ("h100-80g", {"max_model_len": 16384, "no_enable_chunked_prefill": True}, 1024, 16384),
    ],
)
def test_settings_default_batch_follows_the_device(device, args, seqs, tokens):
    made = settings(device, "llama-3.1-8b" if device != "cpu" else "tiny", **args)
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (seqs, tokens)
    assert made.max_num_active_seqs == seqs


def test_settings_defaults_of_a_gpu():
    made = settings("h100-80g", "llama-3.1-8b")
    assert made.gpu_memory_utilization == 0.92
    assert made.block_size == 16
    assert made.max_model_len == 131_072
    assert made.enable_prefix_caching
    assert made.enable_chunked_prefill
    assert made.reserve_full_isl
    assert made.kv_dtype_bytes == 2
    assert made.kv_cache_memory_bytes is None


def test_settings_defaults_of_a_cpu():
    made = settings()
    assert made.block_size == 128
    assert made.cudagraph_capture_sizes == ()


@pytest.mark.parametrize(
    ("written", "value"),
    [(1000, 1000), ("1000", 1000), ("64M", 2**26), ("64m", 64_000_000), ("1.5k", 1500)],
)
def test_settings_reads_sizes_as_vllm_does(written, value):
    assert settings(kv_cache_memory_bytes=written).kv_cache_memory_bytes == value


@pytest.mark.parametrize("written", [-1, "-1", "auto", "AUTO"])
def test_settings_fits_the_context_on_demand(written):
    made = settings(max_model_len=written)
    assert (made.fit_max_model_len, made.max_model_len) == (True, 8192)


def test_settings_takes_either_spelling_and_switches():
    made = settings(**{"enable-prefix-caching": False, "no_enable_chunked_prefill": True})
    assert (made.enable_prefix_caching, made.enable_chunked_prefill) == (False, False)


def test_settings_kv_space_of_the_environment_wins_on_cpu():
    made = settings(env={"VLLM_CPU_KVCACHE_SPACE": "2"}, kv_cache_memory_bytes="64M")
    assert made.kv_cache_memory_bytes == 2 * 2**30
    gpu = settings("a10-24g", "qwen2.5-1.5b", env={"VLLM_CPU_KVCACHE_SPACE": "2"})
    assert gpu.kv_cache_memory_bytes is None


# --- CUDA graphs -----------------------------------------------------------------------


def sizes(**args):
    return settings("h100-80g", "llama-3.1-8b", **args).cudagraph_capture_sizes


def test_capture_sizes_of_the_defaults():
    expected = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert sizes() == tuple(expected)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"enforce_eager": True}, ()),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, ()),
        ({"max_num_seqs": 3}, (1, 2, 3, 4)),
        ({"max_num_seqs": 12}, (1, 2, 4, 8, 12, 16, 24)),
        ({"max_cudagraph_capture_size": 8}, (1, 2, 4, 8)),
        ({"cudagraph_capture_sizes": [4, 1]}, (1, 4)),
        ({"compilation_config": '{"cudagraph_capture_sizes": [2, 16]}'}, (2, 16)),
        ({"compilation-config.cudagraph_capture_sizes": [2, 16]}, (2, 16)),
    ],
)
def test_capture_sizes_follow_the_flags(args, expected):
    assert sizes(**args) == expected


# --- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            {"max_num_seqs": "abc"},
            "vllm serve: error: argument --max-num-seqs: invalid int value: 'abc'",
        ),
        (
            {"max_num_batched_tokens": "64Mi"},
            "argument --max-num-batched-tokens: invalid human_readable_int value: '64Mi'",
        ),
        ({"kv_cache_dtype": "foo"}, "argument --kv-cache-dtype: invalid choice: 'foo'"),
        ({"gpu_memory_utilization": "much"}, "invalid float value: 'much'"),
        ({"max_num_seqs": True}, "invalid int value"),
        ({"kv_cache_memory_bytes": "1.5K"}, "invalid human_readable_int value"),
        ({"compilation_config": "{"}, "cannot be converted"),
    ],
)
def test_parser_refuses_with_exit_code_2(args, line):
    failure = refused(**args)
    assert (failure.cause, failure.stage, failure.exit_code) == (
        FailureCause.BAD_CONFIG,
        Stage.LAUNCH,
        2,
    )
    assert line in failure.message


@pytest.mark.parametrize(
    ("args", "words", "numbers"),
    [
        (
            {"max_num_batched_tokens": 32, "max_num_seqs": 64},
            "max_num_batched_tokens (32) must be greater than or equal to max_num_seqs (64).",
            {"max_num_batched_tokens": 32, "max_num_seqs": 64},
        ),
        (
            {
                "max_num_batched_tokens": 512,
                "max_model_len": 2048,
                "enable_chunked_prefill": False,
            },
            "max_num_batched_tokens (512) is smaller than max_model_len (2048).",
            {"max_num_batched_tokens": 512, "max_model_len_tokens": 2048},
        ),
        (
            {"max_model_len": 99999},
            "User-specified max_model_len (99999) is greater than the derived max_model_len "
            "(max_position_embeddings=8192.0 or",
            {"max_model_len_tokens": 99999, "derived_max_model_len_tokens": 8192},
        ),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization\n  Input should be less", {}),
        ({"gpu_memory_utilization": 0}, "Input should be greater than 0", {}),
        ({"block_size": 0}, "Input should be greater than 0 [type=greater_than, ", {}),
        ({"max_num_seqs": -1}, "2 validation errors for SchedulerConfig", {}),
        ({"watermark": 1.0}, "Input should be less than 1", {}),
        ({"max_num_active_seqs": 64, "max_num_seqs": 8}, "cannot be greater than max_num_seqs", {}),
        ({"long_prefill_token_threshold": 9000}, "cannot be greater than the max_model_len", {}),
        ({"tensor_parallel_size": 2}, "larger than the number of available GPUs (1)", {}),
        ({"tensor_parallel_size": 0}, "1 validation error for ParallelConfig", {}),
        ({"max_model_len": 0}, "1 validation error for ModelConfig", {}),
    ],
)
def test_configuration_check_refuses_in_vllms_words(args, words, numbers):
    failure = refused(**args)
    assert (failure.cause, failure.exit_code) == (FailureCause.BAD_CONFIG, 1)
    assert "validation error" in failure.message
    assert words in failure.message
    assert failure.numbers == numbers


def test_configuration_check_wants_heads_divisible_by_ranks():
    failure = refused("h100-80g", "llama-3.1-8b", tensor_parallel_size=3)
    assert "attention heads (32) must be divisible by tensor parallel size (3)" in failure.message


def test_longer_context_is_taken_where_the_environment_allows_it():
    made = settings(env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}, max_model_len=20_000)
    assert made.max_model_len == 20_000


def test_bad_kv_space_of_the_environment_is_refused():
    failure = refused(env={"VLLM_CPU_KVCACHE_SPACE": "0.5"})
    assert "invalid literal for int() with base 10: '0.5'" in failure.message
