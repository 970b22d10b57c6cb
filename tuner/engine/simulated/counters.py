"""What the simulated engine counts, for /metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended, as vLLM's metrics name it."""

    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class EngineCounters:
    """Counters since the start, and gauges of the last step.

    Attributes:
        prompt_tokens: of requests that got their first token.
        prefix_queries_tokens, prefix_hits_tokens: looked up in the prefix cache and found;
            without preempted requests, as vLLM counts.
        host_queries_tokens, host_hits_tokens: likewise of the host tier.
        iterations: steps; `iteration_tokens` are the prompt and generation tokens of all of
            them, without recomputed ones, as vLLM counts.
        kv_usage: share of the blocks in use.
    """

    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    host_queries_tokens: int = 0
    host_hits_tokens: int = 0
    iterations: int = 0
    iteration_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
