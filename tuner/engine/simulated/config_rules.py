"""The checks of vLLM 0.32's configuration classes on the values in effect."""

from __future__ import annotations

from collections.abc import Iterable

from tuner.engine.simulated.effective_values import EffectiveValues
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.refusals import OutOfBounds, by_bounds, by_value

_AT_LEAST = "greater than or equal to "
_AT_MOST = "less than or equal to "


def refusal(values: EffectiveValues) -> StartFailure | None:
    """The first complaint, in the order in which vLLM makes its configuration classes."""
    for check in (_model, _cache, _parallel, _scheduler, _scheduler_together, _whole):
        complaint = check(values)
        if complaint is not None:
            return complaint
    return None


def _model(values: EffectiveValues) -> StartFailure | None:
    asked, derived = values.max_model_len, float(values.model.max_position_embeddings)
    if asked < 1:
        return by_bounds("ModelConfig", [OutOfBounds("max_model_len", f"{_AT_LEAST}-1", asked)])
    if asked <= derived or values.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
        return None
    return by_value(
        "ModelConfig",
        f"User-specified max_model_len ({asked}) is greater than the derived max_model_len "
        f"(max_position_embeddings={derived} or model_max_length=None in model's config.json). "
        "To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1.",
        {"max_model_len_tokens": asked, "derived_max_model_len_tokens": derived},
    )


def _cache(values: EffectiveValues) -> StartFailure | None:
    size, share = values.block_size, values.gpu_memory_utilization
    return _out_of_bounds(
        "CacheConfig",
        (
            ("block_size", size, size > 0, "greater than 0"),
            ("gpu_memory_utilization", share, share > 0, "greater than 0"),
            ("gpu_memory_utilization", share, share <= 1, f"{_AT_MOST}1"),
        ),
    )


def _parallel(values: EffectiveValues) -> StartFailure | None:
    asked, there = values.tensor_parallel_size, values.device.count
    if asked < 1:
        wrong = OutOfBounds("tensor_parallel_size", f"{_AT_LEAST}1", asked)
        return by_bounds("ParallelConfig", [wrong])
    if asked > there:
        return by_value(
            "ParallelConfig",
            f"World size ({asked}) is larger than the number of available GPUs ({there}) in "
            "this node.",
        )
    return None


def _scheduler(values: EffectiveValues) -> StartFailure | None:
    tokens, seqs = values.max_num_batched_tokens, values.max_num_seqs
    active, long_prefill = values.max_num_active_seqs, values.long_prefill_token_threshold
    share = values.watermark
    return _out_of_bounds(
        "SchedulerConfig",
        (
            ("max_num_batched_tokens", tokens, tokens >= 1, f"{_AT_LEAST}1"),
            ("max_num_seqs", seqs, seqs >= 1, f"{_AT_LEAST}1"),
            ("max_num_active_seqs", active or 0, active is None or active >= 1, f"{_AT_LEAST}1"),
            (
                "long_prefill_token_threshold",
                long_prefill,
                long_prefill >= 0,
                f"{_AT_LEAST}0",
            ),
            ("watermark", share, share >= 0, f"{_AT_LEAST}0"),
            ("watermark", share, share < 1, "less than 1"),
        ),
    )


def _scheduler_together(values: EffectiveValues) -> StartFailure | None:
    """`SchedulerConfig.verify_max_model_len`."""
    tokens, seqs, length = (
        values.max_num_batched_tokens,
        values.max_num_seqs,
        values.max_model_len,
    )
    if tokens < length and not values.enable_chunked_prefill:
        return by_value(
            "SchedulerConfig",
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}). This "
            "effectively limits the maximum sequence length to max_num_batched_tokens and makes "
            "vLLM reject longer sequences. Please increase max_num_batched_tokens or decrease "
            "max_model_len.",
            {"max_num_batched_tokens": tokens, "max_model_len_tokens": length},
        )
    if tokens < seqs:
        return by_value(
            "SchedulerConfig",
            f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs "
            f"({seqs}).",
            {"max_num_batched_tokens": tokens, "max_num_seqs": seqs},
        )
    active, long_prefill = values.max_num_active_seqs, values.long_prefill_token_threshold
    if active is not None and active > seqs:
        return by_value(
            "SchedulerConfig",
            f"max_num_active_seqs ({active}) cannot be greater than max_num_seqs ({seqs}).",
        )
    if long_prefill > length:
        return by_value(
            "SchedulerConfig",
            f"long_prefill_token_threshold ({long_prefill}) cannot be greater than the "
            f"max_model_len ({length}).",
        )
    return None


def _whole(values: EffectiveValues) -> StartFailure | None:
    """`VllmConfig`: what needs more than one of its parts."""
    heads, ranks = values.model.heads, values.tensor_parallel_size
    if heads % ranks != 0:
        return by_value(
            "VllmConfig",
            f"Total number of attention heads ({heads}) must be divisible by tensor parallel "
            f"size ({ranks}).",
        )
    space = values.cpu_kv_space
    if space and not space.strip().lstrip("+-").isdigit():
        return by_value("VllmConfig", f"invalid literal for int() with base 10: '{space}'")
    return None


def _out_of_bounds(
    config: str, bounds: Iterable[tuple[str, float, bool, str]]
) -> StartFailure | None:
    """Of field, value, whether it fits, and what is demanded of it."""
    wrong = [OutOfBounds(name, demand, value) for name, value, fits, demand in bounds if not fits]
    return by_bounds(config, wrong) if wrong else None
