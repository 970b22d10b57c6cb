"""A round of a workload before the served model's tokens are known.

Where requests come from (`synthetic`, `recorded`) ends in a `Plan`; `prompts` turns one into
requests. Lengths, shared beginnings, conversations and times are all in the plan, so that they
can be told, and simulated, without a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

TURN_END = "\n"
"""Between the turns of a conversation of texts."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A request that has no prompt yet.

    Attributes:
        tokens: of its own input, without what was said before; of a text an estimate.
        output_tokens: asked for; an estimate where `reply` is set.
        blocks: numbers of the shared blocks that its input begins with; equal numbers are equal
            tokens.
        block_tokens: length of each block, the same for all drafts of a plan.
        shared_tokens: how much of the input its blocks give at most; the rest of it is like no
            other prompt.
        text: the input itself, where it is recorded.
        reply: the recorded answer, whose length is to be asked for.
        after: index of the turn before it.
        carries: whether its prompt begins with the prompt and answer of the turn before it.
    """

    tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    shared_tokens: int = 0
    text: str | None = None
    reply: str | None = None
    after: int | None = None
    carries: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """The drafts of a round.

    Attributes:
        due_s: recorded times of the measured requests, seconds after the first; None where
            they are not recorded, or not asked for.
        note: see `tuner.load.request.Workload`.
    """

    measured: tuple[Draft, ...]
    warmup: tuple[Draft, ...]
    due_s: tuple[float, ...] | None = None
    note: str = ""


def prompt_lengths(drafts: Sequence[Draft]) -> list[int]:
    """Tokens of each whole prompt, that of the turns before and their answers included."""
    lengths: list[int] = []
    for draft in drafts:
        before = 0
        if draft.after is not None and draft.carries:
            before = lengths[draft.after] + drafts[draft.after].output_tokens
        lengths.append(before + draft.tokens)
    return lengths


def of_two_lengths(drafts: Sequence[Draft]) -> list[Draft]:
    """Halve every second prompt where all are equally long.

    A server's first prompt of a new length is slow; a warm-up has to have more than one.
    """
    if len({draft.tokens for draft in drafts}) != 1:
        return list(drafts)
    return [_other_length(draft) if place % 2 else draft for place, draft in enumerate(drafts)]


def _other_length(draft: Draft) -> Draft:
    tokens = draft.tokens // 2 if draft.tokens > 1 else 2
    if draft.text is None:
        return replace(draft, tokens=tokens)
    text = draft.text[: len(draft.text) // 2]
    return replace(draft, tokens=tokens, text=text if text.strip() else f"{draft.text} more")
