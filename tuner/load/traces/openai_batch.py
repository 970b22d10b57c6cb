"""Input files of OpenAI's batch API, one request a line, as vLLM's `run-batch` takes them.

`{"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}`: the url
decides whether the body has `messages` or a `prompt`; ids are unique. The answer's length is
`max_completion_tokens`, else `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tuner.load.traces import values
from tuner.load.traces.json_rows import JsonObject, json_rows
from tuner.load.traces.opening import TextFile
from tuner.load.traces.trace import Entry, Reason, TraceRequest, entries
from tuner.types import JsonValue

_CHAT = "/chat/completions"
_COMPLETION = "/completions"


def read(file: TextFile) -> Iterator[Entry]:
    """Every row's chat or completion request; other endpoints are refused.

    Raises:
        InputError: the file cannot be read to its end.
    """
    seen: set[int] = set()  # hashes: ids of a million rows would be large

    def request(line: int, row: JsonObject) -> TraceRequest | Reason:
        name, body, url = row.get("custom_id"), row.get("body"), row.get("url")
        if not (isinstance(name, str) and name and isinstance(body, dict)):
            return Reason.NO_REQUEST
        method = row.get("method")
        if not (isinstance(url, str) and isinstance(method, str)):
            return Reason.NO_REQUEST
        if method.upper() != "POST" or not url.rstrip("/").endswith(_COMPLETION):
            return Reason.OTHER_REQUEST
        if hash(name) in seen:
            return Reason.REPEATED_ID
        seen.add(hash(name))
        return _request(line, body, is_chat=url.rstrip("/").endswith(_CHAT))

    return entries(json_rows(file), request)


def _request(line: int, body: JsonObject, *, is_chat: bool) -> TraceRequest | Reason:
    limit = body.get("max_completion_tokens")
    asked = values.optional_output_tokens(body.get("max_tokens") if limit is None else limit)
    if isinstance(asked, Reason):
        return asked
    if not is_chat:
        return _completion(line, body.get("prompt"), asked)
    messages = values.chat(body.get("messages"))
    if isinstance(messages, Reason):
        return messages
    prompt = values.last_question(messages)
    return TraceRequest(line, None, None, asked, prompt=prompt, messages=messages)


def _completion(line: int, prompt: JsonValue, asked: int | None) -> TraceRequest | Reason:
    if isinstance(prompt, list):
        if prompt and all(isinstance(token, int) for token in prompt):
            return TraceRequest(line, None, len(prompt), asked)  # ids of the prompt's tokens
        if len(prompt) > 1:
            return Reason.SEVERAL_PROMPTS
        prompt = prompt[0] if prompt else None
    text = values.text(prompt)
    if isinstance(text, Reason):
        return text
    return TraceRequest(line, None, None, asked, prompt=text)
