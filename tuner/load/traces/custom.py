"""JSON lines with `prompt` and perhaps `output_tokens`: the custom dataset of `vllm bench`."""

from __future__ import annotations

from collections.abc import Iterator

from tuner.load.traces import values
from tuner.load.traces.json_rows import JsonObject, json_rows
from tuner.load.traces.opening import TextFile
from tuner.load.traces.trace import Entry, Reason, TraceRequest, entries


def read(file: TextFile) -> Iterator[Entry]:
    """Every row's prompt.

    Raises:
        InputError: the file cannot be read to its end.
    """
    return entries(json_rows(file), _request)


def _request(line: int, row: JsonObject) -> TraceRequest | Reason:
    prompt = values.text(row.get("prompt"))
    if isinstance(prompt, Reason):
        return prompt
    asked = values.optional_output_tokens(row.get("output_tokens"))
    if isinstance(asked, Reason):
        return asked
    return TraceRequest(line, None, None, asked, prompt=prompt)
