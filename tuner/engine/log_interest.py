"""Which raw lines need a full look: a log of a busy server is nearly all something else.

Each expression is a plain alternation of literals, which `re` searches at some hundred MB/s;
the tables behind it would read ten. A line that tells of a failure, a stage or a fact must
match the one for where the server is (`tests/test_log_corpus.py` checks it).
"""

from __future__ import annotations

import re


def _any(*words: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)))


_ALWAYS = ("ERROR", "CRITICAL", "WARNING", "Traceback", "Avg prompt", "No available", "version ")
_STOPPING = (
    *("Shutting", "[shutdown]", "Application sh", "for application sh", "SIG", "eceived signal"),
    *("KeyboardI", "Finished server", "Gracefully"),
)

TELLING = _any(
    *("CUDA", "Cuda", "HIP ", "Hip ", "XPU ", "CUBLAS", "OutOfMem", "OOM", "emory", "oom", "illed"),
    *("warming up", "bad_alloc", "xpectedly", "core proc", "line ", "Command", "Exit Code", "KV "),
    *("cache blocks", "seq len", "auto-fit", "block_manager", "swap space", "gated", "Gated"),
    *("Access to", "epository", "epo id", "valid model", "HFValid", "EntryNot", "RevisionNot"),
    *("config.json", "connect to", "cannot find", "load the conf", "model weights", "Client Err"),
    *("unrecognized", "error: ", "validation err", "max_num_batched", "max_model_len", "divisible"),
    *("cannot be conv", "invalid literal", "a URI", "No common", "available GPUs", "supported"),
    *("re-initialize", "NotImpl", "lmcache", "kernel image", "ailed to", "tensors only"),
    *("torch_compile", "ddress already", "EADDR", "server socket", "NCCL", "nccl", "left on dev"),
    *("quota", "Insufficient", "emote process", "Connection", "Watchdog", "DistBackend", "device"),
    *("RPC call", "illegal mem", "assert trig", "launch fail", "Segment", "Bus err", "ECC"),
    *("imed out", "front-end", "EngineCore", "Engine ", "EngineDead", "Background loop", "MQLLM"),
    *(
        "engine core",
        "Dumping",
        "initialization f",
        "orker failed",
        "executing method",
        "in worker",
    ),
    *("hit an exc", "cudaError", "Mamba"),
)
"""Some part of every wording in `tuner.engine.log_patterns`."""

SERVING = _any(
    *_ALWAYS,
    *_STOPPING,
    *("Error", "Exception", 'File "', "Killed", "killed due", "OOM", "Out of memory", "CUDA"),
    *("Cuda", "HIP ", "XPU ", "CUBLAS", "Segmentation", "Bus e", "bad_alloc", "xpectedly"),
    *("NCCL", "Watchdog", "Connection", "RPC call", "Timed out", "KV cache", "Input prompt"),
    *("Aborted due", "No space left", "Disk quota", "Insufficient space", "MQLLM", "Dumping"),
    *("Engine background", "EngineCore enc", "Engine loop", "Background loop", "Exit Code"),
    *("Command term", "DefaultCPU", "Remote process", "remote process", "Hip f", "Hip e"),
    *("Waiting for", "oom_reaper", "oom-kill:", "EADDRINUSE", "ECC error"),
    *("device-side", "unspecified launch", "illegal memory"),
)
"""While the server serves, and no failure is known. Words that begin with a rare character are
found fastest."""

SERVING_INFO = _any(*_ALWAYS, *_STOPPING, "Waiting for")
"""The same, of what vLLM itself calls information."""

SETTLED = _any("startup complete", "Uvicorn running", "warming up", "version ")
"""Once the cause is known and nothing can be recovered."""

STARTING_INFO = _any(
    *_ALWAYS,
    *("Error", "exceeds", "Loading", "Model loading", "Initializing model", "Using model weights"),
    *("Starting to load", "Starting profile", "Start compiling", "Dynamo", "Compiling"),
    *("torch.compile", "Graph", "KV ", "blocks:", "Memory prof", "apturing", "init engine"),
    *("Application startup", "Uvicorn", "POST /", "took ", "takes ", "ersion", "LLM engine"),
    *("model len", "max_model_len", "No available", "Waiting for", "Still waiting", '{"', "\\n"),
)
"""While the server starts, of what vLLM itself calls information: stages and facts too."""

_OWN_INFO = re.compile(r"(?:INFO|DEBUG) \d\d-\d\d \d\d:")


def dull_while_starting(raw: str) -> str | None:
    """The message of a starting server's line of information, if it tells nothing else."""
    stamp = _OWN_INFO.search(raw, 0, 160)
    if stamp is None or STARTING_INFO.search(raw):
        return None
    return raw[raw.find("] ", stamp.end()) + 1 :]


def is_dull_while_serving(raw: str) -> bool:
    """Whether a serving server's line is none of those that count."""
    if raw.endswith(" OK") and raw.startswith("INFO:  "):  # an access log line
        return True
    if _OWN_INFO.search(raw, 0, 160):
        return SERVING_INFO.search(raw) is None
    return SERVING.search(raw) is None
