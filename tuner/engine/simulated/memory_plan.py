"""The memory of a server that has started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one device once the server is ready; all `_gib` per device.

    In a failed start, what was not known yet is 0.

    Attributes:
        free_at_start_gib: what vLLM finds free, its own context already taken off.
        requested_gib: the budget, utilization x total.
        weights_gib: of this device's share of the model.
        activation_gib: peak of the profile run.
        non_torch_gib: what the profile run finds to be allocated beside torch.
        graph_estimate_gib: what is taken off the budget for CUDA graphs.
        graph_gib: what capture really takes.
        available_kv_gib: vLLM's `Available KV cache memory`.
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens of a block.
        kv_cache_tokens: as the log says it: `int(max_concurrency x max_model_len)`.
        max_concurrency: how many requests of `max_model_len` fit.
        max_model_len: in effect, after fitting.
        auto_fitted_from: the longer one that was asked for, where vLLM reduced it.
        headroom_gib: free device memory once the server serves, activations not counted; what
            a step may take. Infinite on CPU.
        host_blocks: blocks that the host tier of the KV cache holds.
        startup_s: launch to ready.
    """

    free_at_start_gib: float = 0.0
    requested_gib: float = 0.0
    weights_gib: float = 0.0
    activation_gib: float = 0.0
    non_torch_gib: float = 0.0
    graph_estimate_gib: float = 0.0
    graph_gib: float = 0.0
    available_kv_gib: float = 0.0
    num_blocks: int = 0
    block_size: int = 0
    kv_cache_tokens: int = 0
    max_concurrency: float = 0.0
    max_model_len: int = 0
    auto_fitted_from: int | None = None
    headroom_gib: float = 0.0
    host_blocks: int = 0
    startup_s: float = 0.0
