"""How many blocks the KV cache gets, and whether they hold one request of full length.

The rules of `vllm/v1/core/kv_cache_utils.py` (0.32) for one group of full attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.memory_needs import kv_bytes_per_token
from tuner.engine.simulated.settings import EngineSettings
from tuner.engine.simulated.sizes import said_gib
from tuner.types import FailureCause, Stage


@dataclass(frozen=True, slots=True)
class KvFit:
    """The KV cache's size.

    Attributes:
        num_blocks: the null block included.
        bytes_needed: of all blocks, on each device.
        max_model_len: in effect, after fitting.
        tokens, max_concurrency: as vLLM says them; see `MemoryPlan`.
    """

    num_blocks: int
    bytes_needed: int
    max_model_len: int
    tokens: int
    max_concurrency: float


def fit_kv_cache(
    settings: EngineSettings, available_bytes: int, stage: Stage
) -> KvFit | StartFailure:
    """Size the KV cache for `available_bytes` on each device.

    Args:
        stage: how far the server has come by its log, for a failure.
    """
    block_bytes = kv_bytes_per_token(settings) * settings.block_size
    override = settings.num_gpu_blocks_override
    if override is not None:
        available_bytes = override * block_bytes
    usable = available_bytes - block_bytes  # the null block holds nothing
    length = settings.max_model_len
    if settings.fit_max_model_len:
        length = min(length, _longest(settings, usable))
        if length <= 0:
            return StartFailure(FailureCause.KV_TOO_SMALL, stage, message=_CANNOT_FIT)
    if usable <= 0:
        return StartFailure(FailureCause.KV_NO_BLOCKS, stage)
    needed = _blocks_for(length, settings.block_size) * block_bytes
    if needed > usable:
        return _too_small(settings, length, needed, usable, stage)
    num_blocks = available_bytes // block_bytes
    concurrency = num_blocks / _blocks_for(length, settings.block_size)
    return KvFit(
        num_blocks=num_blocks,
        bytes_needed=num_blocks * block_bytes,
        max_model_len=length,
        tokens=int(concurrency * length),
        max_concurrency=concurrency,
    )


_CANNOT_FIT = (
    "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even "
    "a single token. Try increasing `gpu_memory_utilization`."
)


def _too_small(
    settings: EngineSettings, length: int, needed: int, usable: int, stage: Stage
) -> StartFailure:
    numbers = {
        "max_model_len_tokens": float(length),
        "needed_gib": said_gib(needed),
        "available_gib": said_gib(usable),
    }
    estimate = _longest(settings, usable)
    if estimate > 0:
        numbers["estimated_max_model_len_tokens"] = float(estimate)
    return StartFailure(FailureCause.KV_TOO_SMALL, stage, numbers=numbers)


def _longest(settings: EngineSettings, usable_bytes: int) -> int:
    """The longest context, up to the one in effect, that whole blocks hold."""
    block_bytes = kv_bytes_per_token(settings) * settings.block_size
    return min(settings.max_model_len, usable_bytes // block_bytes * settings.block_size)


def _blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
