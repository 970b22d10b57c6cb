"""Wordings about the model, the configuration, the machine, and engines that died."""

from __future__ import annotations

from tuner.engine.log_context import nccl
from tuner.engine.log_pattern import Weight, pattern
from tuner.types import FailureCause

MODEL = (
    pattern(
        FailureCause.MODEL_ACCESS,
        r"You are trying to access a gated repo|GatedRepoError|Access to model .+ is restricted",
        "huggingface_hub (all)",
        decisive=True,
    ),
    pattern(
        FailureCause.MODEL_NOT_FOUND,
        r"Invalid repository ID or local directory specified|is not a valid model identifier"
        r"|HFValidationError|Repo id must|Repository Not Found for url|RepositoryNotFoundError"
        r"|LocalEntryNotFoundError|RevisionNotFoundError|EntryNotFoundError"
        r"|does not appear to have a file named config\.json|couldn't connect to .*huggingface"
        r"|cannot find the requested files in the (?:local|disk) cache"
        r"|Can't load the configuration of|Cannot find any model weights with",
        "huggingface_hub, transformers, vLLM 0.8.5 - 0.33",
        decisive=True,
    ),
    pattern(
        FailureCause.MODEL_ACCESS,
        r"\b(?:401|403) Client Error",
        "huggingface_hub (all); a root that names the reason may follow",
        weight=Weight.HINT,
    ),
)

CONFIG = (
    pattern(
        FailureCause.BAD_CONFIG,
        r"error: (?:unrecognized arguments:|argument -|the following arguments are required)"
        r"|error: ambiguous option",
        "argparse (all)",
        decisive=True,
    ),
    pattern(
        FailureCause.BAD_CONFIG,
        r"validation errors? for \w*(?:Config|Args)\b",
        "0.8 - 0.33",
        decisive=True,
    ),
    pattern(
        FailureCause.BAD_CONFIG,
        r"max_num_batched_tokens \((?P<max_num_batched_tokens>\d+)\) is smaller than max_model_len "
        r"\((?P<max_model_len_tokens>\d+)\)"
        r"|max_num_batched_tokens \((?P<batched_tokens>\d+)\) must be greater than or equal to "
        r"max_num_seqs \((?P<max_num_seqs>\d+)\)",
        "all",
        decisive=True,
    ),
    pattern(
        FailureCause.BAD_CONFIG,
        r"max_model_len \((?P<max_model_len_tokens>\d+)\) is greater than the derived "
        r"max_model_len \(\w+=(?P<derived_max_model_len_tokens>[\d.]+)",
        "all",
        decisive=True,
    ),
    pattern(
        FailureCause.BAD_CONFIG,
        r"is greater than the derived max_model_len|must be divisible by tensor parallel size"
        r"|^ValueError:.* cannot be converted to|invalid literal for int\(\) with base 10"
        r"|appears to be a URI|No common block size for"
        r"|is larger than the number of available GPUs|exceeds the total number of available GPUs"
        r"|CUDA error: invalid device ordinal",
        "all; block size: 0.32",
        decisive=True,
    ),
    pattern(
        FailureCause.UNSUPPORTED,
        r"not supported in this architecture|kv-cache is not supported with fp8 checkpoints"
        r"|FP8 KV cache is not supported by"
        r"|quantization method .* is not supported for the current GPU"
        r"|Cannot re-initialize the input batch when CPU weight offloading is enabled"
        r"|CPU Offloading is currently only supported on|^NotImplementedError\b"
        r"|ModuleNotFoundError: No module named 'lmcache|is not supported on this platform"
        r"|Model architectures .* are not supported|no kernel image is available for execution"
        r"|Bfloat16 is only supported on GPUs with compute capability",
        "all; offloading: 0.10 - 0.32",
    ),
    pattern(
        FailureCause.COMPILE_CACHE,
        r"vLLM failed to compile the model|failed to get the hash of the compiled graph"
        r"|Expected tensors only, but got|No such file or directory: '[^']*torch_compile_cache",
        "0.8 - 0.33",
    ),
)

MACHINE = (
    pattern(
        FailureCause.PORT_IN_USE,
        r"(?i:\[Errno 98\].*address already in use)|EADDRINUSE"
        r"|The server socket has failed to listen|(?i:^OSError:.*address already in use)",
        "uvicorn, torch (all)",
        decisive=True,
    ),
    pattern(
        FailureCause.NCCL,
        r"Error while creating shared memory segment /dev/shm/nccl-",
        "NCCL (all); goes on with what the kernel says",
        also_serving=True,
    ),
    pattern(
        FailureCause.DISK_FULL,
        r"No space left on device|Disk quota exceeded|Insufficient space in /dev/shm",
        "kernel; /dev/shm: 0.32",
        also_serving=True,
    ),
    pattern(
        FailureCause.NCCL,
        r"ncclRemoteError|[Rr]emote process exited or there was a network error"
        r"|Connection (?:closed|reset) by (?:remote )?peer|NCCL WARN .*(?i:fail|error|unable)"
        r"|Failed to load NCCL library|Watchdog caught collective operation timeout",
        "NCCL, torch (all); what is left says so when another rank has died",
        weight=Weight.HINT,
        decide=nccl,
        also_serving=True,
    ),
    pattern(
        FailureCause.NCCL,
        r"NCCL error"
        r"|nccl(?:SystemError|InternalError|UnhandledCudaError|InvalidUsage)|DistBackendError"
        r"|NCCL_ERROR_SYSTEM_ERROR",
        "NCCL, torch (all)",
        decide=nccl,
        also_serving=True,
    ),
    pattern(
        FailureCause.DEVICE_BUSY,
        r"Failed to infer device type|No CUDA GPUs are available"
        r"|CUDA driver version is insufficient|CUDA-capable device\(s\) is/are busy or unavailable"
        r"|all CUDA-capable devices are busy",
        "all; the device cannot be had",
        decisive=True,
    ),
)

CRASH = (
    pattern(
        FailureCause.HANG,
        r"RPC call to \w+ timed out",
        "0.10 - 0.33",
        also_serving=True,
        engine_dead=True,
    ),
    pattern(
        FailureCause.CRASH,
        r"illegal memory access|device-side assert triggered|unspecified launch failure"
        r"|cudaErrorIllegalAddress|Segmentation fault|Bus error|CUDA error: (?!out of memory)\w"
        r"|uncorrectable ECC error",
        "CUDA (all)",
        also_serving=True,
    ),
    pattern(
        FailureCause.STARTUP_TIMEOUT,
        r"Timed out waiting for engine(?: core processes|s) to (?:start|send)"
        r"|Did not receive response from front-end process within",
        "0.10 - 0.33",
        weight=Weight.HINT,
        decisive=True,
    ),
    pattern(
        FailureCause.CRASH,
        r"EngineCore encountered a fatal error|Engine background task failed|EngineDeadError"
        r"|EngineCore encountered an issue|Background loop has errored already"
        r"|MQLLMEngine is already dead|engine core exited unexpectedly|Engine loop has died",
        "0.4 - 0.33",
        weight=Weight.WRAPPER,
        decisive=True,
        engine_dead=True,
        also_serving=True,
    ),
    pattern(
        FailureCause.CRASH,
        r"died unexpectedly|Dumping input data for V1 LLM engine",
        "0.8.5 - 0.33; also after every failed start",
        weight=Weight.WRAPPER,
        also_serving=True,
    ),
    pattern(
        FailureCause.UNKNOWN,
        r"Engine process failed to start|EngineCore hit an exception|EngineCore failed to start"
        r"|Engine core initialization failed|Failed core proc\(s\)|WorkerProc initialization failed"
        r"|WorkerProc failed to start|Worker failed with error",
        "0.6.3 - 0.33",
        weight=Weight.WRAPPER,
        decisive=True,
    ),
    pattern(
        FailureCause.UNKNOWN,
        r"Error executing method|Exception in worker \S+ while processing method"
        r"|WorkerProc hit an exception",
        "to 0.29",
        weight=Weight.WRAPPER,
    ),
)
