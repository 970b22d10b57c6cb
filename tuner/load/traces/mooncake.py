"""Mooncake's traces (JSON lines), and what AIPerf adds to them.

`timestamp` (milliseconds), `input_length`, `output_length`, and `hash_ids`: a name for each
block of 512 prompt tokens, so that requests with the same first names share that prefix.
AIPerf's rows may have `text_input` or `messages` in place of a length, and `session_id` with
`delay` (milliseconds after the session's previous answer) in place of a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from tuner.load.traces import values
from tuner.load.traces.json_rows import JsonObject, json_rows
from tuner.load.traces.opening import TextFile
from tuner.load.traces.trace import (
    HASH_BLOCK_TOKENS,
    Entry,
    Message,
    Reason,
    TraceRequest,
    entries,
)
from tuner.types import JsonValue

_MS_PER_S = 1000


def read(file: TextFile) -> Iterator[Entry]:
    """Every row's time, lengths and shared blocks.

    Raises:
        InputError: the file cannot be read to its end.
    """
    return entries(json_rows(file), _request)


def _request(line: int, row: JsonObject) -> TraceRequest | Reason:
    arrival = _milliseconds(row.get("timestamp"))
    delay = _milliseconds(row.get("delay"))
    answered = values.optional_output_tokens(row.get("output_length"))
    said = _said(row)
    if isinstance(arrival, Reason):
        return arrival
    if isinstance(delay, Reason):
        return delay
    if isinstance(answered, Reason):
        return answered
    if isinstance(said, Reason):
        return said
    prompt, messages = said
    sent, blocks = _blocks(row, has_text=prompt is not None)
    if isinstance(sent, Reason):
        return sent
    name = row.get("session_id")
    return TraceRequest(
        line,
        arrival,
        sent,
        answered,
        prompt=prompt,
        messages=messages,
        hash_ids=blocks,
        session=None if values.is_blank(name) else str(name),
        delay_s=delay,
    )


def _milliseconds(value: JsonValue) -> float | Reason | None:
    """Seconds."""
    if value is None:
        return None
    number = values.seconds(value)
    return number if isinstance(number, Reason) else number / _MS_PER_S


def _said(row: JsonObject) -> tuple[str | None, tuple[Message, ...]] | Reason:
    """Prompt and chat, where the row has text."""
    if row.get("messages") is not None:
        messages = values.chat(row["messages"])
        if isinstance(messages, Reason):
            return messages
        return values.last_question(messages), messages
    if row.get("text_input") is None:
        return None, ()
    prompt = values.text(row["text_input"])
    return prompt if isinstance(prompt, Reason) else (prompt, ())


def _blocks(row: JsonObject, *, has_text: bool) -> tuple[int | Reason | None, tuple[int, ...]]:
    """Input tokens and the names of their blocks; of a text, which needs neither, the former."""
    length = row.get("input_length")
    if has_text and length is None:
        return None, ()
    sent = values.input_tokens(length)
    names = row.get("hash_ids")
    if isinstance(sent, Reason) or has_text or names is None:
        return sent, ()
    if not isinstance(names, list) or len(names) != -(-sent // HASH_BLOCK_TOKENS):
        return Reason.HASH_IDS, ()
    ids = tuple(name for name in names if isinstance(name, int) and not isinstance(name, bool))
    return (sent, ids) if len(ids) == len(names) else (Reason.HASH_IDS, ())
