"""What to change where the machine, the model or vLLM's refusal ended a server.

Each function is the rule of one cause; the table is in `tuner.engine.advice`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tuner.engine.failed_case import Case, quoted
from tuner.types import Stage

_RENAMED_FLAGS = {
    "disable-log-requests": "its name is now --no-enable-log-requests",
    "swap-space": "it is gone since vLLM 0.18",
    "preemption-mode": "it is gone since vLLM 0.11",
    "num-scheduler-steps": "it is gone since vLLM 0.10",
    "use-v2-block-manager": "it is gone since vLLM 0.10",
    "cuda-graph-sizes": "its name is now --cudagraph-capture-sizes",
    "enable-reasoning": "--reasoning-parser alone does it",
}
"""Flags that launch scripts still carry, and what became of them."""


# --- the device ------------------------------------------------------------------------


def device_busy(case: Case) -> Iterator[str]:
    """Somebody else has the memory, or there is no device to be had."""
    free, total = case.number("free_gib"), case.number("total_gib")
    if free is None or not total or free > total:
        yield "see whether nvidia-smi works here, and in the container (docker --gpus all)"
        yield "see whether CUDA_VISIBLE_DEVICES names devices that there are"
        yield "see whether the driver is new enough for the CUDA of this vLLM (nvidia-smi says)"
        return
    yield (
        f"see with nvidia-smi who holds {total - free:.1f} GiB of the device, and end it or wait "
        "until it has ended; then start the same configuration again"
    )
    yield "an earlier vLLM may have left something behind: look for processes named VLLM::"
    yield (
        f"if it stays there for ever (a desktop, another service): set gpu-memory-utilization "
        f"to at most {math.floor(100 * free / total) / 100:.2f}, as {free:g} of {total:g} GiB "
        "are free"
    )


def memory_baseline_moved(case: Case) -> Iterator[str]:
    """The device's memory changed while vLLM measured."""
    before, after = case.number("initial_free_gib"), case.number("current_free_gib")
    freed = ""
    if before is not None and after is not None and after > before:
        freed = f" ({after - before:.1f} GiB became free)"
    yield (
        f"start the same configuration again, once the device's memory stands still{freed}: "
        "something released memory while vLLM measured, often the server before it"
    )
    yield "keep other processes off the device while a server starts"
    yield "where device and host share their memory, the page cache does it too: try once more"


# --- time ------------------------------------------------------------------------------


def startup_timeout(case: Case) -> Iterator[str]:
    """Slow, or hung: by how far it had come."""
    yield "raise startup_timeout under `server:` in the space file, such as 30m"
    if "VLLM_ENGINE_READY_TIMEOUT_S" in case.line or "Timed out waiting for engine" in case.line:
        yield "raise VLLM_ENGINE_READY_TIMEOUT_S too: vLLM's own limit ended it"
    if case.failure.stage in (Stage.LAUNCH, Stage.LOADING):
        yield "download the model before, to a local disk; see whether the disk is read at all"
    elif case.failure.stage is Stage.COMPILING:
        yield "keep vLLM's compile cache (VLLM_CACHE_ROOT) from one start to the next"
    elif case.failure.stage is Stage.GRAPH_CAPTURE and not case.eager:
        yield "capture fewer CUDA graphs (max-cudagraph-capture-size)"
    yield "if the log stood still before the end, it hung: as a probe, start it with more time"


def hang(case: Case) -> Iterator[str]:
    """Nothing moves any more: a probe for the place where it stands."""
    stage = case.failure.stage
    if stage in (Stage.READY, Stage.LOAD):
        yield "look in the log above for a CUDA error, and at the GPUs (dmesg, Xid messages)"
        if not case.eager:
            yield "as a probe: set enforce-eager, to see whether a CUDA graph hangs"
        yield "as a probe: leave out KV offload, speculative decoding and async scheduling"
    elif stage is Stage.GRAPH_CAPTURE and not case.eager:
        yield "as a probe: set enforce-eager; if it then starts, the capture hangs"
        yield "as a probe: set disable-custom-all-reduce"
    elif stage is Stage.COMPILING:
        yield "give it a fresh cache: VLLM_CACHE_ROOT on an empty folder"
    elif stage is Stage.LOADING and case.one_device:
        yield "see whether the disk is read at all; copy the model to a local disk"
    if not case.one_device and stage is not Stage.COMPILING:
        yield "with several devices, as a probe: set NCCL_P2P_DISABLE=1"
        yield "with several devices: give it shared memory (--shm-size 16g or --ipc=host)"
    yield "see where it stands: py-spy dump --pid PID, for each process of the server"


# --- several devices, ports, disk ------------------------------------------------------


def nccl(case: Case) -> Iterator[str]:
    """Between devices: shared memory, peer access, network."""
    yield (
        "give the container more shared memory: docker --shm-size=16g or --ipc=host, in "
        "Kubernetes an emptyDir of medium Memory at /dev/shm"
    )
    yield "as a probe: set NCCL_P2P_DISABLE=1; if it then works, it is peer access (IOMMU, ACS)"
    yield "set NCCL_DEBUG=INFO and read its first WARN line"
    if "/dev/shm" not in case.line:
        yield "on several machines: name the network with NCCL_SOCKET_IFNAME"
    yield "see whether driver and CUDA versions fit, and whether nvidia-smi topo -m shows all GPUs"


def port_in_use(case: Case) -> Iterator[str]:
    """The server's own port, or one between its processes."""
    port = case.whole("port")
    which = f"port {port}" if port else "the port"
    yield f"see who listens on {which}: ss -ltnp; often an earlier server, half ended"
    yield "end that one, or give this server another --port"
    yield (
        "if the server's own port is free, it is one between its processes: set VLLM_PORT or "
        "MASTER_PORT to a free one"
    )


def disk_full(case: Case) -> Iterator[str]:
    """Which disk, and what fills it."""
    path = quoted(case, r"['\" ](/[^'\" :]+)")
    if "/dev/shm" in case.line:
        yield "give it more shared memory: docker --shm-size=16g or --ipc=host"
        yield "remove what dead servers left in /dev/shm (psm_*, vllm*, nccl-*)"
        yield "lower kv-offloading-size, if it is set: it lives in /dev/shm"
        return
    yield f"free space where it writes{f': df -h {path}' if path else ' (df -h, and df -i)'}"
    yield "move the caches to a larger disk: HF_HOME (models), VLLM_CACHE_ROOT (compiled)"
    yield "clear what is old in them, and in the folder for temporary files (TMPDIR)"


def compile_cache(case: Case) -> Iterator[str]:
    """A start that was cut off has left half a compiled graph."""
    known = case.variable("VLLM_CACHE_ROOT")
    yield (
        "start again with a fresh cache: "
        + (f"empty {known}" if known else "VLLM_CACHE_ROOT on an empty folder")
        + ", or remove ~/.cache/vllm/torch_compile_cache"
    )
    if case.variable("VLLM_DISABLE_COMPILE_CACHE") != "1":
        yield "as a probe: set VLLM_DISABLE_COMPILE_CACHE=1 (each start then compiles)"
    yield "if it fails with a fresh cache too, it is no cache: set enforce-eager, and report it"


# --- the model -------------------------------------------------------------------------


def model_not_found(case: Case) -> Iterator[str]:
    """A folder, a name, or no network."""
    path = quoted(case, r"['\"]((?:/|\.{1,2}/|~)[^'\"]*)['\"]")
    if path:
        yield f"see whether {path} is there for the server: in a container, whether it is mounted"
        yield "name the folder that holds config.json; a relative path counts from the start folder"
        return
    offline = ("LocalEntryNotFound", "connect", "cache", "offline", "OFFLINE")
    if any(word in case.line for word in offline):
        yield "see whether the hub can be reached from here (proxy, DNS, HF_ENDPOINT)"
        yield "download the model before, and unset HF_HUB_OFFLINE for that"
        yield "name the folder of the download instead of the hub id"
        return
    name = quoted(case, r"['\"]([\w.-]+/[\w.-]+)['\"]")
    yield f"see whether {name or 'the name'} is spelled as on the hub (owner/name)"
    yield "if it is a folder: write its path, with a leading / or ./"
    yield "if it is private: set HF_TOKEN; the hub hides what one may not see"
    yield "see whether the hub can be reached from here (proxy, DNS, HF_HUB_OFFLINE)"


def model_access(case: Case) -> Iterator[str]:
    """A token, or a licence."""
    yield "set HF_TOKEN in the server's environment: a token that may read this model"
    yield "accept the model's licence on its page of the hub, with the account of the token"
    if "403" in case.line:
        yield "a fine-grained token must allow gated repositories: it was known, but not let in"


# --- what vLLM refuses -----------------------------------------------------------------


def bad_config(case: Case) -> Iterator[str]:
    """What the line names, and how it is mended."""
    named = [*_named_limits(case), *_named_flags(case)]
    yield from named
    if not named:
        yield "mend what the line names, in the space file or on the command line"
    yield "`tuner check SPACE` asks this vLLM about a configuration without starting it"


def _named_flags(case: Case) -> Iterator[str]:
    if flags := quoted(case, r"unrecognized arguments: (.*)"):
        yield from _unknown_flags(flags)
    elif option := quoted(case, r"error: argument (-[^:]+):"):
        yield f"mend the value of {option}: the line says what it takes"
    elif "appears to be a URI" in case.line or "'tcp://" in case.line:
        yield (
            "Kubernetes sets VLLM_PORT for a Service that is named vllm: rename the Service, or "
            "set enableServiceLinks: false in the pod"
        )
    elif "tensor parallel size" in case.line:
        yield "set tensor-parallel-size to a divisor of the model's number of attention heads"
    elif "block size" in case.line:
        yield "leave out block-size, or set one that the line names"


def _named_limits(case: Case) -> Iterator[str]:
    tokens, seqs = case.whole("max_num_batched_tokens"), case.whole("max_num_seqs")
    asked = case.whole("max_model_len_tokens")
    derived = case.whole("derived_max_model_len_tokens")
    free, total = case.number("free_gib"), case.number("total_gib")
    if tokens and seqs:
        yield f"set max-num-batched-tokens to at least {seqs}, or max-num-seqs to at most {tokens}"
        yield "in a space file, as a constraint: max-num-seqs <= max-num-batched-tokens"
    elif tokens and asked:
        yield (
            f"set max-num-batched-tokens to at least {asked}, or max-model-len to at most "
            f"{tokens}, or switch enable-chunked-prefill on"
        )
    elif derived:
        yield f"set max-model-len to at most {derived}: that is what the model was made for"
    elif free and total and free <= total:
        yield (
            f"set gpu-memory-utilization to at most {math.floor(100 * free / total) / 100:.2f}: "
            f"{free:g} of {total:g} GiB are free on a device that nobody else uses"
        )


def _unknown_flags(text: str) -> Iterator[str]:
    flags = [word.partition("=")[0] for word in text.split() if word.startswith("--")]
    for flag in flags:
        name = flag.lstrip("-").replace("_", "-")
        became = _RENAMED_FLAGS.get(name, "this vLLM does not have it, see `vllm serve --help=all`")
        yield f"remove --{name}: {became}"
    if not flags:
        yield f"remove what this vLLM does not know: {text}"


def unsupported(case: Case) -> Iterator[str]:
    """A value that this model, device or build will never take."""
    line = case.line
    if "kv-cache is not supported with fp8 checkpoints" in line:
        yield "set kv-cache-dtype to fp8 or fp8_e4m3, or leave it at auto"
    elif "FP8 KV cache is not supported" in line:
        yield "set kv-cache-dtype to auto: this device or attention backend has no fp8 KV cache"
    elif "quantization method" in line:
        yield "use another quantization: this GPU is too old for that one (the line says both)"
    elif "CPU weight offloading" in line:
        yield "leave out cpu-offload-gb: this vLLM cannot offload weights with this model"
    elif "CPU Offloading" in line:
        yield "leave out kv-offloading-size: this platform cannot offload its KV cache"
    elif "lmcache" in line:
        yield "install lmcache beside vLLM, or take another kv-offloading-backend"
    yield "take the value that the line names out of the search space: no other setting helps"
    yield "or use a vLLM whose release notes name the model, the device and this feature"


# --- crashes and what is not known -----------------------------------------------------


def crash(case: Case) -> Iterator[str]:
    """No setting is to blame for sure: what has avoided it for others."""
    if "Bus error" in case.line:
        yield "give it more shared memory: docker --shm-size=16g or --ipc=host"
    if not case.eager:
        yield "set compilation-config.cudagraph_mode to PIECEWISE, or set enforce-eager"
    if not case.one_device:
        yield "set disable-custom-all-reduce, if there are several devices"
    if case.setting("kv-offloading-size"):
        yield "leave out kv-offloading-size: offloading under long contexts has crashed servers"
    yield "try another attention backend, or a newer vLLM: kernels are mended in most releases"
    yield "look at the GPU: dmesg (Xid messages), nvidia-smi -q (ECC errors)"
    yield "if it comes again: report it to vLLM with the log, with CUDA_LAUNCH_BLOCKING=1"


def unknown(case: Case) -> Iterator[str]:
    """What a person has to look at."""
    code = case.failure.exit_code
    if code in (-15, 143, -2, 130):
        yield (
            "it was told to stop: look for a probe or a time limit that did so (docker stop, a "
            "liveness probe, a job's limit)"
        )
    yield "read the lines around it from the top: the first error counts, not the last"
    yield "start it once more; if it fails the same way, take the flags away one by one"
    yield "send the whole log, the command and the vLLM version with a report"
