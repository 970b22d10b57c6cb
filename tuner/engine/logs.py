"""Reads a server's log while it is written: stage, memory facts, and why it failed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from tuner.engine.log_causes import Found, classify
from tuner.engine.log_evidence import LINES_BEFORE, Complaints, Evidence
from tuner.engine.log_exit import ORDERLY_CODES, cause_of_exit
from tuner.engine.log_facts import begins_anew, may_tell, next_stage, with_facts
from tuner.engine.log_input import LogInput
from tuner.engine.log_interest import SETTLED, dull_while_starting, is_dull_while_serving
from tuner.engine.log_lines import LONGEST_LINE, LogLine, clean, messages
from tuner.engine.log_patterns import HARMLESS, NOISE, Weight
from tuner.engine.log_progress import ProgressWatch
from tuner.engine.log_tracebacks import BEGIN, Tracebacks
from tuner.engine.log_wrapping import Wrapping
from tuner.redact import redact_text
from tuner.types import Failure, FailureCause, MemoryFacts, Stage

__all__ = ["LogReader", "cause_of_exit"]

_SERVING = (Stage.READY, Stage.LOAD)
_BAD_LEVELS = ("ERROR", "CRITICAL")

_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)(?::\s.*)?$")
_STOPS = re.compile(
    r"^Shutting down|Waiting for application shutdown|Application shutdown complete"
    r"|Finished server process|[Rr]eceived (?:signal|SIG|exit)|\bSIG(?:TERM|INT)\b"
    r"|^KeyboardInterrupt|Gracefully stopping|^\[shutdown\](?!.*unexpected)"
)

_TROUBLE_BEFORE = 8
_TROUBLE_AFTER = 32
"""Lines around the first sign of trouble, for a person to read where no cause is known."""

_SURVIVED = 6
"""Lines of information after an exception that show that it did not end the server."""


class LogReader:
    """Give it the log piece by piece with `feed`; it keeps a bounded part of it.

    Attributes:
        stage: how far the server has come.
        memory: what it has said of itself.
    """

    def __init__(self) -> None:
        self.stage = Stage.LAUNCH
        self.memory = MemoryFacts()
        self._input = LogInput()
        self._wrapping = Wrapping()
        self._broken: str | None = None
        self._begun_dull = False
        self._tracebacks = Tracebacks()
        self._watch = ProgressWatch()
        self._recent: deque[str] = deque(maxlen=LINES_BEFORE)
        self._open: list[Evidence] = []
        self._cause: Evidence | None = None
        self._complaints: Complaints | None = None
        self._wrapper: Evidence | None = None
        self._exception: Evidence | None = None
        self._exception_is_root = False
        self._informed = 0
        self._trouble: Evidence | None = None
        self._engine_dead = False
        self._settled = False
        self._stopping = False
        self._ended = False

    def feed(self, data: bytes | str) -> None:
        """Read what has been written since the last call; cut anywhere."""
        if data:
            self._ended = False
            self._read(self._input.feed(data))

    def finish(self) -> None:
        """The log has ended, perhaps within a line."""
        self._read(self._input.finish())
        self._ended = True

    @property
    def progress(self) -> int:
        """Grows with every message that is real progress.

        Heart-beats, repeated messages, access logs and idle statistics are none, so that a
        start whose number stands still does not move. Once the server is ready, only
        statistics that show tokens count.
        """
        return self._watch.count

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

        After `finish` that may also be how the log ends: with heart-beats alone, or with an
        exception. A server that was ready and then stopped in order has not failed.

        Args:
            exit_code: of its process, if that has ended; without any line that explains it,
                the code does.
        """
        evidence = self._cause or self._unexplained(exit_code)
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
        return redact_text("\n".join(self._recent).replace("\0", ""))

    # --- lines -------------------------------------------------------------------------

    def _read(self, lines: Iterable[str]) -> None:
        wrapping, recent = self._wrapping, self._recent
        for raw in lines:
            if not raw or raw.isspace():
                continue
            joined = wrapping.join(raw) if wrapping.possible else None
            if joined is None and self._broken is not None:
                self._take_broken()
            recent.append(raw[:LONGEST_LINE])
            if self._open:
                self._show(raw)
            if joined is not None:
                if may_tell(raw):
                    self._follow_alone(raw)
                if wrapping.grown:
                    self._broken = joined
                continue
            if wrapping.possible:
                self._watch.begin_line()
            self._begun_dull = self._is_dull(raw)
            if not self._begun_dull:
                self._take(raw, again=False)
        self._take_broken()

    def _take_broken(self) -> None:
        """Take a broken line as a whole: at its end, or as far as it has come by now."""
        joined, self._broken = self._broken, None
        if joined is None or (self._begun_dull and self._is_dull(joined, again=True)):
            return
        self._take(joined, again=True)

    def _show(self, raw: str) -> None:
        """To those that want the lines after theirs."""
        for evidence in self._open:
            evidence.add(raw)
        self._open = [evidence for evidence in self._open if evidence.is_open]

    def _is_dull(self, raw: str, *, again: bool = False) -> bool:
        if self._complaints is not None:
            return False
        if self._settled:
            return SETTLED.search(raw) is None
        if self.stage in _SERVING:
            return is_dull_while_serving(raw)
        message = dull_while_starting(raw)
        if message is None:
            return False
        if again:  # its first part was noted
            return True
        self._informed += 1
        self._watch.note_plain(message)
        return True

    def _take(self, raw: str, *, again: bool) -> None:
        """A line.

        Args:
            again: it is a line that was broken, put together; its first part was taken before.
        """
        for line in messages(raw):
            if not line.text.strip():
                continue
            if self._complaints is not None and not self._complaints.take(line.text):
                self._complaints = None
            if line.level not in _BAD_LEVELS:
                self._follow(line)
            self._watch.note(line, raw, serving=self.stage in _SERVING, again=again)
            self._judge(line, again=again)

    def _follow_alone(self, raw: str) -> None:
        """Take a line for itself that may not belong to the one before after all."""
        before = self.stage, self.memory
        self._follow(clean(raw))
        if (self.stage, self.memory) != before:
            self._watch.note_plain(raw)

    def _follow(self, line: LogLine) -> None:
        """Stage, facts, and the server's lives."""
        text, before = line.text, self.stage
        if before in _SERVING and not self._settled and begins_anew(text):
            self.stage = before = Stage.LAUNCH
            self._stopping = False
            self._watch.begin_anew()
        self.stage = next_stage(before, text)
        self.memory = with_facts(self.memory, text)
        if line.level in ("INFO", "DEBUG"):
            self._informed += 1
        if self.stage is Stage.READY and before is not Stage.READY:
            self._survive()

    def _survive(self) -> None:
        """It is ready: what it complained of while starting, it has survived."""
        self._watch.begin_anew()
        if self._engine_dead:  # of the life before this one
            return
        self._trouble = None
        self._cause = self._wrapper = self._exception = self._complaints = None
        self._exception_is_root = self._settled = False
        self._open.clear()

    def _judge(self, line: LogLine, *, again: bool) -> None:
        text = self._tracebacks.message(line)
        if text is None:
            return
        serving = self.stage in _SERVING
        found = None
        # The API server calls the death of its engine a warning, and then shuts down in order.
        if line.may_tell_of_failure or "exited unexpectedly" in text:
            found = classify(text, self.stage, self._tracebacks.frames(line.process))
            self._note_trouble(line)
        elif "exceeds" in text:
            found = classify(text, self.stage, warning=True)
        if again and self._replaced(text, found):
            return
        if found is None:
            if serving and line.level not in _BAD_LEVELS and _STOPS.search(text):
                self._stopping = self._stopping or not (self._cause or self._wrapper)
            elif line.may_tell_of_failure and _EXCEPTION.match(text):
                self._keep_exception(text)
            return
        if self._stopping or (serving and not found.also_serving):
            return
        self._engine_dead = self._engine_dead or (serving and found.engine_dead)
        if found.weight is Weight.WRAPPER:
            self._wrapper = self._wrapper or self._evidence(text, found)
        elif self._cause is None or self._explains_more(found):
            self._cause = self._evidence(text, found)
            self._complaints = Complaints(self._cause) if "validation error" in text else None
        elif found.refines:
            self._refine(self._cause, text, found)
        self._settled = self.explained and (self._engine_dead if serving else self.decisive)

    def _explains_more(self, found: Found) -> bool:
        """The first root counts; a hint only until there is one."""
        known = self._cause.found if self._cause else None
        return known is not None and known.weight is Weight.HINT and found.weight is Weight.ROOT

    def _refine(self, cause: Evidence, text: str, found: Found) -> None:
        """vLLM says what it was doing when torch said that memory ran out."""
        known = cause.found
        if known is None or not known.cause.name.startswith("OOM_"):
            return
        cause.found = replace(found, numbers={**known.numbers, **found.numbers})
        cause.line = text

    def _replaced(self, text: str, found: Found | None) -> bool:
        """Put a broken line in the place of the part of it that was judged before."""
        cause, exception = self._cause, self._exception
        if exception is not None and text.startswith(exception.line):
            exception.line = text
        if cause is None or cause.found is None or not text.startswith(cause.line):
            return False
        if found is not None and found.weight is not Weight.WRAPPER:
            known = cause.found.numbers if found.refines else {}
            cause.line, cause.found = text, replace(found, numbers={**known, **found.numbers})
        elif HARMLESS.search(text):
            self._cause = None
        return True

    def _note_trouble(self, line: LogLine) -> None:
        if self._trouble is not None or HARMLESS.search(line.text):
            return
        if line.level in _BAD_LEVELS or line.text.startswith(BEGIN):
            before = list(self._recent)[-_TROUBLE_BEFORE:]
            self._trouble = Evidence(line.text, self.stage, before, lines_after=_TROUBLE_AFTER)
            self._open.append(self._trouble)

    def _keep_exception(self, text: str) -> None:
        """The exception to show where no line is recognised.

        vLLM announces a failed start and then shows the root's traceback, so that the first
        exception after the announcement is it; without one it is the last.
        """
        if self._exception_is_root or self._stopping or HARMLESS.search(text):
            return
        if NOISE.search(text) and self._exception is not None:
            return
        if self._exception is not None and self._exception in self._open:
            self._open.remove(self._exception)
        self._exception = self._evidence(text, None)
        self._exception_is_root = self._wrapper is not None
        self._informed = 0

    def _evidence(self, text: str, found: Found | None) -> Evidence:
        evidence = Evidence(text, self.stage, list(self._recent), found)
        self._open.append(evidence)
        return evidence

    # --- no line names the cause -------------------------------------------------------

    def _unexplained(self, exit_code: int | None) -> Evidence | None:
        """What is left: those who only saw it, the exit code, the end of the log."""
        serving = self.stage in _SERVING
        if self._stopping and self._wrapper is None:
            return None
        by_exit = None
        if exit_code is not None and not (serving and exit_code in ORDERLY_CODES):
            by_exit = cause_of_exit(exit_code, self.stage)
        causes = [by_exit[0]] if by_exit else []
        if self._wrapper is not None and self._wrapper.found is not None:
            causes.append(self._wrapper.found.cause)
        cause = next((c for c in causes if c is not FailureCause.UNKNOWN), FailureCause.UNKNOWN)
        if cause is FailureCause.UNKNOWN:
            if self._ended and self._watch.hangs(serving=serving):
                return self._told(self._watch.line, FailureCause.HANG)
            if not causes and not self._ended_in_trouble():
                return None
        said = self._exception or self._wrapper
        if said is None:
            return self._told(by_exit[1] if by_exit else "", cause)
        shown = self._trouble if cause is FailureCause.UNKNOWN and self._trouble else said
        found = Found(cause, Weight.HINT)
        return Evidence(said.line, said.stage, shown.before, found, shown.after)

    def _ended_in_trouble(self) -> bool:
        """Whether the log of a starting server ends with an exception that nobody explained."""
        exception = self._exception
        return (
            self._ended
            and exception is not None
            and self.stage not in _SERVING
            and exception.stage is self.stage
            and not NOISE.search(exception.line)
            and self._informed < _SURVIVED
        )

    def _told(self, line: str, cause: FailureCause) -> Evidence:
        return Evidence(line, self.stage, list(self._recent), Found(cause, Weight.HINT))
