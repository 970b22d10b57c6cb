"""Flags -> the values in effect, by vLLM 0.32's defaults and checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.engine.arguments import merge_dotted
from tuner.engine.simulated.config_rules import refusal
from tuner.engine.simulated.effective_values import KV_DTYPES, EffectiveValues, given_or
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.flag_values import BadArgument, FlagValues
from tuner.engine.simulated.profiles import DeviceProfile, ModelProfile
from tuner.engine.simulated.refusals import by_the_parser
from tuner.types import JsonValue


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The values in effect of the flags that the simulated engine honours.

    Attributes:
        model_path: as given to vLLM, for the log.
        max_model_len: the longest context; what the model allows where vLLM is to fit it.
        fit_max_model_len: `max-model-len` was `auto` (-1): `memory.plan_memory` reduces it to
            what the KV cache holds.
        max_num_active_seqs: most running sequences; `max_num_seqs` where the flag is unset.
        kv_cache_memory_bytes: per device; overrides the utilization.
        kv_dtype_bytes: of one KV value.
        kv_scale_bytes: beside each head's vector of keys or values.
        cudagraph_capture_sizes: rising; empty with `enforce_eager` and on CPU.
        estimate_graphs: whether the memory for CUDA graphs is taken off the budget.
        kv_offloading_gib: host tier of the KV cache over all devices; 0 is none.
        watermark: fraction of the blocks that admission keeps free.
        reserve_full_isl: admit a request only if its whole sequence finds room.
        given: the flags as they were set, for vLLM's `non-default args` line.
    """

    device: DeviceProfile
    model: ModelProfile
    model_path: str
    tensor_parallel_size: int
    max_model_len: int
    fit_max_model_len: bool
    max_num_seqs: int
    max_num_active_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    block_size: int
    kv_cache_dtype: str
    kv_dtype_bytes: float
    kv_scale_bytes: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    enforce_eager: bool
    cudagraph_capture_sizes: tuple[int, ...]
    estimate_graphs: bool
    kv_offloading_gib: float
    watermark: float
    reserve_full_isl: bool
    long_prefill_token_threshold: int
    given: Mapping[str, JsonValue] = field(default_factory=dict)


def settings_from(
    args: Mapping[str, JsonValue],
    env: Mapping[str, str],
    model: ModelProfile,
    device: DeviceProfile,
    *,
    model_path: str = "",
) -> EngineSettings | StartFailure:
    """Resolve flags (hyphenated names, JSON values) as vLLM does when it starts.

    Flags that the simulated engine has no use for are accepted and have no effect; whether a
    flag exists at all is for the front that parses the command line. A value that vLLM's
    parser or configuration check refuses gives a `StartFailure` of cause BAD_CONFIG in
    vLLM's words.
    """
    try:
        values = EffectiveValues(FlagValues(merge_dotted(args)), env, model, device)
    except BadArgument as problem:
        return by_the_parser(str(problem))
    return refusal(values) or _settings(values, model_path or model.name, dict(args))


def _settings(
    values: EffectiveValues, model_path: str, given: dict[str, JsonValue]
) -> EngineSettings:
    value_bytes, scale_bytes = KV_DTYPES[values.kv_cache_dtype]
    kv_bytes = values.kv_cache_memory_bytes
    if values.cpu_kv_space:
        kv_bytes = int(values.cpu_kv_space) << 30  # it wins over --kv-cache-memory-bytes
    return EngineSettings(
        device=values.device,
        model=values.model,
        model_path=model_path,
        tensor_parallel_size=values.tensor_parallel_size,
        max_model_len=values.max_model_len,
        fit_max_model_len=values.fit_max_model_len,
        max_num_seqs=values.max_num_seqs,
        max_num_active_seqs=given_or(values.max_num_active_seqs, values.max_num_seqs),
        max_num_batched_tokens=values.max_num_batched_tokens,
        gpu_memory_utilization=values.gpu_memory_utilization,
        kv_cache_memory_bytes=kv_bytes,
        num_gpu_blocks_override=values.num_gpu_blocks_override,
        block_size=values.block_size,
        kv_cache_dtype=values.kv_cache_dtype,
        kv_dtype_bytes=given_or(value_bytes, float(values.model.dtype_bytes)),
        kv_scale_bytes=0 if values.on_cpu else scale_bytes,
        enable_prefix_caching=values.enable_prefix_caching,
        enable_chunked_prefill=values.enable_chunked_prefill,
        enforce_eager=values.enforce_eager,
        cudagraph_capture_sizes=values.cudagraph_capture_sizes,
        estimate_graphs=values.estimate_graphs,
        kv_offloading_gib=values.kv_offloading_gib,
        watermark=values.watermark,
        reserve_full_isl=values.reserve_full_isl,
        long_prefill_token_threshold=values.long_prefill_token_threshold,
        given=given,
    )
