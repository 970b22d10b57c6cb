"""What to do where a failure is known, and what brought it about is not quite."""

from __future__ import annotations

from collections.abc import Iterator

from tuner.engine.advice import advice
from tuner.engine.failed_case import Case, halved, less_memory
from tuner.types import EngineConfig, Failure

NOTHING_TO_READ = (
    "get the log of the run that ended: docker compose logs vllm, kubectl logs --previous",
    "look whether stderr went into it too: 2>&1",
    "tell the exit code: --exit-code N; it says what a silent end was",
)
"""For a log that is empty."""

WRONG_LOG = (
    "give the log of the vLLM server itself: docker compose logs vllm, kubectl logs --previous",
    *NOTHING_TO_READ[1:],
)
"""For a text that is none of vLLM's."""

_SIGNALS_FROM = 128
"""A shell or a container reports signal n as 128 + n."""

_INCOMPLETE = (
    "look whether the log is complete: the lines just before the end count, and stderr belongs "
    "to it (2>&1)",
    "in Kubernetes, take the run that ended: kubectl logs --previous",
)


def out_of_memory_in_a_part(failure: Failure, config: EngineConfig | None) -> tuple[str, ...]:
    """For device memory that ran out in a phase that the part of the log does not tell.

    What all of them have in common; weights alone want something else.
    """
    return tuple(_in_a_part(Case(failure, config)))


def _in_a_part(case: Case) -> Iterator[str]:
    yield "give the whole log: its first lines tell the phase, and with it what helps best"
    yield from less_memory(case, reason="unless it happened while the weights were loading")
    yield from halved(case, "max-num-batched-tokens", "activations take less", at_least=256)
    yield from halved(case, "max-num-seqs", "fewer requests at once")
    yield (
        "if it happened while the weights were loading: raise tensor-parallel-size or use "
        "quantized weights; gpu-memory-utilization changes nothing then"
    )


def killed(failure: Failure, config: EngineConfig | None) -> tuple[str, ...]:
    """For SIGKILL without a word in the log: often the kernel, but not always."""
    return (
        "see whether it was memory: OOMKilled in `kubectl describe pod` or `docker inspect`, or "
        "dmesg",
        "if not, something else killed it: a liveness probe, an eviction (the events of "
        "`kubectl describe pod`), or docker stop after its grace period",
        *(f"if it was memory: {step}" for step in advice(failure, config)),
    )


def silent(failure: Failure, config: EngineConfig | None) -> tuple[str, ...]:
    """For an exit code that tells of a failure, beside a log that does not."""
    code = failure.exit_code or 0
    steps = advice(failure, config)
    by_signal = code < 0 or code > _SIGNALS_FROM
    return (*steps, *_INCOMPLETE) if by_signal else (*_INCOMPLETE, *steps)
