"""Single values of a row: a length, a time, a text, the turns of a chat. Each or a `Reason`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeAlias, cast

from tuner.load.traces.trace import Message, Reason, TraceRequest
from tuner.types import JsonValue

LARGEST_LENGTH = 2**31 - 1

_LATEST_S = 1e12
"""A clock that shows more is no clock: even the year 9999 is 2.5e11 s after 1970."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBER = re.compile(r"[+-]?[0-9]{1,300}(\.[0-9]{0,300})?([eE][+-]?[0-9]{1,3})?")
_LONGEST_INTEGER = 300

Chat: TypeAlias = tuple[Message, ...]


def input_tokens(value: JsonValue) -> int | Reason:
    """The recorded length of a prompt."""
    if is_blank(value):
        return Reason.NO_LENGTH
    length = _length(value)
    return Reason.NO_INPUT if length == 0 else length


def output_tokens(value: JsonValue) -> int | Reason:
    """The recorded length of an answer."""
    if is_blank(value):
        return Reason.NO_LENGTH
    length = _length(value)
    return Reason.NO_OUTPUT if length == 0 else length


def optional_output_tokens(value: JsonValue) -> int | Reason | None:
    """The same where the format does not require it."""
    return None if is_blank(value) else output_tokens(value)


def timed_request(
    line: int,
    arrival_s: float | Reason,
    sent: JsonValue,
    answered: JsonValue,
    session: str | None = None,
) -> TraceRequest | Reason:
    """A row of a trace that records when, and how many tokens; the first thing wrong with it."""
    if isinstance(arrival_s, Reason):
        return arrival_s
    asked = input_tokens(sent)
    if isinstance(asked, Reason):
        return asked
    got = output_tokens(answered)
    if isinstance(got, Reason):
        return got
    return TraceRequest(line, arrival_s, asked, got, session=session)


def is_blank(value: JsonValue) -> bool:
    """Whether a cell or key is there without a value."""
    return value is None or (isinstance(value, str) and not value.strip())


def seconds(value: JsonValue) -> float | Reason:
    """A point of a clock that counts up from zero, in the unit of the file."""
    number = _number(value)
    if number is None or not 0 <= number <= _LATEST_S:
        return Reason.NOT_A_TIME
    return float(number)


def date_seconds(text: str) -> float | Reason:
    """A date with time (ISO 8601, a space for the T, any number of digits after the point).

    Seconds since 1970; without a time zone it is UTC: only differences matter, and a local
    clock that is set back would make some of them wrong.
    """
    try:
        moment = datetime.fromisoformat(text.strip())
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return (moment - _EPOCH).total_seconds()
    except (ValueError, OverflowError):
        return Reason.NOT_A_TIME


def any_seconds(value: JsonValue) -> float | Reason:
    """A number of seconds, or a date with time."""
    found = seconds(value)
    if isinstance(found, Reason) and isinstance(value, str):
        return date_seconds(value)
    return found


def text(value: JsonValue) -> str | Reason:
    """A prompt. Digits in quotes stay text; white space alone is no prompt."""
    if not isinstance(value, str) or not value.strip():
        return Reason.NO_PROMPT
    return value if is_sendable(value) else Reason.NOT_UTF8


def is_sendable(value: str) -> bool:
    """Whether a text can be written as UTF-8: half a surrogate pair cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def chat(turns: JsonValue) -> Chat | Reason:
    """The messages of an OpenAI chat request; content may be text or a list of text parts."""
    if not isinstance(turns, list):
        return Reason.NO_PROMPT
    messages = []
    for turn in turns:
        role = turn.get("role") if isinstance(turn, dict) else None
        if not isinstance(turn, dict) or not isinstance(role, str):
            return Reason.NO_PROMPT
        content = _content(turn.get("content"))
        if isinstance(content, Reason):
            return content
        messages.append(Message(role, content))
    if not any(message.content.strip() for message in messages):
        return Reason.NO_PROMPT
    sendable = all(is_sendable(turn.role) and is_sendable(turn.content) for turn in messages)
    return tuple(messages) if sendable else Reason.NOT_UTF8


def last_question(messages: Sequence[Message]) -> str:
    """What the user said last in a chat; the last text of anyone if the user said nothing."""
    spoken = [m.content for m in messages if m.role.lower() == "user"]
    return (spoken or [m.content for m in messages])[-1]


def _content(content: JsonValue) -> str | Reason:
    """The text of one message; an answer that calls tools has none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return Reason.NO_PROMPT
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            return Reason.NO_PROMPT
        if not isinstance(part.get("text"), str):
            return Reason.MEDIA
        texts.append(cast("str", part["text"]))
    return "\n".join(texts)


def _length(value: JsonValue) -> int | Reason:
    number = _number(value)
    if number is None or number != math.floor(number):
        return Reason.NOT_WHOLE
    if number < 0:
        return Reason.NEGATIVE
    return int(number) if number <= LARGEST_LENGTH else Reason.TOO_LARGE


def _number(value: JsonValue) -> int | float | None:
    """A finite number, also one that is written as text; None for anything else."""
    if isinstance(value, str):
        value = _written_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _written_number(written: str) -> int | float | None:
    # Python itself would also read `1_000`, `NaN` and digits of other scripts.
    if written.isascii() and written.isdigit() and len(written) <= _LONGEST_INTEGER:
        return int(written)
    written = written.strip()
    return float(written) if _NUMBER.fullmatch(written) else None
