"""The flags of one start with vLLM 0.32's defaults where they are not set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tuner.engine.simulated.flag_values import FlagValues
from tuner.engine.simulated.profiles import DeviceProfile, ModelProfile, Platform
from tuner.types import JsonValue

DEFAULT_UTILIZATION = 0.92
"""`CacheConfig.gpu_memory_utilization` since vLLM 0.21."""

GRAPH_CEILING = 512
"""Largest batch that is captured by default (1024 on Blackwell)."""

KV_DTYPES: dict[str, tuple[float | None, int]] = {
    "auto": (None, 0),
    "float16": (2.0, 0),
    "bfloat16": (2.0, 0),
    "fp8": (1.0, 0),
    "fp8_e4m3": (1.0, 0),
    "fp8_e5m2": (1.0, 0),
    "fp8_per_token_head": (1.0, 4),
    "int8_per_token_head": (1.0, 4),
    "int4_per_token_head": (0.5, 4),
    "nvfp4": (0.5625, 0),  # four bits, and one scale of eight for each sixteen values
}
"""Bytes of a KV value (None: as wide as the model's), and of the float32 scale that Triton's
attention keeps beside each head's vector."""

_PERFORMANCE_MODES = ("balanced", "interactivity", "throughput")

_T = TypeVar("_T")


def given_or(value: _T | None, default: _T) -> _T:
    """`default` where a flag is not set."""
    return default if value is None else value


class EffectiveValues:
    """Reads every flag once, in the order in which vLLM resolves them; checks nothing.

    Attributes are named and documented in `settings.EngineSettings`.

    Raises:
        BadArgument: the argument parser refuses a value.
    """

    def __init__(
        self,
        flags: FlagValues,
        env: Mapping[str, str],
        model: ModelProfile,
        device: DeviceProfile,
    ) -> None:
        self.env, self.model, self.device = env, model, device
        self.on_cpu = device.platform is Platform.CPU
        self.tensor_parallel_size = given_or(flags.whole("tensor-parallel-size"), 1)
        asked = flags.length("max-model-len")
        self.fit_max_model_len = asked == -1
        self.max_model_len = (
            model.max_position_embeddings if asked is None or asked == -1 else asked
        )
        self.enable_chunked_prefill = flags.switch("enable-chunked-prefill", True)
        self.enable_prefix_caching = flags.switch("enable-prefix-caching", True)
        self.max_num_seqs, self.max_num_batched_tokens = self._batch(flags)
        self.max_num_active_seqs = flags.whole("max-num-active-seqs")
        self.long_prefill_token_threshold = given_or(flags.whole("long-prefill-token-threshold"), 0)
        self.watermark = given_or(flags.real("watermark"), 0.0)
        self.reserve_full_isl = flags.switch("scheduler-reserve-full-isl", True)
        self.gpu_memory_utilization = given_or(
            flags.real("gpu-memory-utilization"),
            given_or(flags.real("device-memory-utilization"), DEFAULT_UTILIZATION),
        )
        self.block_size = given_or(flags.whole("block-size"), 128 if self.on_cpu else 16)
        self.kv_cache_memory_bytes = flags.sized("kv-cache-memory-bytes")
        self.num_gpu_blocks_override = flags.whole("num-gpu-blocks-override")
        self.kv_cache_dtype = flags.choice("kv-cache-dtype", tuple(KV_DTYPES), "auto")
        self.kv_offloading_gib = given_or(flags.real("kv-offloading-size"), 0.0)
        self.enforce_eager = flags.switch("enforce-eager", False)
        self.cudagraph_capture_sizes = self._capture_sizes(flags)
        self.estimate_graphs = env.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "1") != "0"
        self.cpu_kv_space = env.get("VLLM_CPU_KVCACHE_SPACE", "") if self.on_cpu else ""

    def _batch(self, flags: FlagValues) -> tuple[int, int]:
        """`max-num-seqs` and `max-num-batched-tokens`, by the device's memory if unset."""
        given_seqs = flags.whole("max-num-seqs")
        given_tokens = flags.sized("max-num-batched-tokens")
        seqs, tokens = self._batch_defaults()
        if flags.choice("performance-mode", _PERFORMANCE_MODES, "balanced") == "throughput":
            seqs, tokens = 2 * seqs, 2 * tokens
        seqs = given_or(given_seqs, seqs)
        if given_tokens is None:
            if not self.enable_chunked_prefill:
                tokens = max(self.max_model_len, tokens)
            tokens = min(seqs * self.max_model_len, tokens)
        else:
            tokens = given_tokens
        return (min(seqs, tokens) if given_seqs is None else seqs), tokens

    def _batch_defaults(self) -> tuple[int, int]:
        """Sequences and tokens of the API server, from `EngineArgs.get_batch_defaults`."""
        if self.on_cpu:
            return 128 * self.tensor_parallel_size, 2048 * self.tensor_parallel_size
        if self.device.total_gib >= 160:
            return 1024, 16_384
        # An A100 keeps the smaller ones (vLLM pull request 17885).
        if self.device.total_gib >= 70 and "a100" not in self.device.name.lower():
            return 1024, 8192
        return 256, 2048

    def _capture_sizes(self, flags: FlagValues) -> tuple[int, ...]:
        """As `VllmConfig._set_cudagraph_sizes` makes them, without speculative decoding."""
        compilation = flags.json_object("compilation-config")
        listed: JsonValue | tuple[int, ...] | None = flags.wholes("cudagraph-capture-sizes")
        listed = compilation.get("cudagraph_capture_sizes", listed)
        ceiling = compilation.get(
            "max_cudagraph_capture_size", flags.whole("max-cudagraph-capture-size")
        )
        if self.enforce_eager or self.on_cpu or compilation.get("cudagraph_mode") == "NONE":
            return ()
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if isinstance(listed, list | tuple):
            return tuple(sorted({s for s in listed if isinstance(s, int) and s <= tokens}))
        largest = min(ceiling if isinstance(ceiling, int) else min(2 * seqs, GRAPH_CEILING), tokens)
        sizes = {size for size in (1, 2, 4) if size <= largest}
        sizes |= set(range(8, min(largest + 1, 256), 8)) | set(range(256, largest + 1, 16))
        if tokens <= largest:
            sizes.add(tokens)
        if ceiling is None and seqs <= largest:
            sizes.add(seqs)
        return tuple(sorted(sizes))
