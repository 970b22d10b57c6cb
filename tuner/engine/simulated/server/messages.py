"""What API and engine process say to each other: one JSON array a line, over a socket."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from enum import StrEnum

from tuner.engine.simulated.counters import EngineCounters
from tuner.types import JsonValue


class Word(StrEnum):
    """The first item of each message, and what follows it.

    To the engine: ADD id, prompt ids, most output tokens · ABORT id · RESET (the prefix cache)
    · SERVE (it is ready; SIGTERM counts from now on) · HANG (compute no more)
    · LOSE_WORKER (its worker dies).
    From it: TOKENS steps, ids that got one token in each, ids that ended, counters · WAS_RESET
    whether.
    """

    ADD = "add"
    ABORT = "abort"
    RESET = "reset"
    SERVE = "serve"
    HANG = "hang"
    LOSE_WORKER = "lose worker"
    TOKENS = "tokens"
    WAS_RESET = "was reset"


_COUNTERS = tuple(f.name for f in fields(EngineCounters) if f.name != "finished")


def encode(word: Word, *items: JsonValue | Sequence[JsonValue]) -> bytes:
    """One message."""
    return json.dumps([word, *items], separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> list[JsonValue]:
    """The items of one message."""
    items: list[JsonValue] = json.loads(line)
    return items


def counters_to_list(counters: EngineCounters) -> list[JsonValue]:
    """All counters but those by finish reason, which the API process counts."""
    return [getattr(counters, name) for name in _COUNTERS]


def counters_from_list(values: Sequence[JsonValue]) -> EngineCounters:
    """The reverse of `counters_to_list`."""
    return EngineCounters(**dict(zip(_COUNTERS, values, strict=True)))  # type: ignore[arg-type]
