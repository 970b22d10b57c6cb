"""The command line and the engine of the stand-in; see `fake_vllm.py`."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

FAULTS = {
    "hang_start": "never becomes ready",
    "slow_ready": "/health is 200 for 0.7 s before a completion works",
    "die_after_ready_rc0": "the engine dies 0.3 s after readiness; the process exits 0",
    "engine_dead": "the engine dies 0.3 s after readiness; the process stays, /health is 503",
    "oom_under_load": "out of memory after some completions; then the process exits 0",
    "killed_under_load": "SIGKILL after some completions",
    "server_error": "every completion is answered with a 500",
    "ignore_term": "SIGTERM and SIGINT have no effect",
    "bad_flag": "exit 2: unrecognized arguments",
    "port_in_use": "exit 1: address already in use",
    "model_missing": "exit 1: the model is not found",
    "oom_load": "exit 1: out of memory while loading",
    "oom_profile": "exit 1: out of memory in the profile run",
    "killed": "SIGKILL while loading, as the kernel's out-of-memory killer does",
}
VERSION = os.environ.get("FAKE_VLLM_VERSION", "0.32.0")
KV_BYTES_PER_TOKEN = 4096
DEVICE_BYTES = 2**30
WEIGHT_BYTES = 0.3 * 2**30
DERIVED_MAX_LEN = 8192
CACHE_DTYPES = ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
SIZE_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def fault(name: str) -> bool:
    """Whether FAKE_VLLM_FAULT asks for this fault."""
    return name in os.environ.get("FAKE_VLLM_FAULT", "").split(",")


def say(text: str, tag: str = "(EngineCore pid=4242)", level: str = "INFO") -> None:
    """Print log lines as vLLM does."""
    for line in text.splitlines():
        print(f"{tag} {level} 09-18 12:00:00 [fake.py:1] {line}".strip(), flush=True)


def give_up(root: str, tag: str = "(EngineCore pid=4242)", frames: str = "") -> NoReturn:
    """End as vLLM does when its engine does not start: the cause first, then the wrapper."""
    say(
        f"EngineCore failed to start.\nTraceback (most recent call last):\n{frames}{root}",
        tag,
        "ERROR",
    )
    say("Traceback (most recent call last):", "(APIServer pid=4241)")
    print(
        "(APIServer pid=4241) RuntimeError: Engine core initialization failed. "
        "See root cause above. Failed core proc(s): {'EngineCore': 1}",
        flush=True,
    )
    sys.exit(1)


def refuse(model: str, message: str) -> NoReturn:
    """End as vLLM does when its configuration check refuses."""
    print("(APIServer pid=4241) Traceback (most recent call last):")
    print(
        f"(APIServer pid=4241) pydantic_core._pydantic_core.ValidationError: "
        f"1 validation error for {model}\n  {message}",
        flush=True,
    )
    sys.exit(1)


# --- the command line ------------------------------------------------------------------


def size(text: str) -> int:
    """`64M` (2^20) and `64m` (10^6), as vLLM reads sizes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"invalid size {text!r}")
    return int(float(match[1]) * SIZE_UNITS.get(match[2], 1))


def parser() -> argparse.ArgumentParser:
    """The flags that the stand-in knows; those without an effect are accepted."""
    parse = argparse.ArgumentParser(prog="vllm serve")
    parse.add_argument("model_tag", nargs="?")
    parse.add_argument("--config")
    parse.add_argument("--host", default="127.0.0.1")
    parse.add_argument("--max-model-len", default=str(DERIVED_MAX_LEN))
    parse.add_argument("--kv-cache-memory-bytes", type=size)
    parse.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parse.add_argument("--kv-cache-dtype", choices=CACHE_DTYPES, default="auto")
    parse.add_argument("--served-model-name", nargs="+")
    parse.add_argument("--compilation-config", "-cc", type=json.loads)
    parse.add_argument("--cudagraph-capture-sizes", nargs="+", type=int)
    for name, default in (
        ("port", 8000),
        ("max-num-seqs", 256),
        ("max-num-batched-tokens", 2048),
        ("block-size", 16),
        ("seed", 0),
        ("tensor-parallel-size", 1),
    ):
        parse.add_argument(f"--{name}", type=int, default=default)
    for name in ("dtype", "load-format", "tokenizer", "api-key"):
        parse.add_argument(f"--{name}", default="auto" if name != "api-key" else None)
    for name in ("kv-offloading-size", "cpu-offload-gb"):
        parse.add_argument(f"--{name}", type=float)
    for name in (
        "enforce-eager",
        "enable-prefix-caching",
        "enable-chunked-prefill",
        "disable-uvicorn-access-log",
        "trust-remote-code",
    ):
        parse.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    return parse


def config_argv(path: str) -> list[str]:
    """The flags of a `--config` file; `key: false` is dropped, as vLLM drops it."""
    import yaml

    argv: list[str] = []
    for key, value in yaml.safe_load(Path(path).read_text()).items():
        flag = "--" + key.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif isinstance(value, list):
            argv += [flag, *map(str, value)]
        elif value is not False:
            argv += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return argv


def parse_command_line(argv: list[str]) -> argparse.Namespace:
    """vLLM's own way: exit 2 with its words for what it does not know."""
    if argv[:1] == ["--version"]:
        print(VERSION)
        sys.exit(0)
    rest = [re.sub(r"^--[^=]+", lambda m: m[0].replace("_", "-"), arg) for arg in argv[1:]]
    if "--config" in rest:
        at = rest.index("--config")
        rest[at : at + 2] = config_argv(rest[at + 1])
    if fault("bad_flag"):
        rest.append("--no-such-flag")
    args, unknown = parser().parse_known_args(rest)
    if argv[:1] != ["serve"] or unknown:
        print(
            f"vllm: error: unrecognized arguments: {' '.join(unknown or argv[:1])}", file=sys.stderr
        )
        sys.exit(2)
    return args


# --- the engine ------------------------------------------------------------------------


@dataclass
class Engine:
    """What the configuration comes to, and what has happened since."""

    model: str
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    block_size: int
    cache_dtype: str
    dead: bool = False
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    kv_used: int = 0
    seen: set[int] = field(default_factory=set)
    ready_at: float = 0.0


def check(args: argparse.Namespace) -> int:
    """vLLM's configuration check; the context length it comes to (-1: to be fitted)."""
    wanted = -1 if args.max_model_len in ("auto", "-1") else int(args.max_model_len)
    for name, value, least in (
        ("max_num_seqs", args.max_num_seqs, 1),
        ("max_num_batched_tokens", args.max_num_batched_tokens, 1),
    ):
        if value < least:
            refuse("SchedulerConfig", f"{name}\n  Input should be greater than or equal to 1")
    if not 0 < args.gpu_memory_utilization <= 1:
        refuse("CacheConfig", "gpu_memory_utilization\n  Input should be less than or equal to 1")
    if wanted > DERIVED_MAX_LEN:
        refuse(
            "ModelConfig",
            f"Value error, User-specified max_model_len ({wanted}) is greater than "
            f"the derived max_model_len (max_position_embeddings={DERIVED_MAX_LEN}.0)",
        )
    if args.max_num_batched_tokens < args.max_num_seqs:
        refuse(
            "SchedulerConfig",
            f"Value error, max_num_batched_tokens ({args.max_num_batched_tokens}) "
            f"must be greater than or equal to max_num_seqs ({args.max_num_seqs}).",
        )
    if args.enable_chunked_prefill is False and args.max_num_batched_tokens < wanted:
        refuse(
            "SchedulerConfig",
            f"Value error, max_num_batched_tokens ({args.max_num_batched_tokens}) "
            f"is smaller than max_model_len ({wanted}).",
        )
    return wanted


def out_of_memory(args: argparse.Namespace) -> None:
    """Out-of-memory ends while starting, on request or from too many sequences."""
    oom = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        "total capacity of 1.00 GiB of which 512.00 MiB is free."
    )
    if fault("oom_load"):
        give_up(oom, frames='  File "model_loader/base_loader.py", line 1, in load_model\n')
    if fault("oom_profile"):
        say("Model loading took 0.30 GiB memory and 0.1 seconds")
        give_up(oom, frames='  File "gpu_worker.py", line 1, in determine_available_memory\n')
    if args.max_num_seqs >= 2048:
        give_up(
            "RuntimeError: CUDA out of memory occurred when warming up sampler with "
            f"{args.max_num_seqs} dummy requests. Please try lowering `max_num_seqs` or "
            "`gpu_memory_utilization` when initializing the engine."
        )


def start_engine(args: argparse.Namespace) -> Engine:
    """Load, size the KV cache, refuse what does not fit."""
    wanted = check(args)
    say(f"Starting to load model {args.model_tag}...", "(Worker pid=4243)")
    if fault("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    while fault("hang_start"):
        time.sleep(0.05)
    out_of_memory(args)
    kv_bytes = args.kv_cache_memory_bytes
    if kv_bytes is None:
        kv_bytes = args.gpu_memory_utilization * DEVICE_BYTES - WEIGHT_BYTES
    per_token = KV_BYTES_PER_TOKEN // (2 if args.kv_cache_dtype.startswith("fp8") else 1)
    blocks = int(kv_bytes // (per_token * args.block_size)) - 1
    say("Model loading took 0.30 GiB memory and 0.1 seconds", "(Worker pid=4243)")
    say(f"Available KV cache memory: {kv_bytes / 2**30:.2f} GiB", "(Worker pid=4243)")
    if blocks <= 0:
        give_up(
            "ValueError: No available memory for the cache blocks. Try increasing "
            "`gpu_memory_utilization` when initializing the engine."
        )
    tokens = blocks * args.block_size
    length = min(tokens, DERIVED_MAX_LEN) if wanted < 0 else wanted
    if tokens < length:
        give_up(
            f"ValueError: To serve at least one request with the model's max seq len ({length}), "
            f"({length * per_token / 2**30:.2f} GiB KV cache is needed, which is larger than the "
            f"available KV cache memory ({kv_bytes / 2**30:.2f} GiB). Based on the available "
            f"memory, the estimated maximum model length is {tokens}. Try increasing "
            "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
        )
    say(
        f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for {length:,} tokens per "
        f"request: {tokens / length:.2f}x"
    )
    say("Graph capturing finished in 1 secs, took 0.05 GiB", "(Worker pid=4243)")
    time.sleep(float(os.environ.get("FAKE_VLLM_START_S", "0.05")))
    say("init engine (profile, create kv cache, warmup model) took 0.10 s")
    names = args.served_model_name or [args.model_tag]
    return Engine(names[0], length, args.max_num_seqs, tokens, args.block_size, args.kv_cache_dtype)
