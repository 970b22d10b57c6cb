"""CSV or JSON lines as GuideLLM takes them: any of many usual names for the same column.

A row has a prompt (`prompt`, `text`, `input`, …), or its length (`prompt_tokens_count`,
`input_tokens`, …), or both; the answer's length, a system prompt and a time are optional. Of
several columns for one thing the first name of the list counts, as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tuner.load.traces import values
from tuner.load.traces.csv_rows import plain, read_header, text_rows
from tuner.load.traces.json_rows import json_rows
from tuner.load.traces.opening import TextFile
from tuner.load.traces.trace import Entry, Message, Reason, TraceRequest, entries
from tuner.types import JsonValue

# The first names of each are those of GuideLLM's column mapper, the others of its trace
# files and of what other tools write. All without case, spaces, `_` and `-`.
TEXT_NAMES = (
    "prompt",
    "instruction",
    "question",
    "input",
    "context",
    "content",
    "conversation",
    "turn",
    "text",
    "query",
    "textinput",
)
INPUT_NAMES = (
    "prompttokenscount",
    "inputtokenscount",
    "prompttokens",
    "inputtokens",
    "promptlength",
    "inputlength",
    "promptlen",
    "inputlen",
    "numprompttokens",
    "isl",
)
OUTPUT_NAMES = (
    "outputtokenscount",
    "completiontokenscount",
    "outputtokens",
    "completiontokens",
    "generatedtokens",
    "outputlength",
    "completionlength",
    "outputlen",
    "maxtokens",
    "maxnewtokens",
    "osl",
)
_SYSTEM_NAMES = ("systemprompt", "system", "prefix")
_TIME_NAMES = ("timestamp", "arrivaltime", "arrivals", "time")
_MEDIA_NAMES = ("image", "images", "video", "videos", "audio", "audios")


def read(file: TextFile) -> Iterator[Entry]:
    """Every row's prompt or its length.

    Raises:
        InputError: no column has a known name, or the file cannot be read to its end.
    """
    if file.next_character() in (b"{", b"["):
        return entries(
            json_rows(file),
            lambda line, row: _request(line, {plain(key): cell for key, cell in row.items()}),
        )
    header = read_header(file)
    if not any(name in header.places for name in (*TEXT_NAMES, *INPUT_NAMES)):
        raise file.problem(
            f"has no column for the prompt or its length; its columns are: {header}",
            "Call one `prompt`, or `prompt_tokens_count`.",
        )
    return entries(
        text_rows(file, header),
        lambda line, cells: _request(line, {n: cells[at] for n, at in header.places.items()}),
    )


def _request(line: int, row: Mapping[str, JsonValue]) -> TraceRequest | Reason:
    if any(not values.is_blank(row.get(name)) for name in _MEDIA_NAMES):
        return Reason.MEDIA
    said, length = _first(row, TEXT_NAMES), _first(row, INPUT_NAMES)
    if said is None and length is None:
        return Reason.NO_PROMPT
    prompt = None if said is None else values.text(said)
    if isinstance(prompt, Reason):
        return prompt
    sent = None if length is None else values.input_tokens(length)
    if isinstance(sent, Reason):
        return sent
    answered = values.optional_output_tokens(_first(row, OUTPUT_NAMES))
    if isinstance(answered, Reason):
        return answered
    time = _first(row, _TIME_NAMES)
    arrival = None if time is None else values.any_seconds(time)
    if isinstance(arrival, Reason):
        return arrival
    messages = _messages(_first(row, _SYSTEM_NAMES), prompt)
    if isinstance(messages, Reason):
        return messages
    return TraceRequest(line, arrival, sent, answered, prompt=prompt, messages=messages)


def _first(row: Mapping[str, JsonValue], names: tuple[str, ...]) -> JsonValue:
    """The value under the first of the names that has one."""
    return next((row[name] for name in names if not values.is_blank(row.get(name))), None)


def _messages(system: JsonValue, prompt: str | None) -> tuple[Message, ...] | Reason:
    """A chat, where the row has a system prompt."""
    if system is None or prompt is None:
        return ()
    said = values.text(system)
    if isinstance(said, Reason):
        return said
    return (Message("system", said), Message("user", prompt))
