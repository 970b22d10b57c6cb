"""What a load is made of: requests, and who knows the served model's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class TokenizeError(Exception):
    """The server did not say which tokens a text has: it is broken, or going down."""


class NoTokenizer(TokenizeError):
    """The server has no `/tokenize`."""


class Tokenizer(Protocol):
    """Who knows the served model's tokens; `tuner.load.client.LoadClient` asks the server."""

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, without special ones.

        Raises:
            NoTokenizer: there is nobody to ask.
            TokenizeError: no answer.
        """


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the load.

    Attributes:
        index: position in its list, from 0.
        prompt: text, or the ids of its tokens.
        prompt_tokens: length of a prompt of ids; None for text, whose length is in the
            server's `usage`.
        output_tokens: asked for as `max_tokens`.
        ignore_eos: whether the answer goes on to that length even if the model would end
            sooner, so that every trial does the same work.
        after: index of the request whose answer it waits for: the turn before it.
    """

    index: int
    prompt: str | tuple[int, ...]
    prompt_tokens: int | None
    output_tokens: int
    ignore_eos: bool
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one round.

    Attributes:
        requests: measured, in this order.
        warmup: sent before, unmeasured; their prompts are none of the measured ones and,
            from two on, have at least two lengths.
        arrivals_s: open loop: when each request is due, seconds after the first, rising.
            None for a closed loop.
        note: what the user should know of how they were made; mostly empty.
    """

    requests: tuple[Request, ...]
    warmup: tuple[Request, ...]
    arrivals_s: tuple[float, ...] | None
    note: str = ""
