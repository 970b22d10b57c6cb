"""The wordings by which vLLM's failures are recognised: one table.

Each entry names the releases whose source, or what else, the wording was seen in ("all": vLLM
0.4 to 0.33). The order matters: the first entry that matches a line decides it. How the table
is read: `tuner.engine.log_causes`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from tuner.engine.log_context import Context, busy_or_too_much, cpu_kv_request, out_of_memory
from tuner.types import FailureCause


class Weight(StrEnum):
    """How much a line explains."""

    ROOT = "root"
    """The cause itself."""
    HINT = "hint"
    """Says what kind of failure, but a root named later explains more."""
    WRAPPER = "wrapper"
    """Only says that there was a failure; the cause stands elsewhere."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One wording.

    Attributes:
        regex: named groups become the failure's numbers (see `log_causes`).
        decide: refines the cause by stage and traceback.
        decisive: a starting server cannot recover from it any more.
        engine_dead: a server that was ready cannot serve any more.
        also_serving: it means the same once the server is ready; a request may fail with
            words that at start would be the server's end.
    """

    cause: FailureCause
    regex: re.Pattern[str]
    seen_in: str
    weight: Weight = Weight.ROOT
    decide: Context | None = None
    decisive: bool = False
    engine_dead: bool = False
    also_serving: bool = False


def _p(cause: FailureCause, regex: str, seen_in: str, **more: object) -> Pattern:
    return Pattern(cause, re.compile(regex), seen_in, **more)  # type: ignore[arg-type]


_SIZE = r"(?P<{0}_gib>-?[\d.]+) ?(?P<{0}_unit>[KMGT]i?B|bytes)"
_TRIED = _SIZE.format("tried_to_allocate")
_FREE_OF_TOTAL = (
    r"(?:.*?total capacity of " + _SIZE.format("total") + r" of which "
    r"(?P<free_gib>[\d.]+) (?P<free_unit>[KMGT]i?B|bytes) is free)?"
)

_OOM = (
    _p(
        FailureCause.OOM_LOAD,
        r"Failed to load model - not enough GPU memory"
        rf"(?:.*?out of memory\. Tried to allocate {_TRIED}{_FREE_OF_TOTAL})?",
        "0.13 - 0.33",
        decisive=True,
    ),
    _p(
        FailureCause.OOM_WARMUP,
        r"out of memory occurred when warming up (?:sampler|pooler) with (?P<requests>\d+) dummy",
        "0.8.5 - 0.33",
        decisive=True,
    ),
    _p(
        FailureCause.HOST_OOM,
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate "
        r"(?P<tried_to_allocate_gib>\d+) (?P<tried_to_allocate_unit>bytes)",
        "torch; CPU build of 0.32",
        also_serving=True,
    ),
    _p(
        FailureCause.OOM_RUNTIME,
        rf"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate {_TRIED}{_FREE_OF_TOTAL}",
        "torch 2.x (all)",
        decide=out_of_memory,
        also_serving=True,
    ),
    _p(
        FailureCause.OOM_RUNTIME,
        r"(?:CUDA|HIP|XPU) out of memory|(?:CUDA|HIP) (?:runtime )?error:? ?(?:\w+: )?out of memory"
        r"|Cuda failure (?:\d+ )?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED"
        r"|torch\.(?:cuda\.)?OutOfMemoryError",
        "torch, cuBLAS, NCCL (all)",
        decide=out_of_memory,
        also_serving=True,
    ),
    _p(
        FailureCause.HOST_OOM,
        r"\bOOMKilled\b|Out of memory: Killed process|SIGKILL by OOM killer"
        r"|died unexpectedly.*exit code:? -9\b|Failed core proc\(s\): \{[^}]*: -9\b"
        r"|std::bad_alloc|\[Errno 12\] Cannot allocate memory|^MemoryError\b|^Killed$",
        "kernel, Ray, Kubernetes, vLLM 0.10 - 0.33",
        also_serving=True,
        engine_dead=True,
    ),
)

_KV = (
    _p(
        FailureCause.KV_NO_BLOCKS,
        r"No available memory for the cache blocks",
        "all",
        decisive=True,
    ),
    _p(
        FailureCause.KV_TOO_SMALL,
        r"max seq len \((?P<max_model_len_tokens>\d+)\), \((?P<needed_gib>[\d.]+) Gi?B KV cache "
        r"is ?needed, which is larger than the available KV [Cc]ache memory "
        r"\((?P<available_gib>[\d.]+) Gi?B\)"
        r"(?:\. Based on the available memory,? the estimated maximum model length is "
        r"(?P<estimated_max_model_len_tokens>\d+))?",
        "0.7.3 - 0.33 (estimate from 0.8.5)",
        decisive=True,
    ),
    _p(
        FailureCause.KV_TOO_SMALL,
        r"max seq len \((?P<max_model_len_tokens>\d+)\) is larger than the maximum number of "
        r"tokens that can be stored in KV cache \((?P<estimated_max_model_len_tokens>\d+)\)",
        "0.4.3 - 0.10.2",
        decisive=True,
    ),
    _p(
        FailureCause.KV_TOO_SMALL,
        r"Cannot auto-fit max_model_len: not enough",
        "0.17 - 0.33",
        decisive=True,
    ),
    _p(
        FailureCause.STATE_BLOCKS,
        r"max_num_seqs \((?P<max_num_seqs>\d+)\) exceeds available Mamba cache blocks "
        r"\((?P<available_blocks>\d+)\)",
        "0.19 - 0.33",
        decisive=True,
    ),
)

_DEVICE = (
    _p(
        FailureCause.DEVICE_BUSY,
        r"Free memory on device (?:\S+ )?\((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) "
        r"on startup is less than (?:desired GPU memory utilization \((?P<utilization>[\d.]+), "
        r"(?P<wanted_gib>[\d.]+) GiB\)|the engine's budget)",
        "0.9.1 - 0.33",
        decide=busy_or_too_much,
        decisive=True,
    ),
    _p(
        FailureCause.HOST_OOM,
        r"Available memory on node \S+ \((?P<available_gib>-?[\d.]+)/(?P<total_gib>[\d.]+) GiB\) "
        r"on startup is less than desired CPU memory utilization \((?P<utilization>[\d.]+), "
        r"(?P<wanted_gib>[\d.]+) GiB\)",
        "CPU build of 0.32",
        decisive=True,
    ),
    _p(
        FailureCause.HOST_OOM,
        r"Available memory on node \S+ \((?P<available_gib>-?[\d.]+)/(?P<total_gib>[\d.]+) GiB\) "
        r"on kv cache allocation is less than requested memory for kv \((?P<wanted_gib>-?[\d.]+)",
        "CPU build of 0.32",
        decide=cpu_kv_request,
        decisive=True,
    ),
    _p(
        FailureCause.MEMORY_BASELINE_MOVED,
        r"Error in memory profiling\. Initial free memory"
        r"(?: (?P<initial_free_gib>[\d.]+) GiB, current free memory (?P<current_free_gib>[\d.]+))?",
        "0.5.4 - 0.33",
        decisive=True,
    ),
)

_MODEL = (
    _p(
        FailureCause.MODEL_ACCESS,
        r"You are trying to access a gated repo|GatedRepoError|Access to model .+ is restricted",
        "huggingface_hub (all)",
        decisive=True,
    ),
    _p(
        FailureCause.MODEL_NOT_FOUND,
        r"Invalid repository ID or local directory specified|is not a valid model identifier"
        r"|HFValidationError|Repo id must|Repository Not Found for url|RepositoryNotFoundError"
        r"|LocalEntryNotFoundError|RevisionNotFoundError|EntryNotFoundError"
        r"|does not appear to have a file named config\.json|couldn't connect to .*huggingface"
        r"|cannot find the requested files in the (?:local|disk) cache"
        r"|Can't load the configuration of",
        "huggingface_hub, transformers, vLLM 0.8.5 - 0.33",
        decisive=True,
    ),
    _p(
        FailureCause.MODEL_ACCESS,
        r"\b(?:401|403) Client Error",
        "huggingface_hub (all); a root that names the reason may follow",
        weight=Weight.HINT,
    ),
)

_CONFIG = (
    _p(
        FailureCause.BAD_CONFIG,
        r"error: (?:unrecognized arguments:|argument -|the following arguments are required)"
        r"|error: ambiguous option",
        "argparse (all)",
        decisive=True,
    ),
    _p(FailureCause.BAD_CONFIG, r"validation errors? for \w*Config\b", "0.8 - 0.33", decisive=True),
    _p(
        FailureCause.BAD_CONFIG,
        r"max_num_batched_tokens \((?P<max_num_batched_tokens>\d+)\) is smaller than max_model_len "
        r"\((?P<max_model_len_tokens>\d+)\)"
        r"|max_num_batched_tokens \((?P<batched_tokens>\d+)\) must be greater than or equal to "
        r"max_num_seqs \((?P<max_num_seqs>\d+)\)",
        "all",
        decisive=True,
    ),
    _p(
        FailureCause.BAD_CONFIG,
        r"max_model_len \((?P<max_model_len_tokens>\d+)\) is greater than the derived "
        r"max_model_len \(\w+=(?P<derived_max_model_len_tokens>[\d.]+)",
        "all",
        decisive=True,
    ),
    _p(
        FailureCause.BAD_CONFIG,
        r"is greater than the derived max_model_len|must be divisible by tensor parallel size"
        r"|^ValueError:.* cannot be converted to|invalid literal for int\(\) with base 10"
        r"|appears to be a URI|No common block size for",
        "all; block size: 0.32",
        decisive=True,
    ),
    _p(
        FailureCause.UNSUPPORTED,
        r"not supported in this architecture|kv-cache is not supported with fp8 checkpoints"
        r"|FP8 KV cache is not supported by"
        r"|quantization method .* is not supported for the current GPU"
        r"|Cannot re-initialize the input batch when CPU weight offloading is enabled"
        r"|CPU Offloading is currently only supported on|^NotImplementedError\b"
        r"|ModuleNotFoundError: No module named 'lmcache|is not supported on this platform",
        "all; offloading: 0.10 - 0.32",
    ),
    _p(
        FailureCause.COMPILE_CACHE,
        r"vLLM failed to compile the model|failed to get the hash of the compiled graph"
        r"|Expected tensors only, but got",
        "0.8 - 0.33",
    ),
)

_MACHINE = (
    _p(
        FailureCause.PORT_IN_USE,
        r"(?i:\[Errno 98\].*address already in use)|EADDRINUSE"
        r"|The server socket has failed to listen|(?i:^OSError:.*address already in use)",
        "uvicorn, torch (all)",
        decisive=True,
    ),
    _p(
        FailureCause.DISK_FULL,
        r"No space left on device|Disk quota exceeded|Insufficient space in /dev/shm",
        "kernel; /dev/shm: 0.32",
        also_serving=True,
    ),
    _p(
        FailureCause.NCCL,
        r"NCCL (?:error|WARN .*(?:fail|error))"
        r"|nccl(?:SystemError|InternalError|UnhandledCudaError|InvalidUsage|RemoteError)|DistBackendError|NCCL_ERROR_SYSTEM_ERROR"
        r"|Error while creating shared memory segment /dev/shm/nccl-",
        "NCCL, torch (all)",
        also_serving=True,
    ),
    _p(
        FailureCause.DEVICE_BUSY,
        r"Failed to infer device type|No CUDA GPUs are available"
        r"|CUDA driver version is insufficient",
        "all; the device cannot be had",
        decisive=True,
    ),
)

_CRASH = (
    _p(
        FailureCause.HANG,
        r"RPC call to \w+ timed out",
        "0.10 - 0.33",
        also_serving=True,
        engine_dead=True,
    ),
    _p(
        FailureCause.CRASH,
        r"illegal memory access|device-side assert triggered|unspecified launch failure"
        r"|Segmentation fault|Bus error|CUDA error: (?!out of memory)\w",
        "CUDA (all)",
        also_serving=True,
    ),
    _p(
        FailureCause.STARTUP_TIMEOUT,
        r"Timed out waiting for engine(?: core processes|s) to (?:start|send)"
        r"|Did not receive response from front-end process within",
        "0.10 - 0.33",
        weight=Weight.HINT,
        decisive=True,
    ),
    _p(
        FailureCause.CRASH,
        r"EngineCore encountered a fatal error|Engine background task failed|EngineDeadError"
        r"|EngineCore encountered an issue|Background loop has errored already"
        r"|MQLLMEngine is already dead|AsyncEngineDeadError",
        "0.4 - 0.33",
        weight=Weight.WRAPPER,
        decisive=True,
        engine_dead=True,
        also_serving=True,
    ),
    _p(
        FailureCause.CRASH,
        r"died unexpectedly|Dumping input data for V1 LLM engine",
        "0.8.5 - 0.33; also after every failed start",
        weight=Weight.WRAPPER,
        also_serving=True,
    ),
    _p(
        FailureCause.UNKNOWN,
        r"Engine process failed to start|EngineCore hit an exception|EngineCore failed to start"
        r"|Engine core initialization failed|Failed core proc\(s\)|WorkerProc initialization failed"
        r"|WorkerProc failed to start|Worker failed with error",
        "0.6.3 - 0.33",
        weight=Weight.WRAPPER,
        decisive=True,
    ),
    _p(
        FailureCause.UNKNOWN,
        r"Error executing method|Exception in worker \S+ while processing method",
        "to 0.29",
        weight=Weight.WRAPPER,
    ),
)

PATTERNS: tuple[Pattern, ...] = (*_OOM, *_KV, *_DEVICE, *_MODEL, *_CONFIG, *_MACHINE, *_CRASH)

HARMLESS = re.compile(
    r"OOM detected, falling back"  # the autotuner tries kernels that may not fit
    r"|CUDA graphs can take additional|If you are running out of memory"
    r"|If out-of-memory error occurs|If OOM'ed"
    r"|Possibly too large swap space|Token indices sequence length is longer"
    r"|destroy_process_group\(\) was not called|leaked (?:shared_memory|semaphore) objects"
    r"|on startup\. Desired GPU memory utilization is"  # the summary after success
    r"|HTTP/1\.1\""  # an access log holds what clients sent
    r"|Received request|Generated response|RuntimeError: cancelled"
    r"|nanobind: leaked|\[Errno 24\] Too many open files"
    r"|CUDA error: invalid device ordinal.*WARNING"
)
