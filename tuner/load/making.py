"""A plan -> requests, with the tokens of the served model or with made-up ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuner.errors import InputError
from tuner.load import prompts, recorded
from tuner.load.plan import TURN_END, Draft, prompt_lengths
from tuner.load.prompts import Item, PromptMaker
from tuner.load.request import NoTokenizer, Request, Tokenizer
from tuner.load.traces.statistics import CHARACTERS_PER_TOKEN
from tuner.types import WorkloadSpec

MOST_PROMPT_TOKENS = 300_000_000
"""Of a round: its prompts are in memory, at eight bytes a token and some for each."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What becomes of a draft: a text, or ids."""

    content: str | tuple[int, ...]

    @property
    def tokens(self) -> int | None:
        """Length, if it has ids."""
        return None if isinstance(self.content, str) else len(self.content)


def check_size(drafts: Sequence[Draft]) -> None:
    """Refuse what would not fit into memory.

    Raises:
        InputError: too many tokens.
    """
    total = sum(prompt_lengths(drafts))
    if total > MOST_PROMPT_TOKENS:
        raise InputError(
            f"The prompts of the workload have {total:,} tokens in all; "
            f"{MOST_PROMPT_TOKENS:,} can be kept at a time.",
            "Set fewer `workload: requests:`, fewer `turns:`, or shorter `input_tokens:`.",
        )


async def told(
    drafts: Sequence[Draft], spec: WorkloadSpec, tokenizer: Tokenizer
) -> list[tuple[Draft, tuple[int, ...] | None]]:
    """Each draft with the exact length of its answer, and the ids of a text that is cut.

    Raises:
        TokenizeError: the server broke while it was asked.
    """
    return [await _told(draft, spec, tokenizer) for draft in drafts]


async def vocabulary(tokenizer: Tokenizer) -> list[int]:
    """Ordinary token ids, in rising order; none if nobody can be asked, or it has too few.

    Raises:
        TokenizeError: the server broke while it was asked.
    """
    try:
        ids = sorted(set(await tokenizer.tokenize(prompts.WORDS_TEXT)))
    except NoTokenizer:
        return []
    return ids if len(ids) >= prompts.MIN_VOCABULARY else []


def requests_of_ids(
    drafts: Sequence[tuple[Draft, tuple[int, ...] | None]], maker: PromptMaker[int]
) -> list[Request]:
    """Requests whose prompts are ids, but for those with a recorded text."""
    made: list[list[int] | str] = []
    for slot, (draft, cut) in enumerate(drafts):
        own: list[int] | str
        if cut is not None:
            own = list(cut)
        else:
            own = _own(draft, slot, maker) if draft.text is None else draft.text
        if draft.after is not None and draft.carries:
            before = made[draft.after]
            answer = maker.answer(drafts[draft.after][0].output_tokens)
            if isinstance(before, list) and isinstance(own, list):
                own = before + answer + own
            elif isinstance(before, str) and isinstance(own, str):
                own = _said(before, answer, own)
        made.append(own)
    contents = [own if isinstance(own, str) else tuple(own) for own in made]
    return _requests([draft for draft, _ in drafts], [Prompt(content) for content in contents])


def requests_of_words(drafts: Sequence[Draft], maker: PromptMaker[str]) -> list[Request]:
    """Requests whose prompts are texts: plain words, about one token each."""
    made: list[str] = []
    for slot, draft in enumerate(drafts):
        own = " ".join(_own(draft, slot, maker)) if draft.text is None else draft.text
        if draft.after is not None and draft.carries:
            own = _said(made[draft.after], maker.answer(drafts[draft.after].output_tokens), own)
        made.append(own)
    return _requests(drafts, [Prompt(text) for text in made])


def _requests(drafts: Sequence[Draft], made: Sequence[Prompt]) -> list[Request]:
    return [
        Request(
            index,
            prompt.content,
            prompt.tokens,
            draft.output_tokens,
            ignore_eos=True,
            after=draft.after,
        )
        for index, (draft, prompt) in enumerate(zip(drafts, made, strict=True))
    ]


def _own(draft: Draft, slot: int, maker: PromptMaker[Item]) -> list[Item]:
    """The draft's input: its shared blocks, then items like no others."""
    items: list[Item] = []
    for number in draft.blocks:
        if len(items) >= draft.shared_tokens:
            break
        items += maker.block(number, draft.block_tokens)
    del items[draft.shared_tokens :]
    return items + maker.own(slot, draft.tokens - len(items))


def _said(before: str, answer: Sequence[object], own: str) -> str:
    return TURN_END.join((before, " ".join(map(str, answer)), own))


async def _told(
    draft: Draft, spec: WorkloadSpec, tokenizer: Tokenizer
) -> tuple[Draft, tuple[int, ...] | None]:
    is_cut = draft.text is not None and (spec.input_scale < 1 or spec.max_input_tokens is not None)
    try:
        if draft.reply is not None:
            length = len(await tokenizer.tokenize(draft.reply))
            draft = replace(draft, output_tokens=recorded.scaled_output(spec, length))
        if draft.text is None or not is_cut:
            return draft, None
        ids = await tokenizer.tokenize(draft.text)
    except NoTokenizer:
        return _cut_by_characters(draft) if is_cut else draft, None
    length = recorded.scaled_input(spec, len(ids))
    if length >= len(ids):
        return replace(draft, tokens=max(1, len(ids))), None
    return replace(draft, tokens=length), tuple(ids[:length])


def _cut_by_characters(draft: Draft) -> Draft:
    text = (draft.text or "")[: CHARACTERS_PER_TOKEN * draft.tokens]
    return replace(draft, text=text if text.strip() else draft.text)
