"""What a file of recorded traffic gives: requests, and the rows that are none, with the reason.

Light on purpose: the command line imports the names of the formats from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

HASH_BLOCK_TOKENS = 512
"""Prompt tokens that one of Mooncake's `hash_ids` stands for (its FAST'25 traces)."""

_EXAMPLES_A_REASON = 3

Row = TypeVar("Row")


class TraceFormat(StrEnum):
    """The formats that have a reader."""

    SHAREGPT = "sharegpt"
    CUSTOM = "custom"
    OPENAI_BATCH = "openai-batch"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    MOONCAKE = "mooncake"
    GUIDELLM = "guidellm"


class Reason(StrEnum):
    """Why a row is no request. The words are a promise to scripts."""

    NOT_JSON = "not JSON"
    NOT_OBJECT = "not a JSON object"
    NOT_CSV = "not CSV"
    NOT_UTF8 = "not UTF-8 text"
    WRONG_COLUMNS = "wrong number of columns"
    NO_PROMPT = "no prompt"
    NO_REPLY = "no question with a reply"
    SEVERAL_PROMPTS = "several prompts in one row"
    NO_LENGTH = "no length"
    NOT_WHOLE = "length is not a whole number"
    NEGATIVE = "negative length"
    TOO_LARGE = "length above 2^31"
    NO_INPUT = "input tokens is 0"
    NO_OUTPUT = "output tokens is 0"
    NOT_A_TIME = "timestamp is not a time"
    HASH_IDS = "hash_ids do not fit input_length"
    MEDIA = "has images, audio or video"
    NO_REQUEST = "no custom_id, method, url or body"
    OTHER_REQUEST = "not a chat or completion request"
    REPEATED_ID = "custom_id repeats an earlier one"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        line: where its row begins in the file, from 1.
        arrival_s: when it came, on the trace's own clock; None where that is not recorded.
        input_tokens: recorded length of the prompt; None where only its text is.
        output_tokens: recorded or asked length of the answer; None where it is not known.
        prompt: its text, where that is recorded. Of a chat, the last question.
        messages: the whole chat, if the request is one.
        hash_ids: names of the prompt's blocks of `HASH_BLOCK_TOKENS`; requests whose first
            ids are the same have that prefix in common.
        reply: the recorded answer; its length stands for `output_tokens`.
        session: name of the conversation that it belongs to.
        delay_s: how long after the end of the session's previous answer it came.
    """

    line: int
    arrival_s: float | None
    input_tokens: int | None
    output_tokens: int | None
    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    hash_ids: tuple[int, ...] = ()
    reply: str | None = None
    session: str | None = None
    delay_s: float | None = None

    @property
    def text(self) -> str | None:
        """All that the server reads, in one piece; None where only lengths are recorded."""
        if self.messages:
            return "\n".join(f"{turn.role}: {turn.content}" for turn in self.messages)
        return self.prompt


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that is no request."""

    line: int
    reason: Reason


Entry = TraceRequest | Refused
"""What a reader makes of a row."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """Refused rows by reason.

    Attributes:
        counts: how often each reason, the most frequent first.
        lines: the first lines that were refused for each reason.
    """

    counts: Mapping[Reason, int]
    lines: Mapping[Reason, tuple[int, ...]]

    @property
    def total(self) -> int:
        """All refused rows."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        return "; ".join(
            f"{reason}: {count:,} ({self._where(reason, count)})"
            for reason, count in self.counts.items()
        )

    def _where(self, reason: Reason, count: int) -> str:
        lines = self.lines[reason]
        shown = ", ".join(map(str, lines)) + (", …" if count > len(lines) else "")
        return f"line {shown}" if count == 1 else f"lines {shown}"


class RefusalCount:
    """Counts refused rows while a file is read, in little memory."""

    def __init__(self) -> None:
        self._counts: Counter[Reason] = Counter()
        self._lines: dict[Reason, list[int]] = {}

    def add(self, refused: Refused) -> None:
        """Count one row."""
        self._counts[refused.reason] += 1
        lines = self._lines.setdefault(refused.reason, [])
        if len(lines) < _EXAMPLES_A_REASON:
            lines.append(refused.line)

    def result(self) -> Refusals:
        """All that was counted so far."""
        return Refusals(
            dict(self._counts.most_common()),
            {reason: tuple(lines) for reason, lines in self._lines.items()},
        )


def entries(
    rows: Iterable[tuple[int, Row | Reason]], make: Callable[[int, Row], TraceRequest | Reason]
) -> Iterator[Entry]:
    """Each row with its line as a request, or as refused by the parser or by `make`."""
    for line, row in rows:
        made = row if isinstance(row, Reason) else make(line, row)
        yield Refused(line, made) if isinstance(made, Reason) else made
