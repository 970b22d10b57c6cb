"""The JSON of vLLM's answers: whole, as events of a stream, and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.types import JsonValue

DONE = b"data: [DONE]\n\n"

ENGINE_DEAD = (
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "InternalServerError",
    500,
)
"""Message, type and code."""


def error_body(message: str, kind: str, code: int) -> dict[str, JsonValue]:
    """An error as vLLM's API tells it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def event(document: Mapping[str, JsonValue]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def usage_of(prompt_tokens: int, output_tokens: int) -> dict[str, JsonValue]:
    """How many tokens it was."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": None,
    }


@dataclass(frozen=True, slots=True)
class Reply:
    """The frame of the answers to one request.

    Attributes:
        number: of no other request.
    """

    number: str
    model: str
    chat: bool

    def whole(self, text: str, reason: str, usage: Mapping[str, JsonValue] | None) -> bytes:
        """The answer in one piece."""
        if self.chat:
            choice: dict[str, JsonValue] = {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": reason,
                "stop_reason": None,
            }
        else:
            choice = self._choice("text", text, reason)
        kind = "chat.completion" if self.chat else "text_completion"
        document = {**self._head(kind), "choices": [choice]}
        return json.dumps(
            document if usage is None else {**document, "usage": dict(usage)}
        ).encode()

    def opening(self) -> bytes:
        """What comes before the first token."""
        if not self.chat:
            return b""
        choice = self._choice("delta", {"role": "assistant", "content": ""}, None)
        return event({**self._head(_CHUNK), "choices": [choice]})

    def piece(self) -> tuple[bytes, bytes]:
        """What stands before and after the text of an event, ready to be joined.

        The text must need no escapes.
        """
        mark = "\x1f"
        text: JsonValue = {"content": mark} if self.chat else mark
        choice = self._choice("delta" if self.chat else "text", text, None)
        kind = _CHUNK if self.chat else "text_completion"
        whole = event({**self._head(kind), "choices": [choice]})
        before, _, after = whole.partition(json.dumps(mark)[1:-1].encode())
        return before, after

    def usage(self, usage: Mapping[str, JsonValue]) -> bytes:
        """The event that tells it."""
        kind = _CHUNK if self.chat else "text_completion"
        return event({**self._head(kind), "choices": [], "usage": dict(usage)})

    def _head(self, kind: str) -> dict[str, JsonValue]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }

    def _choice(self, key: str, value: JsonValue, reason: str | None) -> dict[str, JsonValue]:
        return {
            "index": 0,
            key: value,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": None,
        }


_CHUNK = "chat.completion.chunk"
