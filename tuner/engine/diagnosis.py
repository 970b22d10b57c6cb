"""What a whole log tells: why the server failed, whose fault it is, and what to change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tuner.engine.advice import advice
from tuner.engine.log_facts import STAGE_WORDS
from tuner.engine.log_settings import HEAD_BYTES, settings_of
from tuner.engine.logs import LogReader, cause_of_exit
from tuner.types import Blame, Failure, FailureCause, MemoryFacts, Stage

__all__ = ["Diagnosis", "diagnose", "stage_words"]

_OF_VLLM = re.compile(rb"(?i)vllm|LLM engine|tokens/s|/v1/|uvicorn")
_ADVICE_ON_NOTHING = (
    "get the log of the run that ended: docker compose logs vllm, kubectl logs --previous",
    "look whether stderr went into it too: 2>&1",
    "tell the exit code: --exit-code N; it says what a silent end was",
)
_SERVING = (Stage.READY, Stage.LOAD)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known of a server from its log and its exit code.

    Attributes:
        line: the decisive line; where there is none, what is to be said instead.
        numbers: what that line says, see `tuner.types.Failure`; finite.
        advice: what to change, in order; empty where nothing failed.
        excerpt: the lines around it, secrets masked; control characters are still in it.
    """

    cause: FailureCause
    stage: Stage
    blame: Blame
    retry: bool
    line: str
    numbers: Mapping[str, float]
    advice: tuple[str, ...]
    vllm_version: str | None
    excerpt: str
    exit_code: int | None


def diagnose(chunks: Iterable[bytes], exit_code: int | None = None) -> Diagnosis:
    """Read a log to its end, in bounded memory, and judge it.

    Args:
        chunks: the log in pieces of any size, cut anywhere; any bytes.
        exit_code: of the server's process, negative or 128 + n for a signal; it decides only
            where no line does.
    """
    reader = LogReader()
    head = bytearray()
    is_empty, is_of_vllm = True, False
    for chunk in chunks:
        reader.feed(chunk)
        if len(head) < HEAD_BYTES:
            head += chunk[: HEAD_BYTES - len(head)]
        is_empty = is_empty and not chunk.strip()
        is_of_vllm = is_of_vllm or _OF_VLLM.search(chunk) is not None
    reader.finish()
    said = _failure(reader, exit_code)
    failure = said or _no_failure(reader, is_empty=is_empty, is_of_vllm=is_of_vllm)
    numbers = {name: value for name, value in failure.numbers.items() if math.isfinite(value)}
    failure = replace(failure, numbers=numbers, exit_code=exit_code)
    is_silent = is_empty and said is None
    return Diagnosis(
        cause=failure.cause,
        stage=failure.stage,
        blame=failure.blame,
        retry=failure.cause.retry,
        line=failure.line,
        numbers=numbers,
        advice=_ADVICE_ON_NOTHING if is_silent else advice(failure, settings_of(bytes(head))),
        vllm_version=reader.memory.vllm_version,
        excerpt=failure.excerpt,
        exit_code=exit_code,
    )


def stage_words(stage: Stage) -> str:
    """How far a server had come, as seen afterwards: once it was ready, it served."""
    return STAGE_WORDS[Stage.LOAD if stage in _SERVING else stage]


def _failure(reader: LogReader, exit_code: int | None) -> Failure | None:
    """What the log says, else what the exit code does; 0 says nothing."""
    said = reader.failure(exit_code or None)
    if said is not None or reader.stage in _SERVING:
        return said
    # A traceback that nobody has a name for, and no exit code beside it: it counts unless the
    # start went on after it.
    supposed = reader.failure(1)
    if supposed is None or supposed.stage is not reader.stage:
        return None
    is_silent = supposed.line == cause_of_exit(1, reader.stage)[1]
    return None if is_silent else supposed


def _no_failure(reader: LogReader, *, is_empty: bool, is_of_vllm: bool) -> Failure:
    stage = reader.stage
    if is_empty:
        return Failure(FailureCause.UNKNOWN, stage, "the log is empty")
    if stage is Stage.LAUNCH and not is_of_vllm and reader.memory == MemoryFacts():
        line = "no failure in it, and no word of vLLM: is it the right log?"
        return Failure(FailureCause.UNKNOWN, stage, line, excerpt=reader.tail())
    if stage is Stage.LAUNCH and reader.memory.vllm_version is None:
        return Failure(FailureCause.NONE, stage, "no failure in it; it does not tell the start")
    line = f"no failure in it; it ends while {stage_words(stage)}"
    return Failure(FailureCause.NONE, stage, line)
