"""A start on a CUDA device, as vLLM 0.32's GPU worker goes through it.

The budget is utilization x total. Taken off it: weights, the peak of a profile run, what
libraries allocate beside torch, and an estimate for CUDA graphs; the rest is the KV cache.
What lies outside the budget: the driver's context, what graphs take beyond the estimate, and
whatever a step takes beyond the profile run's peak. A KV cache that is given in bytes or
blocks asks nobody and runs into the end of the device's memory.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tuner.engine.simulated import memory_needs as needs
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.kv_fit import KvFit, fit_kv_cache
from tuner.engine.simulated.memory_plan import MemoryPlan
from tuner.engine.simulated.settings import EngineSettings
from tuner.engine.simulated.sizes import out_of_memory_numbers, said_gib
from tuner.engine.simulated.timeline import timeline
from tuner.engine.simulated.words_failure import sampler_message
from tuner.types import FailureCause, Stage
from tuner.units import GIB

_BLOCK_MULTIPLE = 16
"""FlashAttention's kernels take multiples of it."""

_HOST_BASE_BYTES = 6 * GIB
_HOST_RANK_BYTES = 3 * GIB
"""Host memory of the API and engine processes, and of each worker: Python, torch, pinned
buffers. Assumed."""

_IDLE_SHARE = 0.97
_IDLE_GIB = 0.8
"""As `tuner.engine.log_context.busy_or_too_much` tells a busy device from too high a wish."""


def plan_on_cuda(settings: EngineSettings) -> MemoryPlan | StartFailure:
    """See `memory.plan_memory`."""
    start = _CudaStart(settings)
    failure = (
        start.budget()
        or start.load()
        or start.profile()
        or start.size_kv_cache()
        or start.allocate_kv_cache()
        or start.host_tier()
        or start.capture()
        or start.warm_up()
    )
    if failure is not None:
        return replace(failure, settings=settings, plan=start.plan)
    return start.ready()


class _CudaStart:
    """The steps of a start, in order; each gives a failure or None.

    Attributes:
        plan: what is known so far.
        free: bytes free on the device.
    """

    def __init__(self, settings: EngineSettings) -> None:
        device = settings.device
        self.settings = settings
        self.total = int(device.total_gib * GIB)
        self.free = int(device.free_gib * GIB) - needs.context_bytes(settings)
        self.requested = math.ceil(self.total * settings.gpu_memory_utilization)
        self.available = 0
        self.fit: KvFit | None = None
        self.plan = MemoryPlan(
            free_at_start_gib=self.free / GIB,
            requested_gib=self.requested / GIB,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            startup_s=timeline(settings).total_s,
        )

    def budget(self) -> StartFailure | None:
        """`request_memory`: the budget must be free."""
        if self.free >= self.requested:
            return None
        free, total = said_gib(self.free), said_gib(self.total)
        idle = free >= _IDLE_SHARE * total or total - free < _IDLE_GIB
        return StartFailure(
            FailureCause.BAD_CONFIG if idle else FailureCause.DEVICE_BUSY,
            Stage.LAUNCH,
            numbers={
                "free_gib": free,
                "total_gib": total,
                "utilization": self.settings.gpu_memory_utilization,
                "wanted_gib": said_gib(self.requested),
            },
        )

    def load(self) -> StartFailure | None:
        """The weights must fit the device; no budget limits them."""
        weights = needs.weight_bytes(self.settings)
        if weights > self.free:
            model, ranks = self.settings.model, self.settings.tensor_parallel_size
            # One layer's gate and up matrices are allocated at once.
            tried = 2 * model.hidden * model.intermediate * model.dtype_bytes // ranks
            return self._out_of_memory(FailureCause.OOM_LOAD, Stage.LOADING, tried)
        self.free -= weights
        self.plan = replace(self.plan, weights_gib=weights / GIB)
        return None

    def profile(self) -> StartFailure | None:
        """A forward pass of a full batch, then sampling for as many sequences as allowed."""
        settings = self.settings
        self.free -= needs.library_bytes()
        tokens, sequences = settings.max_num_batched_tokens, needs.profile_sequences(settings)
        forward = needs.forward_bytes(settings, tokens)
        if forward > self.free:
            model, ranks = settings.model, settings.tensor_parallel_size
            tried = 2 * tokens * model.intermediate * model.dtype_bytes // ranks
            return self._out_of_memory(FailureCause.OOM_PROFILE, Stage.PROFILING, tried)
        if needs.activation_bytes(settings) > self.free:
            return self._sampler_failure(Stage.PROFILING, sequences)
        self.plan = replace(
            self.plan,
            activation_gib=needs.activation_bytes(settings) / GIB,
            non_torch_gib=needs.library_bytes() / GIB,
            graph_estimate_gib=needs.graph_estimate_bytes(settings) / GIB,
        )
        return None

    def size_kv_cache(self) -> StartFailure | None:
        """What the budget leaves, or what was given; it must hold one request."""
        settings = self.settings
        given = settings.kv_cache_memory_bytes
        if given:  # 0 counts as not given
            self.available, stage = given, Stage.PROFILING
        else:
            self.available, stage = self._left_of_the_budget(), Stage.KV_ALLOCATION
        self.plan = replace(self.plan, available_kv_gib=self.available / GIB)
        fit = fit_kv_cache(settings, self.available, stage)
        if isinstance(fit, StartFailure):
            return fit
        self.fit = fit
        shorter = fit.max_model_len < settings.max_model_len
        self.plan = replace(
            self.plan,
            num_blocks=fit.num_blocks,
            kv_cache_tokens=fit.tokens,
            max_concurrency=fit.max_concurrency,
            max_model_len=fit.max_model_len,
            auto_fitted_from=settings.max_model_len if shorter else None,
        )
        return None

    def allocate_kv_cache(self) -> StartFailure | None:
        """The blocks must fit the device, and the attention kernel must take their size."""
        assert self.fit is not None
        if self.settings.block_size % _BLOCK_MULTIPLE != 0:
            return StartFailure(
                FailureCause.BAD_CONFIG,
                Stage.KV_ALLOCATION,
                message=f"ValueError: No common block size for {self.settings.block_size} "
                f"(FLASH_ATTN: [MultipleOf({_BLOCK_MULTIPLE})]).",
            )
        if self.fit.bytes_needed > self.free:
            tried = self.fit.bytes_needed // self.settings.model.layers  # a tensor a layer
            return self._out_of_memory(FailureCause.OOM_KV_ALLOC, Stage.KV_ALLOCATION, tried)
        self.free -= self.fit.bytes_needed
        return None

    def host_tier(self) -> StartFailure | None:
        """The KV tier is allocated on the host at once; beyond its memory the kernel kills."""
        settings = self.settings
        tier = int(settings.kv_offloading_gib * GIB)
        ranks = settings.tensor_parallel_size
        needed = tier + _HOST_BASE_BYTES + ranks * _HOST_RANK_BYTES
        if tier > 0 and needed > settings.device.host_gib * GIB:
            return StartFailure(FailureCause.HOST_OOM, Stage.KV_ALLOCATION)
        block = needs.kv_bytes_per_token(settings) * settings.block_size * ranks
        self.plan = replace(self.plan, host_blocks=tier // block)
        return None

    def capture(self) -> StartFailure | None:
        """CUDA graphs, partly outside the budget."""
        graphs = needs.graph_bytes(self.settings)
        if graphs > self.free:
            tried = needs.forward_bytes(self.settings, max(self.settings.cudagraph_capture_sizes))
            return self._out_of_memory(FailureCause.OOM_GRAPH_CAPTURE, Stage.GRAPH_CAPTURE, tried)
        self.free -= graphs
        self.plan = replace(self.plan, graph_gib=graphs / GIB)
        return None

    def warm_up(self) -> StartFailure | None:
        """The sampler's buffers for all sequences, kept from then on."""
        sequences = needs.profile_sequences(self.settings)
        if needs.sampler_bytes(self.settings, sequences) > self.free:
            captured = bool(self.settings.cudagraph_capture_sizes)
            stage = Stage.WARMUP if captured else Stage.KV_ALLOCATION
            return self._sampler_failure(stage, sequences)
        return None

    def ready(self) -> MemoryPlan:
        """All of it fits."""
        return replace(self.plan, headroom_gib=self.free / GIB)

    def _sampler_failure(self, stage: Stage, sequences: int) -> StartFailure:
        """Logits as float32 find no memory; vLLM adds for how many dummy requests."""
        tried = sequences * self.settings.model.vocab * 4
        failure = self._out_of_memory(FailureCause.OOM_WARMUP, stage, tried)
        numbers = {**failure.numbers, "requests": float(sequences)}
        return replace(failure, numbers=numbers, message=sampler_message(sequences))

    def _left_of_the_budget(self) -> int:
        return (
            self.requested
            - needs.weight_bytes(self.settings)
            - needs.library_bytes()
            - needs.activation_bytes(self.settings)
            - needs.graph_estimate_bytes(self.settings)
        )

    def _out_of_memory(self, cause: FailureCause, stage: Stage, tried: int) -> StartFailure:
        """An allocation of `tried` bytes fails; those like it before it have succeeded."""
        numbers = out_of_memory_numbers(tried, self.free % tried, self.total)
        return StartFailure(cause, stage, numbers=numbers)
