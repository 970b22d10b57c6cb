"""Reads a server's log while it is written: stage, memory facts, and why it failed."""

from __future__ import annotations

import codecs
import re
import signal
from collections import deque
from dataclasses import dataclass, field, replace

from tuner.engine.log_causes import Found, classify
from tuner.engine.log_facts import next_stage, with_facts
from tuner.engine.log_lines import LONGEST_LINE, LogLine, clean
from tuner.engine.log_patterns import Weight
from tuner.redact import redact_text
from tuner.types import Failure, FailureCause, MemoryFacts, Stage

__all__ = ["LogReader", "cause_of_exit"]

_LINES_BEFORE = 24
_LINES_AFTER = 8
_LONGEST_REST = 65536
_LONGEST_CAUSE = 600

_LINE_END = re.compile(r"\r\n|\n|\r")  # progress bars end their lines with \r
_FRAME = re.compile(r'^\s*(?:\^\s*)?File "(?P<file>[^"]+)", line \d+, in (?P<function>\S+)')
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)(?::\s.*)?$")

_TELLING_FILES = {"torch/cuda/graphs.py": "torch/cuda/graphs.py", "/model_loader/": "load_model"}
"""Parts of a path that say as much as a function's name."""


@dataclass(slots=True)
class _Evidence:
    """A line that counts, and what stands around it."""

    line: str
    stage: Stage
    before: list[str]
    found: Found | None = None
    after: list[str] = field(default_factory=list)

    def excerpt(self) -> str:
        return redact_text("\n".join([*self.before, *self.after]))


class LogReader:
    """Give it the log piece by piece with `feed`; it keeps a bounded part of it.

    Attributes:
        stage: how far the server has come.
        memory: what it has said of itself.
    """

    def __init__(self) -> None:
        self.stage = Stage.LAUNCH
        self.memory = MemoryFacts()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._recent: deque[str] = deque(maxlen=_LINES_BEFORE)
        self._frames: deque[str] = deque(maxlen=80)
        self._cause: _Evidence | None = None
        self._wrapper: _Evidence | None = None
        self._exception: _Evidence | None = None
        self._exception_is_root = False
        self._engine_dead = False
        self._in_frame = False
        self._continuing = False

    def feed(self, data: bytes | str) -> None:
        """Read what has been written since the last call; cut anywhere."""
        text = self._decoder.decode(data) if isinstance(data, bytes) else data
        *lines, self._rest = _LINE_END.split(self._rest + text)
        if len(self._rest) > _LONGEST_REST:
            lines.append(self._rest)
            self._rest = ""
        for line in lines:
            self._take(line)

    def finish(self) -> None:
        """The log has ended, perhaps within a line."""
        rest, self._rest = self._rest, ""
        if rest:
            self._take(rest)

    @property
    def decisive(self) -> bool:
        """Whether a starting server has said what it will not recover from."""
        said = (self._cause, self._wrapper)
        return any(e.found.decisive for e in said if e is not None and e.found is not None)

    @property
    def engine_dead(self) -> bool:
        """Whether a server that was ready has said that its engine is dead."""
        return self._engine_dead

    @property
    def explained(self) -> bool:
        """Whether a root cause is known, so that waiting for more lines is of no use."""
        found = self._cause.found if self._cause else None
        return found is not None and found.weight is Weight.ROOT

    def failure(self, exit_code: int | None = None) -> Failure | None:
        """Why the server failed; None while nothing says that it did.

        Args:
            exit_code: of its process, if that has ended; without any line that explains it,
                the code does.
        """
        evidence = self._cause
        if evidence is None:
            evidence = self._unexplained(exit_code)
        if evidence is None or evidence.found is None:
            return None
        return Failure(
            cause=evidence.found.cause,
            stage=evidence.stage,
            line=redact_text(evidence.line.strip()),
            numbers=evidence.found.numbers,
            excerpt=evidence.excerpt(),
            exit_code=exit_code,
            memory=self.memory,
        )

    def tail(self) -> str:
        """The last lines, secrets masked."""
        return redact_text("\n".join(self._recent))

    # --- one line ----------------------------------------------------------------------

    def _take(self, raw: str) -> None:
        line = clean(raw)
        if not line.text.strip():
            return
        self._recent.append(raw[:LONGEST_LINE])
        for evidence in (self._cause, self._wrapper, self._exception):
            if evidence is not None and len(evidence.after) < _LINES_AFTER:
                evidence.after.append(raw[:LONGEST_LINE])
        self._continue_cause(line.text)
        self._follow(line.text)
        if line.may_tell_of_failure and not self._is_source(line.text):
            self._judge(line)

    def _follow(self, text: str) -> None:
        before = self.stage
        self.stage = next_stage(before, text)
        self.memory = with_facts(self.memory, text)
        if self.stage is Stage.READY and before is not Stage.READY:
            # What it complained of while starting, it has survived.
            self._cause = self._wrapper = self._exception = None
            self._exception_is_root = False

    def _is_source(self, text: str) -> bool:
        """Follow tracebacks; whether this line is one's own: a frame, or the program's text.

        `raise RepositoryNotFoundError(` is no message.
        """
        if match := _FRAME.match(text):
            self._frames.append(match["function"])
            self._frames += [n for part, n in _TELLING_FILES.items() if part in match["file"]]
            self._in_frame = True
            return True
        if text.startswith("Traceback (most recent call last)"):
            self._frames.clear()
        self._in_frame = self._in_frame and text.startswith("    ")
        return self._in_frame

    def _judge(self, line: LogLine) -> None:
        serving = self.stage in (Stage.READY, Stage.LOAD)
        found = classify(line.text, self.stage, self._frames)
        if found is None:
            if _EXCEPTION.match(line.text):
                self._keep_exception(line.text)
            return
        if serving and not found.also_serving:
            return
        self._engine_dead = self._engine_dead or (serving and found.engine_dead)
        if found.weight is Weight.WRAPPER:
            self._wrapper = self._wrapper or self._evidence(line.text, found)
        elif self._cause is None or self._explains_more(found):
            self._cause = self._evidence(line.text, found)
            self._continuing = "validation error" in line.text

    def _explains_more(self, found: Found) -> bool:
        """The first root counts; a hint only until there is one."""
        known = self._cause.found if self._cause else None
        return known is not None and known.weight is Weight.HINT and found.weight is Weight.ROOT

    def _keep_exception(self, text: str) -> None:
        """The exception to show where no line is recognised.

        vLLM announces a failed start and then shows the root's traceback, so that the first
        exception after the announcement is it; without one it is the last.
        """
        if not self._exception_is_root:
            self._exception = self._evidence(text, None)
            self._exception_is_root = self._wrapper is not None

    def _evidence(self, text: str, found: Found | None) -> _Evidence:
        return _Evidence(line=text, stage=self.stage, before=list(self._recent), found=found)

    def _continue_cause(self, text: str) -> None:
        """pydantic says what is wrong in the lines that follow: field, then complaint."""
        cause = self._cause
        if not self._continuing or cause is None or cause.found is None:
            return
        if text.strip().startswith("For further information"):
            return
        self._continuing = text.startswith("  ") or re.fullmatch(r"[\w.]+", text) is not None
        if self._continuing and len(cause.line) < _LONGEST_CAUSE:
            joint = ": " if text.startswith(" ") or cause.line.endswith("Config") else "; "
            cause.line += joint + text.partition(" [type=")[0].strip()
            if (detail := classify(text, self.stage)) is not None:
                cause.found = replace(cause.found, numbers=detail.numbers)

    def _unexplained(self, exit_code: int | None) -> _Evidence | None:
        """What is left where no line names the cause: wrapper, exception, exit code."""
        if self._wrapper is None and exit_code is None:
            return None
        by_exit = None if exit_code is None else cause_of_exit(exit_code, self.stage)
        said = self._exception or self._wrapper
        evidence = said or _Evidence(by_exit[1] if by_exit else "", self.stage, list(self._recent))
        causes = [by_exit[0]] if by_exit else []
        if self._wrapper is not None and self._wrapper.found is not None:
            causes.append(self._wrapper.found.cause)
        cause = next((c for c in causes if c is not FailureCause.UNKNOWN), FailureCause.UNKNOWN)
        found = Found(cause, Weight.HINT)
        return _Evidence(evidence.line, evidence.stage, evidence.before, found, evidence.after)


def cause_of_exit(code: int, stage: Stage) -> tuple[FailureCause, str]:
    """What an exit code alone says, and in words.

    vLLM ends with 2 when argparse refuses, with 1 for everything else before it is ready, and
    with 0 also when its engine dies later. Negative codes are signals; 128 + n is how a shell
    or a container reports them.
    """
    number = -code if code < 0 else code - 128
    if code < 0 or 128 < code < 192:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        if number == signal.SIGKILL:
            return (
                FailureCause.HOST_OOM,
                "killed with SIGKILL, as the kernel does when memory runs out",
            )
        crashed = number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)
        return (FailureCause.CRASH if crashed else FailureCause.UNKNOWN), f"ended by {name}"
    if code == 2:
        return FailureCause.BAD_CONFIG, "exit code 2: vLLM refused its arguments"
    serving = stage in (Stage.READY, Stage.LOAD)
    cause = FailureCause.CRASH if serving else FailureCause.UNKNOWN
    return cause, f"ended with exit code {code}"
