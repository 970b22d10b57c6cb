"""The wordings by which vLLM's failures are recognised: one table, in the order it is asked.

The first entry that matches a line decides it. Each names the releases whose source, or what
else, the wording was seen in ("all": vLLM 0.4 to 0.33). How the table is read:
`tuner.engine.log_causes`; its entries: `tuner.engine.log_patterns_memory` and
`tuner.engine.log_patterns_other`.
"""

from __future__ import annotations

import re

from tuner.engine.log_pattern import Pattern, Weight
from tuner.engine.log_patterns_memory import DEVICE, KV, OOM
from tuner.engine.log_patterns_other import CONFIG, CRASH, MACHINE, MODEL

__all__ = ["HARMLESS", "NOISE", "PATTERNS", "Pattern", "Weight"]

PATTERNS: tuple[Pattern, ...] = (*OOM, *KV, *DEVICE, *MODEL, *CONFIG, *MACHINE, *CRASH)

HARMLESS = re.compile(
    r"OOM detected, falling back|[Aa]uto[Tt]uner\]?:? .*(?:OOM|out of memory)"  # kernels are tried
    r"|Skipping tactic"
    r"|CUDA graphs can take additional|If you are running out of memory"
    r"|If out-of-memory error occurs|If OOM'ed"
    r"|Possibly too large swap space|Token indices sequence length is longer"
    r"|destroy_process_group\(\) was not called|leaked (?:shared_memory|semaphore) objects"
    r"|on startup\. Desired GPU memory utilization is"  # the summary after success
    r"|HTTP/1\.[01]\""  # an access log holds what clients sent
    r"|Received request|Generated response|prompt: ['\"]|Added request"
    r"|RuntimeError: cancelled|CancelledError|non-default args:|with config: model="
    r"|is preempted by PreemptionMode|Preemptions detected"
    r"|nanobind: leaked|\[Errno 24\] Too many open files"
    r"|CUDA error: invalid device ordinal.*WARNING"
)
"""What is no failure although it holds words of one."""

NOISE = re.compile(
    r"BrokenPipeError|ConnectionResetError|ConnectionRefusedError|CancelledError"
    r"|KeyboardInterrupt|SystemExit|EngineDeadError|AsyncEngineDeadError|zmq\.error|EOFError"
    r"|ProcessLookupError|Failed core proc|Engine core initialization failed"
    r"|Engine process failed to start|WorkerProc initialization failed|Worker failed with error"
)
"""Exceptions of those that are left when another process has died."""
