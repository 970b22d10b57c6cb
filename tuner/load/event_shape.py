"""Reading a token's event without parsing it.

All events of a stream but the first and the last are alike: the same bytes but for the text and
the token ids. One of them is parsed as JSON; the next ones are compared with it, which costs a
tenth and tells as much. What differs anywhere else is parsed again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuner.types import JsonValue

# A quote inside of a JSON string is escaped, so that this finds the key and nothing else.
_TEXT = re.compile(rb'"text":"(?:[^"\\]|\\.)*"')
_IDS = re.compile(rb'"token_ids":\[([0-9,]*)\]')
_TEXT_KEY_BYTES = len(b'"text":"')


@dataclass(frozen=True, slots=True)
class EventShape:
    """An event, from `data:` to the empty line, less its text and its token ids.

    Attributes:
        head: up to the text's opening quote; the text follows.
        middle: from the text's closing quote to the list's opening bracket; ids follow. Empty
            if the events name no ids.
        tail: the rest.
    """

    head: bytes
    middle: bytes
    tail: bytes

    def tokens_in(self, data: bytes) -> int:
        """How many tokens `data` carries if it is one event of this shape, else 0.

        An event that names no ids counts as one token.
        """
        if not (data.startswith(self.head) and data.endswith(self.tail)):
            return 0
        if data.find(b"\n") != len(data) - 2:  # of the two at its end, the first is the first
            return 0
        if not self.middle:
            return 1
        end = len(data) - len(self.tail)
        start = data.rfind(b"[", 0, end) + 1
        if start == end or not data.endswith(self.middle, 0, start):
            return 0
        return data.count(b",", start, end) + 1


NO_SHAPE = EventShape(b"\0", b"", b"\0")
"""Fits nothing."""


def shape_of(event: bytes, message: JsonValue) -> EventShape | None:
    """What the events after this one look like; None of one that none is like.

    Args:
        event: the JSON of an event, without `data:`.
        message: what it says.
    """
    if not _is_ordinary(message):
        return None
    text = _TEXT.search(event)
    if text is None:
        return None
    head = b"data: " + event[: text.start() + _TEXT_KEY_BYTES]
    after = text.end() - 1
    if b"[" not in event[after:]:  # no ids: `null`, or a server that does not know of them
        return EventShape(head, b"", event[after:] + b"\n\n")
    ids = _IDS.search(event, after)
    if ids is None or b"[" in event[ids.end() :]:
        return None
    return EventShape(head, event[after : ids.start(1)], event[ids.end(1) :] + b"\n\n")


def _is_ordinary(message: JsonValue) -> bool:
    """Whether it tells of tokens and of nothing else."""
    if not isinstance(message, dict) or message.get("error") or message.get("usage"):
        return False
    choices = message.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return False
    choice = choices[0]
    return isinstance(choice.get("text"), str) and choice.get("finish_reason") is None
