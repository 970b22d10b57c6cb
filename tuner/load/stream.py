"""The event stream of a completion, read line by line.

vLLM sends `data: {json}` lines: one for each step that brought tokens, one with the usage,
`data: [DONE]` at the end. A failure after the first byte comes as an event
`data: {"error": {...}}` in a stream of status 200, followed by `[DONE]` all the same.
"""

from __future__ import annotations

import json
from typing import TypeGuard

from tuner.types import JsonValue, RequestStatus

MAX_LINE_BYTES = 1 << 20
"""An event of vLLM's has some 300 bytes; a line of this length is no event stream."""

_MAX_ERROR_CHARACTERS = 300


_ABSURD = 2**53


class CompletionStream:
    """What has arrived of one answer.

    A chunk is counted as a token's arrival when it carries a choice, also one of empty
    text: half a character and special tokens print as nothing. So does vLLM's benchmark.

    Args:
        asked_tokens: the request's `max_tokens`.

    Attributes:
        token_times_s: arrival of each such chunk; under load one may carry several tokens.
        prompt_tokens, output_tokens: from the usage, 0 before it came.
        end_s: arrival of `[DONE]`, None before it came.
    """

    def __init__(self, asked_tokens: int) -> None:
        self.token_times_s: list[float] = []
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.end_s: float | None = None
        self._asked_tokens = asked_tokens
        self._has_usage = False
        self._finish_reason = ""
        self._error = ""
        self._rest = b""

    def feed(self, data: bytes, now_s: float) -> bool:
        """Take what arrived at `now_s`; False when it makes no sense to read on."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self._fail("the answer is not an event stream: a line without end")
            return False
        for line in lines:
            if line.startswith(b"data:"):
                self._take_event(line[5:].strip(), now_s)
        return True

    def verdict(self) -> tuple[RequestStatus, str]:
        """Status and error of an answer whose connection ended in good order."""
        if self._error:
            return RequestStatus.FAILED, self._error
        if self.end_s is None:
            return RequestStatus.FAILED, "the stream ended without [DONE]"
        if not self._has_usage:
            return RequestStatus.FAILED, "the stream ended without usage"
        if not self.token_times_s or self.output_tokens == 0:
            return RequestStatus.FAILED, "the answer is empty"
        if self._finish_reason in ("abort", "error"):
            return RequestStatus.FAILED, f"the server ended it with {self._finish_reason!r}"
        if self._finish_reason == "length" and self.output_tokens < self._asked_tokens:
            return RequestStatus.REJECTED, (
                f"cut off at {self.output_tokens} of {self._asked_tokens} tokens: a prompt of "
                f"{self.prompt_tokens} and its answer exceed the context (max-model-len)"
            )
        return RequestStatus.OK, ""

    def _take_event(self, event: bytes, now_s: float) -> None:
        if event == b"[DONE]":
            if self.end_s is None:
                self.end_s = now_s
        else:
            self._take_json(event, now_s)

    def _take_json(self, event: bytes, now_s: float) -> None:
        try:
            message: JsonValue = json.loads(event)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._fail(f"an event that is no JSON object: {_shortened(event)}")
            return
        if message.get("error"):
            self._fail(error_text(event))
        choices = message.get("choices")
        if isinstance(choices, list) and choices:
            self.token_times_s.append(now_s)
            choice = choices[0]
            reason = choice.get("finish_reason") if isinstance(choice, dict) else None
            self._finish_reason = reason if isinstance(reason, str) else self._finish_reason
        self._take_usage(message.get("usage"))

    def _take_usage(self, usage: JsonValue) -> None:
        if not isinstance(usage, dict):
            return
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if _is_count(prompt) and _is_count(output):
            self.prompt_tokens, self.output_tokens = prompt, output
            self._has_usage = True

    def _fail(self, error: str) -> None:
        """Remember the first error; what follows it is its consequence."""
        self._error = self._error or error


def _is_count(value: JsonValue) -> TypeGuard[int]:
    """Whether a server's number of tokens can be one."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _ABSURD


def error_text(body: bytes) -> str:
    """The message of an error in one short line: vLLM's JSON, or the text itself."""
    try:
        answer: JsonValue = json.loads(body)
    except (ValueError, RecursionError):
        return _shortened(body)
    if isinstance(answer, dict) and isinstance(answer.get("error"), (dict, str)):
        answer = answer["error"]
    message = answer.get("message") if isinstance(answer, dict) else answer
    return _shortened(message.encode(errors="replace") if isinstance(message, str) else body)


def _shortened(text: bytes) -> str:
    line = " ".join(text[: 4 * _MAX_ERROR_CHARACTERS].decode(errors="replace").split())
    return line if len(line) <= _MAX_ERROR_CHARACTERS else line[: _MAX_ERROR_CHARACTERS - 1] + "…"
