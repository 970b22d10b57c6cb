"""What is wrong, in the words of vLLM 0.32, torch and the libraries below: the root's last lines.

One function for each cause; `root_of` chooses it. Which process says it and what stands around
it is for `words`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.sizes import torch_size
from tuner.types import FailureCause, Stage

_TIPS = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."


@dataclass(frozen=True, slots=True)
class Root:
    """The root of a failure.

    Attributes:
        lines: the exception's own lines, type included.
        by: "api" (a plain traceback), "engine" or "worker"; "nobody" prints nothing.
        frames: (file, function) of the traceback, outermost first.
        announced: an ERROR line before the traceback.
        then: an exception that follows directly from it.
    """

    lines: str
    by: str = "engine"
    frames: tuple[tuple[str, str], ...] = ()
    announced: str = ""
    then: str = ""


def root_of(failure: StartFailure) -> Root:
    """The words for a failure; its own `message` where it has one."""
    return _ROOTS[failure.cause](failure)


# --- out of memory ---------------------------------------------------------------------

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_WORKER = "vllm/v1/worker/gpu_worker.py"

_PROFILE_FRAMES = ((_WORKER, "determine_available_memory"), (_RUNNER, "profile_run"))
_OOM_FRAMES: Mapping[FailureCause, tuple[tuple[str, str], ...]] = {
    FailureCause.OOM_LOAD: (
        (_WORKER, "load_model"),
        (_RUNNER, "load_model"),
        ("vllm/model_executor/model_loader/base_loader.py", "load_model"),
        ("vllm/model_executor/layers/linear.py", "create_weights"),
    ),
    FailureCause.OOM_PROFILE: (*_PROFILE_FRAMES, (_RUNNER, "_dummy_run")),
    FailureCause.OOM_KV_ALLOC: (
        (_WORKER, "initialize_from_config"),
        (_RUNNER, "initialize_kv_cache"),
        (_RUNNER, "initialize_kv_cache_tensors"),
        (_RUNNER, "_allocate_kv_cache_tensors"),
    ),
    FailureCause.OOM_WARMUP: (
        (_WORKER, "compile_or_warm_up_model"),
        (_RUNNER, "_dummy_sampler_run"),
    ),
    FailureCause.OOM_GRAPH_CAPTURE: (
        (_WORKER, "compile_or_warm_up_model"),
        (_RUNNER, "capture_model"),
        (_RUNNER, "_capture_cudagraphs"),
        ("torch/cuda/graphs.py", "__exit__"),
    ),
    FailureCause.OOM_RUNTIME: ((_WORKER, "execute_model"), (_RUNNER, "execute_model")),
}


def _out_of_memory(failure: StartFailure) -> Root:
    oom = _torch_oom(failure.numbers)
    announced = ""
    if failure.cause is FailureCause.OOM_LOAD:
        announced = (
            "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization "
            "to free memory for weights, increasing --tensor-parallel-size, or using "
            "--quantization. See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ "
            f"for more tips. (original error: {oom})"
        )
    return Root(
        f"torch.OutOfMemoryError: {oom}",
        by="worker",
        frames=_OOM_FRAMES[failure.cause],
        announced=announced,
        then=failure.message,
    )


def sampler_message(sequences: int) -> str:
    """What vLLM adds where it runs out of memory while sampling for dummy requests."""
    return (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with "
        f"{sequences} dummy requests. Please try lowering `max_num_seqs` or "
        "`gpu_memory_utilization` when initializing the engine."
    )


def _torch_oom(numbers: Mapping[str, float]) -> str:
    tried = torch_size(numbers.get("tried_to_allocate_gib", 0.25))
    total = torch_size(numbers.get("total_gib", 22.5))
    free = torch_size(numbers.get("free_gib", 0.125))
    return (
        f"CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of {total} of "
        f"which {free} is free. Including non-PyTorch memory, this process has the rest in use. If "
        "reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def _host_oom(failure: StartFailure) -> Root:
    numbers = failure.numbers
    if "utilization" in numbers:
        return Root(
            f"ValueError: Available memory on node 0 ({numbers['available_gib']}/"
            f"{numbers['total_gib']} GiB) on startup is less than desired CPU memory utilization "
            f"({numbers['utilization']}, {numbers['wanted_gib']} GiB). On the CPU backend, the "
            "`--gpu-memory-utilization` flag controls the fraction of CPU memory reserved (despite "
            "its name). To resolve: decrease `--gpu-memory-utilization` (e.g. "
            "`--gpu-memory-utilization 0.5`) or reduce CPU memory used by other processes.",
            by="worker",
        )
    if "wanted_gib" in numbers:
        return _cpu_kv_request(failure)
    return Root("", by="nobody")


def _cpu_kv_request(failure: StartFailure) -> Root:
    numbers, given = failure.numbers, None
    if failure.settings is not None:
        given = failure.settings.kv_cache_memory_bytes
    requested = f"/{round(failure.plan.requested_gib, 2)}" if failure.plan else ""
    advice = (
        "Reduce CPU memory used by other processes."
        if given is None
        else "Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used "
        "by other processes."
    )
    return Root(
        f"ValueError: Available memory on node 0 ({numbers['available_gib']}/"
        f"{numbers['total_gib']} GiB) on kv cache allocation is less than requested memory for kv "
        f"({numbers['wanted_gib']}{requested if given is None else ''} GiB). {advice}",
        by="worker",
    )


# --- the KV cache ----------------------------------------------------------------------


def _kv_no_blocks(failure: StartFailure) -> Root:
    if "wanted_gib" in failure.numbers:
        return _cpu_kv_request(failure)
    return Root(
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine (this flag also controls CPU memory "
        f"reservation on the CPU backend, despite its name). {_TIPS}"
    )


def _kv_too_small(failure: StartFailure) -> Root:
    if failure.message:
        return Root(failure.message)
    numbers = failure.numbers
    length, estimate = numbers.get("max_model_len_tokens", 8192), ""
    if "estimated_max_model_len_tokens" in numbers:
        estimate = (
            "Based on the available memory, the estimated maximum model length is "
            f"{numbers['estimated_max_model_len_tokens']:.0f}. "
        )
    return Root(
        f"ValueError: To serve at least one request with the model's max seq len ({length:.0f}), "
        f"({numbers.get('needed_gib', 1.0)} GiB KV cache is needed, which is larger than the "
        f"available KV cache memory ({numbers.get('available_gib', 0.5)} GiB). {estimate}Try "
        "increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) "
        f"or decreasing `max_model_len` when initializing the engine. {_TIPS}"
    )


def _state_blocks(failure: StartFailure) -> Root:
    sequences = failure.numbers.get("max_num_seqs", 1024)
    blocks = failure.numbers.get("available_blocks", 512)
    return Root(
        f"ValueError: max_num_seqs ({sequences:.0f}) exceeds available Mamba cache blocks "
        f"({blocks:.0f}). Each decode sequence requires one Mamba cache block, so CUDA graph "
        f"capture cannot proceed. Please lower max_num_seqs to at most {blocks:.0f} or increase "
        "gpu_memory_utilization.",
        by="worker",
    )


# --- the device ------------------------------------------------------------------------


def _budget(failure: StartFailure) -> Root:
    numbers = failure.numbers
    return Root(
        f"ValueError: Free memory on device cuda:0 ({numbers.get('free_gib', 12.0)}/"
        f"{numbers.get('total_gib', 22.5)} GiB) on startup is less than desired GPU memory "
        f"utilization ({numbers.get('utilization', 0.92)}, {numbers.get('wanted_gib', 20.7)} GiB). "
        "Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        by="worker",
        frames=((_WORKER, "init_device"), ("vllm/v1/worker/utils.py", "request_memory")),
    )


def _baseline_moved(failure: StartFailure) -> Root:
    initial = failure.numbers.get("initial_free_gib", 60.0)
    current = failure.numbers.get("current_free_gib", 70.0)
    return Root(
        f"AssertionError: Error in memory profiling. Initial free memory {initial} GiB, current "
        f"free memory {current} GiB. This happens when other processes sharing the same container "
        "release GPU memory while vLLM is profiling during initialization. To fix this, ensure "
        "consistent GPU memory allocation or isolate vLLM in its own container.",
        by="worker",
        frames=((_WORKER, "determine_available_memory"),),
    )


# --- the rest --------------------------------------------------------------------------


def _bad_config(failure: StartFailure) -> Root:
    if failure.message:
        early = failure.stage is Stage.LAUNCH and failure.settings is None
        return Root(failure.message, by="api" if early else "worker")
    if "utilization" in failure.numbers:
        return _budget(failure)
    return Root(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\n"
        "max_num_seqs\n"
        "  Input should be greater than or equal to 1 "
        "[type=greater_than_equal, input_value=0, input_type=int]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/greater_than_equal",
        by="api",
    )


def _crash(failure: StartFailure) -> Root:
    if failure.exit_code < 0:
        return Root("", by="nobody")  # the process has no time for words
    return Root(
        failure.message
        or "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        by="worker",
        frames=_OOM_FRAMES[FailureCause.OOM_RUNTIME],
    )


def _hang(failure: StartFailure) -> Root:
    serving = failure.stage in (Stage.READY, Stage.LOAD)
    return Root(
        "TimeoutError: RPC call to sample_tokens timed out." if serving else "",
        by="engine" if serving else "nobody",
        frames=(("vllm/v1/executor/multiproc_executor.py", "get_response"),),
    )


def _said(text: str, by: str = "engine") -> Callable[[StartFailure], Root]:
    """A cause whose words do not depend on numbers."""
    return lambda failure: Root(failure.message or text, by=by)


_ROOTS: dict[FailureCause, Callable[[StartFailure], Root]] = {
    FailureCause.OOM_LOAD: _out_of_memory,
    FailureCause.OOM_PROFILE: _out_of_memory,
    FailureCause.OOM_KV_ALLOC: _out_of_memory,
    FailureCause.OOM_WARMUP: _out_of_memory,
    FailureCause.OOM_GRAPH_CAPTURE: _out_of_memory,
    FailureCause.OOM_RUNTIME: _out_of_memory,
    FailureCause.HOST_OOM: _host_oom,
    FailureCause.KV_NO_BLOCKS: _kv_no_blocks,
    FailureCause.KV_TOO_SMALL: _kv_too_small,
    FailureCause.STATE_BLOCKS: _state_blocks,
    FailureCause.DEVICE_BUSY: _budget,
    FailureCause.MEMORY_BASELINE_MOVED: _baseline_moved,
    FailureCause.STARTUP_TIMEOUT: _said(
        "TimeoutError: Timed out waiting for engine core processes to start. This is often caused "
        "by slow weight loading for large models. Waited 600s (configured by "
        "VLLM_ENGINE_READY_TIMEOUT_S).",
        by="api",
    ),
    FailureCause.HANG: _hang,
    FailureCause.CRASH: _crash,
    FailureCause.NCCL: _said(
        "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        by="worker",
    ),
    FailureCause.PORT_IN_USE: _said("OSError: [Errno 98] Address already in use", by="api"),
    FailureCause.MODEL_NOT_FOUND: _said(
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
        "'namespace/repo_name': './models/none'. Use `repo_type` argument if needed.",
        by="api",
    ),
    FailureCause.MODEL_ACCESS: _said(
        "OSError: You are trying to access a gated repo.\n"
        "Make sure to have access to it and pass a token having permission to this repo.",
        by="api",
    ),
    FailureCause.BAD_CONFIG: _bad_config,
    FailureCause.UNSUPPORTED: _said(
        "Exception: CPU Offloading is currently only supported on CUDA-alike and XPU GPUs",
        by="worker",
    ),
    FailureCause.COMPILE_CACHE: _said(
        "RuntimeError: vLLM failed to compile the model. The most likely reason for this is that a "
        "previous compilation failed, leading to a corrupted compilation artifact. We recommend "
        "trying to remove ~/.cache/vllm/torch_compile_cache and try again to see the real issue.",
        by="worker",
    ),
    FailureCause.DISK_FULL: _said("OSError: [Errno 28] No space left on device", by="worker"),
    FailureCause.UNKNOWN: _said(
        "AttributeError: 'NoneType' object has no attribute 'shape'", by="worker"
    ),
}

assert set(_ROOTS) == set(FailureCause) - {FailureCause.NONE}
