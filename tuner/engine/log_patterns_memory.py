"""Wordings about memory: of the device, of the host, and of the KV cache."""

from __future__ import annotations

import re

from tuner.engine.log_context import busy_or_too_much, cpu_kv_request, out_of_memory
from tuner.engine.log_pattern import Weight, pattern
from tuner.types import FailureCause

_SIZE = r"(?P<{0}_gib>-?[\d.]+) ?(?P<{0}_unit>[KMGT]i?B|bytes)"

_OOM_DETAILS = tuple(
    re.compile(regex)
    for regex in (
        r"Tried to allocate " + _SIZE.format("tried_to_allocate"),
        # torch 2.1 spells it "capacty". XPU does not tell what is free.
        r"GPU (?P<device_index>\d+) has a total capaci?ty of "
        + _SIZE.format("total")
        + r"(?: of which "
        + _SIZE.format("free")
        + r" is free)?",
        # torch before 2.1; "cached" before 1.4
        r"\(GPU (?P<device_index>\d+); " + _SIZE.format("total") + r" total capacity",
        r"; " + _SIZE.format("allocated") + r" already allocated",
        r"; " + _SIZE.format("free") + r" free[;)]",
        r"; " + _SIZE.format("reserved") + r" (?:reserved in total by PyTorch|cached)",
        r"this process has " + _SIZE.format("in_use") + r" memory in use",
        r"Of the allocated memory " + _SIZE.format("allocated") + r" is allocated by PyTorch",
        _SIZE.format("reserved_unallocated") + r" is reserved by PyTorch but unallocated",
    )
)
"""What torch adds to its message, in every form since 1.13; any of it may be cut off."""

OOM = (
    pattern(
        FailureCause.OOM_LOAD,
        r"Failed to load model - not enough GPU memory",
        "0.13 - 0.33",
        details=_OOM_DETAILS,
        decisive=True,
    ),
    pattern(
        FailureCause.OOM_WARMUP,
        r"out of memory occurred when warming up (?:sampler|pooler) with (?P<requests>\d+) dummy",
        "0.8.5 - 0.33",
        decisive=True,
        refines=True,
    ),
    pattern(
        FailureCause.HOST_OOM,
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate "
        r"(?P<tried_to_allocate_gib>\d+) (?P<tried_to_allocate_unit>bytes)",
        "torch; CPU build of 0.32",
        also_serving=True,
    ),
    pattern(
        FailureCause.OOM_RUNTIME,
        r"(?:CUDA|HIP|XPU) out of memory|(?:CUDA|HIP) (?:runtime )?error:? ?(?:\w+: )?out of memory"
        r"|(?:Cuda|Hip) failure (?:\d+ )?'out of memory'|Cuda failure 2\b"
        r"|CUBLAS_STATUS_ALLOC_FAILED|torch\.(?:cuda\.)?OutOfMemoryError|cudaErrorMemoryAllocation",
        "torch, cuBLAS, NCCL (all)",
        details=_OOM_DETAILS,
        decide=out_of_memory,
        also_serving=True,
    ),
    pattern(
        FailureCause.HOST_OOM,
        r"\bOOMKilled\b|[Oo]ut of memory: Killed process|SIGKILL by OOM killer"
        r"|killed due to the node running low on memory|oom-kill:constraint|oom_reaper: reaped"
        r"|died unexpectedly.*exit code:? -9\b|Failed core proc\(s\): \{[^}]*: -9\b"
        r"|std::bad_alloc|\[Errno 12\] Cannot allocate memory|^MemoryError\b|^Killed$"
        r"|: line \d+:\s+\d+ Killed\b|Command terminated by signal 9|Exit Code:\s+137\b",
        "kernel, Ray, Kubernetes, shells, vLLM 0.10 - 0.33",
        also_serving=True,
        engine_dead=True,
    ),
)

KV = (
    pattern(
        FailureCause.KV_NO_BLOCKS,
        r"No available memory for the cache blocks",
        "all",
        decisive=True,
        also_serving=True,
    ),
    pattern(
        FailureCause.KV_TOO_SMALL,
        r"max seq len \((?P<max_model_len_tokens>\d+)\),? \(?(?P<needed_gib>-?[\d.]+) Gi?B KV "
        r"cache is ?needed, which is larger than the available KV [Cc]ache memory "
        r"\((?P<available_gib>-?[\d.]+) Gi?B\)"
        r"(?:\. Based on the available memory,? the estimated maximum model length is "
        r"(?P<estimated_max_model_len_tokens>\d+))?",
        "0.7.3 - 0.33 (estimate from 0.8.5)",
        decisive=True,
        also_serving=True,
    ),
    pattern(
        FailureCause.KV_TOO_SMALL,
        r"max seq len \((?P<max_model_len_tokens>\d+)\) is larger than the maximum number of "
        r"tokens that can be stored in KV cache \((?P<estimated_max_model_len_tokens>\d+)\)",
        "0.4.3 - 0.10.2",
        decisive=True,
        also_serving=True,
    ),
    pattern(
        FailureCause.KV_TOO_SMALL,
        r"KV cache is ?needed, which is larger than the available KV [Cc]ache memory",
        "0.7.3 - 0.33, where a viewer has cut the line",
        decisive=True,
    ),
    pattern(
        FailureCause.KV_TOO_SMALL,
        r"Cannot auto-fit max_model_len: not enough",
        "0.17 - 0.33",
        decisive=True,
    ),
    pattern(
        FailureCause.KV_TOO_SMALL,
        r"Input prompt \((?P<prompt_tokens>\d+) tokens\).* is too long and exceeds the capacity of "
        r"block_manager",
        "to 0.10; a request that can never be served is dropped, with a warning",
        weight=Weight.HINT,
        also_serving=True,
        any_level=True,
    ),
    pattern(
        FailureCause.KV_TOO_SMALL,
        r"Aborted due to the lack of CPU swap space",
        "to 0.10",
        also_serving=True,
        engine_dead=True,
    ),
    pattern(
        FailureCause.STATE_BLOCKS,
        r"max_num_seqs \((?P<max_num_seqs>\d+)\) exceeds available Mamba cache blocks "
        r"\((?P<available_blocks>\d+)\)",
        "0.19 - 0.33",
        details=(re.compile(r"lower max_num_seqs to at most (?P<max_num_seqs_limit>\d+)"),),
        aliases={"max_num_seqs_limit": "available_blocks"},
        decisive=True,
    ),
)

DEVICE = (
    pattern(
        FailureCause.DEVICE_BUSY,
        r"Free memory on device (?:\S+ )?\((?P<free_gib>-?[\d.]+)/(?P<total_gib>[\d.]+) GiB\) "
        r"on startup is less than (?:desired \w+ memory utilization \((?P<utilization>[\d.]+), "
        r"(?P<wanted_gib>[\d.]+) GiB\)|the engine's budget)",
        "0.9.1 - 0.33",
        details=(re.compile(r"Free memory on device \w+:(?P<device_index>\d+) "),),
        decide=busy_or_too_much,
        decisive=True,
    ),
    pattern(
        FailureCause.HOST_OOM,
        r"Available memory on node \S+ \((?P<available_gib>-?[\d.]+)/(?P<total_gib>[\d.]+) GiB\) "
        r"on startup is less than desired CPU memory utilization \((?P<utilization>[\d.]+), "
        r"(?P<wanted_gib>[\d.]+) GiB\)",
        "CPU build of 0.32",
        decisive=True,
    ),
    pattern(
        FailureCause.HOST_OOM,
        r"Available memory on node \S+ \((?P<available_gib>-?[\d.]+)/(?P<total_gib>[\d.]+) GiB\) "
        r"on kv cache allocation is less than requested memory for kv \((?P<wanted_gib>-?[\d.]+)",
        "CPU build of 0.32",
        decide=cpu_kv_request,
        decisive=True,
    ),
    pattern(
        FailureCause.MEMORY_BASELINE_MOVED,
        r"Error in memory profiling\. Initial free memory",
        "0.5.4 - 0.33; in bytes to 0.8",
        details=(
            re.compile(
                r"Initial free memory (?P<initial_free_gib>-?[\d.]+)"
                r"(?: ?(?P<initial_free_unit>[KMGT]i?B))?, current free memory "
                r"(?P<current_free_gib>-?[\d.]+)(?: ?(?P<current_free_unit>[KMGT]i?B))?"
            ),
        ),
        decisive=True,
    ),
)
