"""Conversations: ShareGPT (`conversations`: `from`, `value`) or chat messages (`role`, `content`).

A row is `{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}]}`, or
`{"messages": [{"role": "user", "content": "…"}, …]}` (also under `items`). Of each row the
first turn of a person that a reply follows at once is the request, with what a `system`
turn at the beginning says; the reply's length is the answer's.
"""

from __future__ import annotations

from collections.abc import Iterator

from tuner.load.traces.json_rows import JsonObject, json_rows
from tuner.load.traces.opening import TextFile
from tuner.load.traces.trace import Entry, Message, Reason, TraceRequest, entries
from tuner.load.traces.values import is_sendable
from tuner.types import JsonValue

TURN_KEYS = ("conversations", "messages", "items")
"""Where a row has its turns; the first that is there and has some counts."""

_ASKING = frozenset({"human", "user"})
_REPLYING = frozenset({"gpt", "assistant", "chatgpt", "model", "bot"})
_SYSTEM = "system"


def read(file: TextFile) -> Iterator[Entry]:
    """Every row's first question with its reply.

    Raises:
        InputError: the file cannot be read to its end.
    """
    return entries(json_rows(file), _request)


def _request(line: int, row: JsonObject) -> TraceRequest | Reason:
    system = prompt = None
    for role, text in _turns(row):
        if role in _ASKING:
            prompt = text
        elif role in _REPLYING and prompt is not None:
            return _exchange(line, system, prompt, text)
        else:
            if role == _SYSTEM and system is None and prompt is None:
                system = text
            prompt = None
    return Reason.NO_REPLY


def _exchange(line: int, system: str | None, prompt: str, reply: str) -> TraceRequest | Reason:
    if not prompt.strip():
        return Reason.NO_PROMPT
    if not reply.strip():
        return Reason.NO_REPLY
    if not is_sendable(prompt + reply + (system or "")):
        return Reason.NOT_UTF8
    messages = (
        (Message(_SYSTEM, system), Message("user", prompt)) if system and system.strip() else ()
    )
    return TraceRequest(line, None, None, None, prompt=prompt, messages=messages, reply=reply)


def _turns(row: JsonObject) -> Iterator[tuple[str, str]]:
    """Role and text of each turn; both empty where it has none of that kind."""
    found = (row.get(key) for key in TURN_KEYS)
    turns: list[JsonValue] = next((t for t in found if isinstance(t, list) and t), [])
    for turn in turns:
        # A turn that cannot be read still stands between question and reply.
        if not isinstance(turn, dict):
            yield "", ""
            continue
        role = turn.get("from", turn.get("role"))
        text = turn.get("value", turn.get("content"))
        yield (
            role.lower() if isinstance(role, str) else "",
            text if isinstance(text, str) else "",
        )
