"""Lines of a log that count, with what stands around them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from tuner.engine.log_causes import Found, classify
from tuner.engine.log_lines import LONGEST_LINE
from tuner.redact import redact_text
from tuner.types import Stage

LINES_BEFORE = 24
LINES_AFTER = 8

_LONGEST_CAUSE = 600
_FIELD = re.compile(r"[\w.\-]+")


@dataclass(slots=True)
class Evidence:
    """A line that counts.

    Attributes:
        line: its message.
        before: raw lines up to it, itself included; `after` fills up to `lines_after`.
    """

    line: str
    stage: Stage
    before: list[str]
    found: Found | None = None
    after: list[str] = field(default_factory=list)
    lines_after: int = LINES_AFTER

    @property
    def is_open(self) -> bool:
        """Whether lines after it are still wanted."""
        return len(self.after) < self.lines_after

    def excerpt(self) -> str:
        """The lines around it, secrets masked."""
        return redact_text("\n".join([*self.before, *self.after]).replace("\0", ""))

    def add(self, raw: str) -> None:
        """A line after it."""
        self.after.append(raw[:LONGEST_LINE])


class Complaints:
    """pydantic says what is wrong in the lines that follow its first: field, then complaint."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._head = evidence.line
        self._parts: list[str] = []

    def take(self, text: str) -> bool:
        """Take up a line, or a broken one put together; False if it belongs to something else."""
        if text.strip().startswith("For further information"):
            return True
        if text.startswith(self._head):  # it was not broken: the next line is another
            text = text[len(self._head) :]
        replaces = bool(self._parts) and text.startswith(self._parts[-1]) and text.startswith(" ")
        if not (text.startswith("  ") or _FIELD.fullmatch(text)):
            return False
        if replaces:
            self._parts[-1] = text
        elif len(self._evidence.line) < _LONGEST_CAUSE:
            self._parts.append(text)
        self._tell(text)
        return True

    def _tell(self, text: str) -> None:
        line = self._head
        for number, part in enumerate(self._parts):
            line += ": " if part.startswith(" ") or number == 0 else "; "
            line += part.partition(" [type=")[0].strip()
        self._evidence.line = line
        detail = classify(text)
        if detail is not None and detail.numbers and self._evidence.found is not None:
            self._evidence.found = replace(self._evidence.found, numbers=detail.numbers)
