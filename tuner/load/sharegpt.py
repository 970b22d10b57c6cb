"""Recorded conversations: one JSON list in the form of ShareGPT or of chat messages.

A row is `{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}]}` or
`{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}`. Of each row
the first turn of a person that a reply follows at once is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import InputError
from tuner.types import JsonValue

CHARACTERS_PER_TOKEN = 4
"""A usual rule of thumb for English text; only for estimates, never for a measurement."""

_ASKING = frozenset({"human", "user"})
_REPLYING = frozenset({"gpt", "assistant", "chatgpt", "model", "bot"})

_HINT = (
    'Give a JSON list of {"conversations": [{"from": "human", "value": "..."}, '
    '{"from": "gpt", "value": "..."}]}.'
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a person asked and what was answered."""

    prompt: str
    reply: str


@dataclass(frozen=True, slots=True)
class Recording:
    """A file's usable exchanges in its order, no prompt twice.

    Attributes:
        skipped: rows without a usable exchange, and those that repeat a prompt.
    """

    path: Path
    exchanges: tuple[Exchange, ...]
    skipped: int


def load(path: Path) -> Recording:
    """Read a file of recorded conversations.

    Raises:
        InputError: the file cannot be read, is no JSON list, or has no usable row.
    """
    rows = _read_rows(path)
    by_prompt: dict[str, Exchange] = {}
    for row in rows:
        exchange = _first_exchange(row)
        if exchange is not None:
            by_prompt.setdefault(exchange.prompt, exchange)
    if not by_prompt:
        raise InputError(
            f"{path}: none of its {len(rows)} rows has a question that a reply follows.", _HINT
        )
    return Recording(path, tuple(by_prompt.values()), skipped=len(rows) - len(by_prompt))


def estimated_tokens(text: str) -> int:
    """Roughly how many tokens `text` has, at four characters a token; at least one."""
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))


def _read_rows(path: Path) -> list[JsonValue]:
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise InputError(f"{path}: the workload's file {problem}.", "Check `workload: path:`.")
    try:
        rows: JsonValue = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise InputError(f"{path}: is nested too deeply to be a workload.", _HINT) from error
    except ValueError as error:  # no JSON, no UTF-8, a number of thousands of digits
        raise InputError(f"{path}: is not one JSON document: {error}", _HINT) from error
    if not isinstance(rows, list):
        raise InputError(f"{path}: is not a JSON list.", _HINT)
    return rows


def _first_exchange(row: JsonValue) -> Exchange | None:
    prompt = None
    for role, text in _turns(row):
        if role in _ASKING:
            prompt = text
        elif role in _REPLYING and prompt is not None:
            return _usable(prompt, text)
        else:
            prompt = None
    return None


def _turns(row: JsonValue) -> Iterator[tuple[str, str]]:
    """Role and text of each well-formed turn."""
    if not isinstance(row, dict):
        return
    for turns_key, role_key, text_key in (
        ("conversations", "from", "value"),
        ("messages", "role", "content"),
    ):
        turns = row.get(turns_key)
        for turn in turns if isinstance(turns, list) else ():
            role, text = (
                (turn.get(role_key), turn.get(text_key)) if isinstance(turn, dict) else ("", "")
            )
            # A turn that cannot be read still stands between question and reply.
            yield (
                role.lower() if isinstance(role, str) else "",
                text if isinstance(text, str) else "",
            )


def _usable(prompt: str, reply: str) -> Exchange | None:
    if not prompt.strip() or not reply.strip():
        return None
    try:
        (prompt + reply).encode()
    except UnicodeEncodeError:  # half a surrogate pair: no server can be sent this
        return None
    return Exchange(prompt, reply)
