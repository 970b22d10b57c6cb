"""What a whole log tells: why the server failed, whose fault it is, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tuner.engine import advice_unsure as unsure
from tuner.engine.advice import advice
from tuner.engine.log_judgement import Basis, Judgement, judge, stage_words
from tuner.engine.log_settings import settings_of
from tuner.engine.log_starts import SERVING, Start, Starts
from tuner.engine.passing import may_pass
from tuner.types import Blame, Failure, FailureCause, Stage

__all__ = ["Diagnosis", "diagnose", "stage_words"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known of a server from its log and its exit code.

    All but `starts` and `earlier` is of the last start in the log.

    Attributes:
        line: the decisive line; where there is none, what is to be said instead.
        numbers: what that line says, see `tuner.types.Failure`; finite.
        advice: what to change, in order; empty where nothing failed.
        excerpt: the lines around it, secrets masked; control characters are still in it.
        starts: how many starts the log holds.
        earlier: why those before the last one ended, in order; `none` for a server that
            served, and whose log names no failure.
        exit_note: how the exit code was used, where `line` does not say it.
        phase_known: False where only a part of a log is there that does not tell in which
            phase device memory ran out.
        stage_known: False where nothing of a start was seen, so that `stage` says nothing.
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
    starts: int = 1
    earlier: tuple[FailureCause, ...] = ()
    exit_note: str = ""
    phase_known: bool = True
    stage_known: bool = True


def diagnose(chunks: Iterable[bytes], exit_code: int | None = None) -> Diagnosis:
    """Read a log to its end, in bounded memory, and judge its last start.

    Args:
        chunks: the log in pieces of any size, cut anywhere; any bytes.
        exit_code: of the server's process, negative or 128 + n for a signal; it decides only
            where no line does.
    """
    starts, earlier, is_empty = Starts(), list[FailureCause](), True
    for chunk in chunks:
        is_empty = is_empty and not chunk.strip(b"\0 \t\r\n")
        earlier += map(_why_ended, starts.feed(chunk))
    earlier += map(_why_ended, starts.finish())
    last = starts.last
    judged = judge(last, exit_code, is_empty=is_empty)
    failure = judged.failure
    numbers = {name: value for name, value in failure.numbers.items() if math.isfinite(value)}
    failure = replace(failure, numbers=numbers, exit_code=exit_code)
    is_guess = judged.basis is Basis.KILLED
    return Diagnosis(
        cause=failure.cause,
        stage=failure.stage,
        blame=Blame.UNKNOWN if is_guess else failure.blame,
        retry=is_guess or may_pass(failure),
        line=failure.line,
        numbers=numbers,
        advice=_advice(judged, failure, last),
        vllm_version=last.reader.memory.vllm_version,
        excerpt=failure.excerpt,
        exit_code=exit_code,
        starts=len(earlier) + 1,
        earlier=tuple(earlier),
        exit_note=judged.note,
        phase_known=judged.basis is not Basis.PART,
        stage_known=not (last.is_part and failure.stage is Stage.LAUNCH),
    )


def _why_ended(start: Start) -> FailureCause:
    """Of a start that is over: one that never served and says nothing has failed all the same."""
    cause = judge(start, None).failure.cause
    is_silent = cause is FailureCause.NONE and start.reader.stage not in SERVING
    return FailureCause.UNKNOWN if is_silent else cause


def _advice(judged: Judgement, failure: Failure, start: Start) -> tuple[str, ...]:
    config = settings_of(start.head)
    if judged.basis is Basis.EMPTY:
        return unsure.NOTHING_TO_READ
    if judged.basis is Basis.OTHER:
        return unsure.WRONG_LOG
    rule = {
        Basis.PART: unsure.out_of_memory_in_a_part,
        Basis.KILLED: unsure.killed,
        Basis.CODE: unsure.silent,
    }.get(judged.basis, advice)
    return rule(failure, config)
