"""A start on a CPU, as vLLM 0.32's CPU worker goes through it.

The KV cache is what was given in bytes, or utilization x total less what the worker's process
takes itself.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tuner.engine.simulated import memory_needs as needs
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.kv_fit import fit_kv_cache
from tuner.engine.simulated.memory_plan import MemoryPlan
from tuner.engine.simulated.settings import EngineSettings
from tuner.engine.simulated.sizes import said_gib
from tuner.engine.simulated.timeline import timeline
from tuner.types import FailureCause, Stage
from tuner.units import GIB

_BLOCK_MULTIPLE = 32
"""The CPU attention kernel takes multiples of it."""


def plan_on_cpu(settings: EngineSettings) -> MemoryPlan | StartFailure:
    """See `memory.plan_memory`."""
    total, free = int(settings.device.total_gib * GIB), int(settings.device.free_gib * GIB)
    requested = math.ceil(total * settings.gpu_memory_utilization)
    weights = needs.weight_bytes(settings)
    plan = MemoryPlan(
        free_at_start_gib=free / GIB,
        requested_gib=requested / GIB,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        headroom_gib=math.inf,
        startup_s=timeline(settings).total_s,
    )

    def failed(failure: StartFailure) -> StartFailure:
        return replace(failure, settings=settings, plan=plan)

    given = settings.kv_cache_memory_bytes
    if given is None and requested > free:
        numbers = _memory_numbers(free, total, requested)
        numbers["utilization"] = settings.gpu_memory_utilization
        return failed(StartFailure(FailureCause.HOST_OOM, Stage.LAUNCH, numbers=numbers))
    plan = replace(plan, weights_gib=weights / GIB)
    worker = needs.context_bytes(settings) + weights
    left = free - worker
    wanted = requested - worker if given is None else given
    if wanted > left or (given is None and wanted <= 0):
        cause = FailureCause.KV_NO_BLOCKS if wanted < 0 else FailureCause.HOST_OOM
        return failed(
            StartFailure(cause, Stage.PROFILING, numbers=_memory_numbers(left, total, wanted))
        )
    plan = replace(plan, available_kv_gib=wanted / GIB)
    fit = fit_kv_cache(settings, wanted, Stage.KV_ALLOCATION)
    if isinstance(fit, StartFailure):
        return failed(fit)
    shorter = fit.max_model_len < settings.max_model_len
    plan = replace(
        plan,
        num_blocks=fit.num_blocks,
        kv_cache_tokens=fit.tokens,
        max_concurrency=fit.max_concurrency,
        max_model_len=fit.max_model_len,
        auto_fitted_from=settings.max_model_len if shorter else None,
    )
    unusable = _unusable(settings)
    return failed(unusable) if unusable else plan


def _unusable(settings: EngineSettings) -> StartFailure | None:
    """What the worker finds when it sets up the KV cache."""
    if settings.block_size % _BLOCK_MULTIPLE != 0:
        return StartFailure(
            FailureCause.BAD_CONFIG,
            Stage.KV_ALLOCATION,
            message=f"ValueError: No common block size for {settings.block_size} "
            f"(CPU_ATTN: [MultipleOf({_BLOCK_MULTIPLE})]).",
        )
    if settings.kv_offloading_gib > 0:
        return StartFailure(
            FailureCause.UNSUPPORTED,
            Stage.KV_ALLOCATION,
            message="Exception: CPU Offloading is currently only supported on CUDA-alike and "
            "XPU GPUs",
        )
    return None


def _memory_numbers(available: int, total: int, wanted: int) -> dict[str, float]:
    return {
        "available_gib": said_gib(available),
        "total_gib": said_gib(total),
        "wanted_gib": said_gib(wanted),
    }
