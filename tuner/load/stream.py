"""The event stream of a completion, read as it arrives.

vLLM sends `data: {json}` lines: one for each step that brought tokens, one with the usage,
`data: [DONE]` at the end. A failure after the first byte comes as an event
`data: {"error": {...}}` in a stream of status 200, followed by `[DONE]` all the same.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TypeGuard

from tuner.load.event_shape import NO_SHAPE, shape_of
from tuner.types import JsonValue, RequestStatus

MAX_LINE_BYTES = 1 << 20
"""An event of vLLM's has some 300 bytes; a line of this length is no event stream."""

_MAX_ERROR_CHARACTERS = 300

_ABSURD = 2**53

_SURPLUS_CHUNKS = 64
"""Chunks without a token that an answer may have besides one for each token asked for."""


class CompletionStream:
    """What has arrived of one answer.

    A chunk is counted as an arrival of tokens when it carries a choice, also one of empty
    text: half a character and special tokens print as nothing. So does vLLM's benchmark.
    Where it says which tokens it carries (`return_token_ids`), it counts as so many; not at
    all if there are none.

    Args:
        asked_tokens: the request's `max_tokens`.
        ignore_eos: nothing else than `max_tokens` may end the answer.

    Attributes:
        token_times_s: arrival of each such chunk.
        prompt_tokens, output_tokens: from the usage, 0 before it came.
        end_s: arrival of `[DONE]`, None before it came.
    """

    def __init__(self, asked_tokens: int, *, ignore_eos: bool = False) -> None:
        self.token_times_s: list[float] = []
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.end_s: float | None = None
        self._asked_tokens = asked_tokens
        self._ignore_eos = ignore_eos
        self._most_chunks = 2 * asked_tokens + _SURPLUS_CHUNKS
        self._counts: list[int] = []
        self._has_usage = False
        self._finish_reason = ""
        self._error = ""
        self._rest = b""
        self._shape = NO_SHAPE

    def feed(self, data: bytes, now_s: float) -> bool:
        """Take what arrived at `now_s`; False when it makes no sense to read on."""
        if not self._rest:
            tokens = self._shape.tokens_in(data)
            if tokens and len(self.token_times_s) < self._most_chunks:
                # One more event like the last: nearly all of them.
                self.token_times_s.append(now_s)
                self._counts.append(tokens)
                return True
        return self._feed_lines(data, now_s)

    def token_counts(self) -> tuple[int, ...]:
        """How many tokens came at each of `token_times_s`; empty if one each.

        Where the server does not say, and there were more tokens than chunks, they are spread
        evenly.
        """
        chunks, tokens = len(self.token_times_s), self.output_tokens
        counts = self._counts
        if sum(counts) != tokens and tokens > chunks > 0:
            ends = [tokens * number // chunks for number in range(chunks + 1)]
            counts = [end - start for start, end in pairwise(ends)]
        return tuple(counts) if any(count != 1 for count in counts) else ()

    def verdict(self) -> tuple[RequestStatus, str]:
        """Status and error of an answer whose connection ended in good order."""
        if self._error:
            return RequestStatus.SERVER_ERROR, self._error
        if self._finish_reason in ("abort", "error"):
            return RequestStatus.SERVER_ERROR, f"the server ended it with {self._finish_reason!r}"
        if not self.token_times_s:
            return RequestStatus.EMPTY, "the answer is empty"
        if self.end_s is None:
            return RequestStatus.DISCONNECTED, "the stream ended without [DONE]"
        if not self._has_usage:
            return RequestStatus.SERVER_ERROR, "the stream ended without usage"
        return self._length_verdict()

    def _length_verdict(self) -> tuple[RequestStatus, str]:
        got, asked = self.output_tokens, self._asked_tokens
        if got == 0:
            return RequestStatus.EMPTY, "the answer is empty"
        if self._finish_reason == "length" and got < asked:
            return RequestStatus.REJECTED, (
                f"cut off at {got} of {asked} tokens: a prompt of "
                f"{self.prompt_tokens} and its answer exceed the context (max-model-len)"
            )
        if got > asked or (self._ignore_eos and got != asked):
            return RequestStatus.WRONG_LENGTH, f"{got} tokens, where {asked} were asked for"
        return RequestStatus.OK, ""

    def _feed_lines(self, data: bytes, now_s: float) -> bool:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self._fail("the answer is not an event stream: a line without end")
            return False
        for line in lines:
            if line.startswith(b"data:"):
                self._take_event(line[5:].strip(), now_s)
        if len(self.token_times_s) > self._most_chunks:
            self._fail(f"an answer without end, where {self._asked_tokens} tokens were asked for")
            return False
        return True

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
            self._take_choice(choices[0], now_s)
            self._shape = shape_of(event, message) or self._shape
        self._take_usage(message.get("usage"))

    def _take_choice(self, choice: JsonValue, now_s: float) -> None:
        fields = choice if isinstance(choice, dict) else {}
        reason, ids = fields.get("finish_reason"), fields.get("token_ids")
        self._finish_reason = reason if isinstance(reason, str) else self._finish_reason
        tokens = len(ids) if isinstance(ids, list) else 1
        if tokens:
            self.token_times_s.append(now_s)
            self._counts.append(tokens)

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
