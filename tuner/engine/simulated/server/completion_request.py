"""What a body of /v1/completions or /v1/chat/completions asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.engine.simulated.server.toy_tokenizer import tokenize
from tuner.types import JsonValue

_DEFAULT_MAX_TOKENS = 16
"""Of a completion; a chat's answer may fill the context."""

_MESSAGE_TOKENS = ("w1", "w2", "w3")
"""Around each message of a chat, as a template has them."""


class BadRequest(Exception):
    """Answered with a 400."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion or a chat.

    Attributes:
        prompt: token ids.
        max_tokens: None is as many as the context holds.
        with_usage: at a stream's end; an answer in one piece always has it.
    """

    chat: bool
    prompt: list[int]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stream: bool
    with_usage: bool


def read_request(
    body: Mapping[str, JsonValue], *, chat: bool, vocabulary: int
) -> CompletionRequest:
    """Read a body.

    Raises:
        BadRequest: vLLM does not take it, or the stand-in cannot answer it.
    """
    prompt = _chat_prompt(body, vocabulary) if chat else _prompt(body, vocabulary)
    if body.get("n") not in (None, 1):
        raise BadRequest("The stand-in gives one answer a request: n must be 1.")
    max_tokens = _whole(body, "max_completion_tokens", None)
    if max_tokens is None:
        max_tokens = _whole(body, "max_tokens", None if chat else _DEFAULT_MAX_TOKENS)
    if max_tokens is not None and max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {max_tokens}.")
    min_tokens = _whole(body, "min_tokens", 0) or 0
    if max_tokens is not None and not 0 <= min_tokens <= max_tokens:
        raise BadRequest(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        )
    options = body.get("stream_options")
    return CompletionRequest(
        chat=chat,
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=body.get("ignore_eos") is True,
        stream=body.get("stream") is True,
        with_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _prompt(body: Mapping[str, JsonValue], vocabulary: int) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokenize(prompt, vocabulary)
    if not isinstance(prompt, list):
        raise BadRequest("Either prompt or prompt_embeds must be provided and non-empty.")
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) != len(prompt):
        raise BadRequest("The stand-in takes one prompt a request: text, or a list of token ids.")
    unknown = next((token for token in ids if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise BadRequest(f"Token id {unknown} is out of vocabulary")
    return ids


def _chat_prompt(body: Mapping[str, JsonValue], vocabulary: int) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message.")
    words: list[str] = []
    for message in messages:
        if not isinstance(message, dict):
            raise BadRequest("a message must be an object with role and content.")
        words += [*_MESSAGE_TOKENS, str(message.get("role")), _content(message.get("content"))]
    return tokenize(" ".join([*words, *_MESSAGE_TOKENS]), vocabulary)


def _content(content: JsonValue) -> str:
    if not isinstance(content, list):
        return str(content or "")
    return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _whole(body: Mapping[str, JsonValue], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequest(f"{name}: Input should be a valid integer")
    return value
