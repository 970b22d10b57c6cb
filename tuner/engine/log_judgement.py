"""One start's lines and its exit code, weighed against each other."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum

from tuner.engine.log_exit import ORDERLY_CODES, cause_of_exit
from tuner.engine.log_facts import STAGE_WORDS
from tuner.engine.log_starts import SERVING, Start
from tuner.engine.logs import LogReader
from tuner.types import Failure, FailureCause, Stage

__all__ = ["Basis", "Judgement", "judge", "stage_words"]

_REFUSED = 2

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)

_PHASES = {
    FailureCause.OOM_LOAD: Stage.LOADING,
    FailureCause.OOM_PROFILE: Stage.PROFILING,
    FailureCause.OOM_KV_ALLOC: Stage.KV_ALLOCATION,
    FailureCause.OOM_WARMUP: Stage.WARMUP,
    FailureCause.OOM_GRAPH_CAPTURE: Stage.GRAPH_CAPTURE,
    FailureCause.OOM_RUNTIME: Stage.READY,
}
"""Where a traceback alone tells in which phase device memory ran out."""

_ANYBODYS = frozenset(
    {
        *_PHASES,
        FailureCause.HOST_OOM,
        FailureCause.CRASH,
        FailureCause.NCCL,
        FailureCause.PORT_IN_USE,
        FailureCause.DISK_FULL,
        FailureCause.UNKNOWN,
    }
)
"""Causes whose wordings are not vLLM's own: a text that has nothing else of it is another's."""


class Basis(Enum):
    """What a verdict rests on."""

    LINES = "what the log says"
    PART = "what the log says, whose beginning is missing, so that the phase is not known"
    KILLED = "SIGKILL, without a word in the log"
    CODE = "the exit code, without a word in the log"
    EMPTY = "nothing: the log is empty"
    OTHER = "nothing: the text is none of vLLM's"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict.

    Attributes:
        failure: also for `none`; then `line` says what is to be said instead.
        note: how the exit code was used; empty without one, or where `line` says it.
    """

    failure: Failure
    basis: Basis
    note: str = ""


def stage_words(stage: Stage) -> str:
    """How far a server had come, as seen afterwards: once it was ready, it served."""
    return STAGE_WORDS[Stage.LOAD if stage in SERVING else stage]


def judge(start: Start, exit_code: int | None, *, is_empty: bool = False) -> Judgement:
    """Why a start failed, if it did. It must be finished.

    Args:
        exit_code: of the server's process, negative or 128 + n for a signal; it decides only
            where no line does.
    """
    said = _said(start)
    if said is None and is_empty and not exit_code:
        failure = Failure(FailureCause.UNKNOWN, Stage.LAUNCH, "the log is empty")
        return Judgement(failure, Basis.EMPTY)
    if not is_empty and _is_of_another(start, said):
        return _another(start, exit_code)
    # Of a line that nobody has a name for, the code may say what it was.
    by_code = _by_code(start, exit_code) if said is None or _is_open(said) else None
    if said is not None and (by_code is None or by_code.cause is said.cause):
        is_part = start.is_part and said.stage is Stage.LAUNCH and said.cause in _PHASES
        basis = Basis.PART if is_part else Basis.LINES
        note = "" if exit_code is None else f"exit code {exit_code}: not needed, the log says why"
        return Judgement(said, basis, note)
    if by_code is not None and exit_code is not None:
        return _coded(start, by_code, exit_code, is_empty=is_empty)
    return Judgement(_none(start, exit_code), Basis.LINES)


# --- what the lines say ----------------------------------------------------------------


def _said(start: Start) -> Failure | None:
    said = _lines_say(start.reader)
    ready = None if start.as_ready is None else _lines_say(start.as_ready)
    if ready is not None and (said is None or said.cause in {*_PHASES, ready.cause}):
        return ready
    if said is None or not start.is_part or said.cause not in _PHASES:
        return said
    if said.cause is FailureCause.OOM_LOAD and not start.loading:
        # Nothing tells the phase. What serving and nearly all of the start have in common is
        # less wrong than weights, which want the opposite.
        usual = FailureCause.OOM_PROFILE if start.starting else FailureCause.OOM_RUNTIME
        return replace(said, cause=usual, stage=Stage.LAUNCH)
    return replace(said, stage=_PHASES[said.cause])


def _lines_say(reader: LogReader) -> Failure | None:
    said = reader.failure()
    if said is not None or reader.stage in SERVING:
        return said
    # A traceback that nobody has a name for: it counts unless the start went on after it.
    supposed = reader.failure(1)
    if supposed is None or supposed.stage is not reader.stage:
        return None
    return None if _is_silent(supposed, reader, 1) else supposed


def _is_silent(failure: Failure, reader: LogReader, exit_code: int) -> bool:
    """Whether the exit code is all that tells of it."""
    return failure.line == cause_of_exit(exit_code, reader.stage)[1]


def _is_open(failure: Failure) -> bool:
    """Whether its line tells that it failed, and not why."""
    return failure.cause in (FailureCause.UNKNOWN, FailureCause.CRASH)


def _is_of_another(start: Start, said: Failure | None) -> bool:
    if start.of_vllm or start.reader.stage is not Stage.LAUNCH:
        return False
    if said is None or _is_quoted(said.line):
        return True
    # The kernel and Kubernetes have words of their own for the end of a vLLM.
    is_by_kernel = said.cause is FailureCause.HOST_OOM and start.names_vllm
    return said.cause in _ANYBODYS and not is_by_kernel


def _is_quoted(line: str) -> bool:
    """Whether it is from a text about logs: a table's row, or between backticks."""
    return "`" in line or line.startswith("|")


def _another(start: Start, exit_code: int | None) -> Judgement:
    line = "no failure of vLLM in it, and nothing that vLLM logs: is it the right log?"
    if exit_code is not None:
        line += f" (exit code {exit_code} alone does not tell)"
    failure = Failure(FailureCause.UNKNOWN, Stage.LAUNCH, line, excerpt=start.reader.tail())
    return Judgement(failure, Basis.OTHER)


# --- what the exit code says -----------------------------------------------------------


def _by_code(start: Start, exit_code: int | None) -> Failure | None:
    reader = start.as_ready or start.reader
    return reader.failure(exit_code) if exit_code else None


def _coded(start: Start, failure: Failure, exit_code: int, *, is_empty: bool) -> Judgement:
    reader = start.as_ready or start.reader
    is_silent = _is_silent(failure, reader, exit_code)
    words = cause_of_exit(exit_code, reader.stage)[1]
    if exit_code in _KILLED and failure.cause is FailureCause.HOST_OOM:
        likely = f"exit code {exit_code} (SIGKILL): likely the kernel, as host memory ran out"
        if is_silent:
            ends = "is empty" if is_empty else f"breaks off while {stage_words(reader.stage)}"
            line = f"{likely}; the log {ends} and does not say"
            return Judgement(replace(failure, line=line), Basis.KILLED)
        return Judgement(failure, Basis.KILLED, likely)
    if not is_silent:
        return Judgement(failure, Basis.LINES, f"exit code {exit_code} says how it ended: {words}")
    is_refusal = exit_code == _REFUSED and reader.stage not in SERVING
    if 0 < exit_code < 128 and not is_refusal:
        line = f"exit code {exit_code}, and no failure in this log: is it complete?"
        return Judgement(replace(failure, cause=FailureCause.UNKNOWN, line=line), Basis.CODE)
    what = words if words.startswith("exit code") else f"exit code {exit_code}: {words}"
    return Judgement(replace(failure, line=f"{what}; no failure in this log"), Basis.CODE)


def _none(start: Start, exit_code: int | None) -> Failure:
    reader = start.reader
    if reader.stage is Stage.LAUNCH and reader.memory.vllm_version is None:
        line = "no failure in it; it does not tell the start"
    else:
        line = f"no failure in it; it ends while {stage_words(reader.stage)}"
    if exit_code == 0:
        line += "; exit code 0 tells of none"
    elif exit_code in ORDERLY_CODES:
        line += f"; exit code {exit_code}: somebody stopped it"
    elif exit_code is not None:
        line += f"; it was told to stop before exit code {exit_code}"
    return Failure(FailureCause.NONE, reader.stage, line)
