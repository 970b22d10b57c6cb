"""Causes that a line alone does not tell: where in its start a server was."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from tuner.types import FailureCause, Stage

Context = Callable[[FailureCause, "re.Match[str]", Stage, Collection[str]], FailureCause | None]
"""The cause from what the table says, the line, the stage, and the functions (and files) of
the traceback before it; None for no failure."""

# From the innermost outwards: the graph estimate captures graphs inside the profile run,
# capture and warm-up run inside what sets up the KV cache.
_FRAME_CAUSES: tuple[tuple[frozenset[str], FailureCause], ...] = (
    (frozenset({"_dummy_sampler_run", "_dummy_pooler_run"}), FailureCause.OOM_WARMUP),
    (frozenset({"profile_cudagraph_memory"}), FailureCause.OOM_PROFILE),
    (frozenset({"pin_memory", "cudaHostAlloc", "_pin_memory"}), FailureCause.HOST_OOM),
    (
        frozenset({"capture_model", "_capture_cudagraphs", "torch/cuda/graphs.py"}),
        FailureCause.OOM_GRAPH_CAPTURE,
    ),
    (
        frozenset({"determine_num_available_blocks", "determine_available_memory", "profile_run"}),
        FailureCause.OOM_PROFILE,
    ),
    (
        frozenset({"compile_or_warm_up_model", "kernel_warmup", "_warm_up_model"}),
        FailureCause.OOM_WARMUP,
    ),
    (
        frozenset(
            {"_allocate_kv_cache", "_allocate_kv_cache_tensors", "initialize_kv_cache"}
            | {"initialize_kv_cache_tensors", "initialize_from_config", "initialize_cache"}
        ),
        FailureCause.OOM_KV_ALLOC,
    ),
    (
        frozenset({"load_model", "create_weights", "make_layers", "process_weights_after_loading"}),
        FailureCause.OOM_LOAD,
    ),
    (
        frozenset({"run_busy_loop", "_process_engine_step", "run_engine_loop", "engine_step"}),
        FailureCause.OOM_RUNTIME,
    ),
)

_TEARDOWN = frozenset(
    {"destroy_process_group", "destroy_distributed_environment", "shutdown", "__del__", "_shutdown"}
    | {"cleanup_dist_env_and_memory", "destroy_model_parallel", "abort", "_destroy_process_group"}
)

_STAGE_CAUSES = {
    Stage.LAUNCH: FailureCause.OOM_LOAD,
    Stage.LOADING: FailureCause.OOM_LOAD,
    Stage.COMPILING: FailureCause.OOM_PROFILE,
    Stage.PROFILING: FailureCause.OOM_PROFILE,
    Stage.KV_ALLOCATION: FailureCause.OOM_KV_ALLOC,
    Stage.GRAPH_CAPTURE: FailureCause.OOM_GRAPH_CAPTURE,
    Stage.WARMUP: FailureCause.OOM_WARMUP,
}


def out_of_memory(
    cause: FailureCause, match: re.Match[str], stage: Stage, frames: Collection[str]
) -> FailureCause:
    """By the traceback where it says, else by how far the server had come."""
    del match
    if stage in (Stage.READY, Stage.LOAD):
        return cause
    for names, by_frame in _FRAME_CAUSES:
        if not names.isdisjoint(frames):
            return by_frame
    return _STAGE_CAUSES[stage]


def nccl(
    cause: FailureCause, match: re.Match[str], stage: Stage, frames: Collection[str]
) -> FailureCause | None:
    """Closing a connection to a rank that is dead already fails, and explains nothing."""
    del match, stage
    return cause if _TEARDOWN.isdisjoint(frames) else None


def busy_or_too_much(
    cause: FailureCause, match: re.Match[str], stage: Stage, frames: Collection[str]
) -> FailureCause:
    """An idle device has nearly all of its memory free: then too much was asked for.

    vLLM's own context, which is there already, takes 0.3 to 0.6 GiB.
    """
    del stage, frames
    try:
        free, total = float(match["free_gib"]), float(match["total_gib"])
    except ValueError:  # not numbers after all, in a line that was cut
        return cause
    idle = free >= 0.97 * total or total - free < 0.8
    return FailureCause.BAD_CONFIG if idle else cause


def cpu_kv_request(
    cause: FailureCause, match: re.Match[str], stage: Stage, frames: Collection[str]
) -> FailureCause:
    """The CPU build's check before it allocates: negative means that nothing is left."""
    del stage, frames
    return FailureCause.KV_NO_BLOCKS if match["wanted_gib"].startswith("-") else cause
