"""What to change after a failure, in order: one small function a cause.

The rules come from what vLLM checks and allocates at each stage (0.4 to 0.33) and from what
mended public reports of the failure. Two directions are opposite: a KV cache that is too small
wants more of the device (`gpu-memory-utilization` up), memory that runs out wants less of it
(down); and neither changes what the weights take.

Memory is here; the machine, the model and what vLLM refuses are in `tuner.engine.advice_machine`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tuner.engine import advice_machine as machine
from tuner.engine.failed_case import (
    Case,
    Rule,
    halved,
    less_memory,
    more_memory,
    raised,
    without_graphs,
)
from tuner.types import EngineConfig, Failure, FailureCause

__all__ = ["advice"]

_OFFLOAD_FACTOR = 1.92
"""Host memory that `kv-offloading-size` really took, as a multiple (0.26: 769 GiB for 400)."""

_WITHOUT_SWAP_SPACE = (0, 18)
"""The first release that has no `swap-space`."""

_GRAPHS_IN_BUDGET = (0, 21)
"""The first release that takes the memory of CUDA graphs from the KV cache's."""


def advice(failure: Failure, config: EngineConfig | None = None) -> tuple[str, ...]:
    """What to change, the most promising first; empty for `none`.

    Args:
        config: what the server ran with, as far as it is known: nothing is advised that is
            so already, and values are named instead of directions.
    """
    rule = _RULES.get(failure.cause)
    return () if rule is None else tuple(rule(Case(failure, config)))


# --- too small a KV cache: more of the device ------------------------------------------


def _kv_too_small(case: Case) -> Iterator[str]:
    yield from _shorter_requests(case)
    yield from more_memory(case)
    yield from _smaller_entries(case)
    yield from raised(
        case, "tensor-parallel-size", "each device then holds a part of weights and KV cache"
    )
    yield from _smaller_batches(case)
    if case.amount("kv-offloading-size"):
        yield "kv-offloading-size does not help: the device must hold one whole request"


def _shorter_requests(case: Case) -> Iterator[str]:
    fits = case.whole("estimated_max_model_len_tokens")
    asked, needed = case.whole("max_model_len_tokens"), case.number("needed_gib")
    available = case.number("available_gib")
    if fits is not None:
        yield f"set max-model-len to at most {fits}: that is what fits now"
    elif asked and needed and available and 0 < available < needed:
        about = int(asked * available / needed) // 16 * 16
        yield f"set max-model-len to about {about}: {available:g} of {needed:g} GiB are there"
    elif available is not None and available <= 0:
        yield "lower max-model-len; but nothing at all is left for the KV cache, so read on"
    else:
        yield "lower max-model-len to what your longest request needs"


def _smaller_entries(case: Case) -> Iterator[str]:
    if not str(case.setting("kv-cache-dtype") or "").startswith("fp8"):
        yield "set kv-cache-dtype to fp8: half the bytes a token, where device and model can"


def _kv_no_blocks(case: Case) -> Iterator[str]:
    yield from more_memory(case)
    yield from raised(
        case, "tensor-parallel-size", "weights and activations leave nothing on this device"
    )
    yield "use quantized weights (an FP8, AWQ or GPTQ checkpoint, or quantization)"
    yield from _smaller_batches(case)
    if not case.is_before(*_GRAPHS_IN_BUDGET):
        yield from without_graphs(case, "the KV cache gets the memory of the CUDA graphs")
    yield "lower max-model-len, where chunked prefill is off: the profile run is as long as it"
    yield from _smaller_entries(case)
    yield "if the model is small: look with nvidia-smi who else holds memory of the device"


def _smaller_batches(case: Case) -> Iterator[str]:
    """Less for activations leaves more for the KV cache, unless its size is set."""
    if case.setting("kv-cache-memory-bytes"):
        return
    reason = "activations take less, the KV cache gets it"
    yield from halved(case, "max-num-batched-tokens", reason, at_least=512)
    yield from halved(case, "max-num-seqs", reason, at_least=8)


def _state_blocks(case: Case) -> Iterator[str]:
    blocks = case.whole("available_blocks")
    if blocks is None:
        yield from halved(case, "max-num-seqs", "each sequence needs a state block")
    else:
        yield f"set max-num-seqs to at most {blocks}: so many state blocks there are"
    yield from more_memory(case)
    yield "lower max-model-len: the shorter it is, the more state blocks there are"


# --- out of memory: less of the device -------------------------------------------------


def _oom_load(case: Case) -> Iterator[str]:
    total = case.number("total_gib")
    fit = f" of {total:g} GiB" if total else ""
    yield from raised(
        case, "tensor-parallel-size", f"the weights do not fit one device{fit}; more share them"
    )
    if case.setting("quantization"):
        yield "use weights of fewer bits: they are quantized already, and still too large"
    else:
        yield "use quantized weights (an FP8, AWQ or GPTQ checkpoint, or quantization)"
    offloaded = case.amount("cpu-offload-gb")
    above = f"raise cpu-offload-gb above {offloaded:g}" if offloaded else "set cpu-offload-gb"
    yield f"{above}: so many GiB of the weights stay in host memory (slow)"
    yield (
        "look with nvidia-smi whether the device is the one you mean and is empty; "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID numbers them as nvidia-smi does"
    )
    yield (
        "leave gpu-memory-utilization: weights take what they take, whatever vLLM's own "
        "message says"
    )


def _oom_profile(case: Case) -> Iterator[str]:
    yield from halved(
        case, "max-num-batched-tokens", "the profile run is one batch of that size", at_least=256
    )
    yield from halved(
        case, "max-num-seqs", "above all with images, whose profile run takes so many"
    )
    yield (
        "lower max-model-len, or switch enable-chunked-prefill on: without it a batch is as "
        "long as the longest request"
    )
    yield from less_memory(case, reason="only after the two above, the profile run ignores it")
    yield from _fewer_graphs(case)
    yield from raised(case, "tensor-parallel-size", "each device then holds a part")


def _oom_kv_alloc(case: Case) -> Iterator[str]:
    yield from less_memory(case, reason="the KV cache takes all that it grants")
    yield "look with nvidia-smi who else holds memory of the device, and let it end first"
    yield from halved(case, "max-num-batched-tokens", "activations take less", at_least=512)


def _oom_warmup(case: Case) -> Iterator[str]:
    requests = case.whole("requests")
    if requests is not None and requests > 1:
        yield (
            f"set max-num-seqs to at most {requests // 2}: the warm-up ran {requests} requests "
            "at once"
        )
    else:
        yield from halved(case, "max-num-seqs", "the warm-up runs so many requests at once")
    yield from less_memory(case)
    yield from halved(case, "max-num-batched-tokens", "activations take less", at_least=512)
    yield from without_graphs(case, "it saves the memory of the CUDA graphs, and costs speed")


def _oom_graph_capture(case: Case) -> Iterator[str]:
    yield from less_memory(case, reason="CUDA graphs live outside of it")
    yield from _fewer_graphs(case)
    yield from halved(case, "max-num-seqs", "graphs are captured up to that size")
    yield from halved(case, "max-num-batched-tokens", "activations take less", at_least=512)
    yield from without_graphs(
        case, "no graphs at all; costs speed, between a few per cent and more than half"
    )


def _fewer_graphs(case: Case) -> Iterator[str]:
    if case.eager:
        return
    if case.is_before(0, 13):
        yield "capture fewer CUDA graphs: fewer sizes in compilation-config.cudagraph_capture_sizes"
    else:
        yield from halved(case, "max-cudagraph-capture-size", "fewer and smaller CUDA graphs")


def _oom_runtime(case: Case) -> Iterator[str]:
    yield from less_memory(
        case, reason="the load needs more than the profile run foresaw", least=0.03
    )
    yield from halved(case, "max-num-batched-tokens", "activations take less", at_least=256)
    yield from halved(case, "max-num-seqs", "fewer requests at once")
    yield from _fewer_graphs(case)
    yield from without_graphs(case, "it frees the memory of the CUDA graphs, and costs speed")
    yield "leave more room if requests ask for prompt_logprobs or carry images"


# --- host memory -----------------------------------------------------------------------


def _host_oom(case: Case) -> Iterator[str]:
    yield from _cpu_backend(case)
    size = case.amount("kv-offloading-size")
    if size:
        yield (
            f"lower kv-offloading-size from {size:g}: with it vLLM has taken up to "
            f"{_OFFLOAD_FACTOR} times as much host memory ({size * _OFFLOAD_FACTOR:.0f} GiB)"
        )
    offload = case.amount("cpu-offload-gb")
    if offload:
        yield f"lower cpu-offload-gb from {offload:g}: each device's process takes so much"
    swap = case.amount("swap-space")
    if swap:
        yield f"lower swap-space from {swap:g}: each device's process takes so much"
    if case.config is None:
        swap_too = "" if case.is_from(*_WITHOUT_SWAP_SPACE) else ", swap-space"
        yield (
            f"lower kv-offloading-size (it has taken up to {_OFFLOAD_FACTOR} times its value), "
            f"cpu-offload-gb{swap_too}, as far as they are set"
        )
    yield (
        "give the process more host memory: the limit of the container or job (docker "
        "--memory, Kubernetes resources.limits.memory), which counts /dev/shm too"
    )
    yield "while weights load, each process holds some of them: leave room for the checkpoint"


def _cpu_backend(case: Case) -> Iterator[str]:
    """vLLM's CPU build keeps weights and KV cache in host memory."""
    share, available = case.number("utilization"), case.number("available_gib")
    total = case.number("total_gib")
    if share and available and total and 0 < available < total:
        most = math.floor(100 * available / total) / 100
        yield (
            f"set gpu-memory-utilization to at most {most:.2f}: on the CPU build it reserves "
            f"host memory, and {available:g} of {total:g} GiB are free"
        )
    elif wanted := case.number("wanted_gib"):
        has = f", {available:g} GiB are there" if available is not None else ""
        yield (
            f"lower VLLM_CPU_KVCACHE_SPACE or kv-cache-memory-bytes: {wanted:g} GiB were "
            f"asked for{has}"
        )
    elif space := case.variable("VLLM_CPU_KVCACHE_SPACE"):
        yield f"lower VLLM_CPU_KVCACHE_SPACE from {space} (GiB)"


_RULES: dict[FailureCause, Rule] = {
    FailureCause.KV_TOO_SMALL: _kv_too_small,
    FailureCause.KV_NO_BLOCKS: _kv_no_blocks,
    FailureCause.STATE_BLOCKS: _state_blocks,
    FailureCause.OOM_LOAD: _oom_load,
    FailureCause.OOM_PROFILE: _oom_profile,
    FailureCause.OOM_KV_ALLOC: _oom_kv_alloc,
    FailureCause.OOM_WARMUP: _oom_warmup,
    FailureCause.OOM_GRAPH_CAPTURE: _oom_graph_capture,
    FailureCause.OOM_RUNTIME: _oom_runtime,
    FailureCause.HOST_OOM: _host_oom,
    FailureCause.DEVICE_BUSY: machine.device_busy,
    FailureCause.MEMORY_BASELINE_MOVED: machine.memory_baseline_moved,
    FailureCause.STARTUP_TIMEOUT: machine.startup_timeout,
    FailureCause.HANG: machine.hang,
    FailureCause.CRASH: machine.crash,
    FailureCause.NCCL: machine.nccl,
    FailureCause.PORT_IN_USE: machine.port_in_use,
    FailureCause.MODEL_NOT_FOUND: machine.model_not_found,
    FailureCause.MODEL_ACCESS: machine.model_access,
    FailureCause.BAD_CONFIG: machine.bad_config,
    FailureCause.UNSUPPORTED: machine.unsupported,
    FailureCause.COMPILE_CACHE: machine.compile_cache,
    FailureCause.DISK_FULL: machine.disk_full,
    FailureCause.UNKNOWN: machine.unknown,
}
