"""Requests of drawn lengths, with shared beginnings and conversations if asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from tuner.errors import InputError
from tuner.load.lengths import draw
from tuner.load.plan import Draft, Plan, of_two_lengths
from tuner.load.prompts import HEAD_ITEMS
from tuner.load.seeds import Stream, generator
from tuner.types import LengthSpec, WorkloadSpec

OPEN_CONVERSATIONS = 32
"""Conversations that take turns at a time in an open loop."""


def plan(spec: WorkloadSpec) -> Plan:
    """The drafts of every round: rounds differ in their prompts only.

    Raises:
        InputError: it has no lengths.
    """
    inputs, outputs = _given(spec.input_tokens, "input"), _given(spec.output_tokens, "output")
    sent = draw(inputs, spec.requests, generator(spec.seed, Stream.INPUT))
    asked = draw(outputs, spec.requests, generator(spec.seed, Stream.OUTPUT))
    place_of: dict[tuple[int, int], int] = {}
    measured = []
    for place, turn in enumerate(islice(_turns(spec), spec.requests)):
        place_of[turn] = place
        conversation, number = turn
        draft = Draft(sent[place], asked[place])
        if number:
            draft = replace(draft, after=place_of[conversation, number - 1])
        else:
            draft = _with_prefix(draft, spec, conversation)
        measured.append(draft)
    return Plan(tuple(measured), tuple(of_two_lengths(_warmup(spec, inputs, outputs))))


def _warmup(spec: WorkloadSpec, inputs: LengthSpec, outputs: LengthSpec) -> list[Draft]:
    """First turns without the shared beginning: only the first round has a warm-up."""
    rng = generator(spec.seed, Stream.WARMUP)
    sent = draw(inputs, spec.warmup_requests, rng)
    asked = draw(outputs, spec.warmup_requests, rng)
    return [Draft(*lengths) for lengths in zip(sent, asked, strict=True)]


def _with_prefix(draft: Draft, spec: WorkloadSpec, conversation: int) -> Draft:
    """The same with the beginning of its group; some of its tokens stay its own."""
    shared = spec.shared_prefix
    if shared is None or draft.tokens <= HEAD_ITEMS:
        return draft
    return replace(
        draft,
        blocks=(conversation % shared.groups,),
        block_tokens=shared.tokens,
        shared_tokens=min(shared.tokens, draft.tokens - HEAD_ITEMS),
    )


def _turns(spec: WorkloadSpec) -> Iterator[tuple[int, int]]:
    """Conversation and turn of each request, at least as many as are measured.

    So many conversations go on side by side that a closed loop finds the turn before answered
    when it comes to the next: twice those in flight.
    """
    conversations = -(-spec.requests // spec.turns)
    width = 2 * spec.concurrency if spec.concurrency else OPEN_CONVERSATIONS
    for first in range(0, conversations, width):
        for turn in range(spec.turns):
            for conversation in range(first, min(first + width, conversations)):
                yield conversation, turn


def _given(lengths: LengthSpec | None, which: str) -> LengthSpec:
    if lengths is None:
        raise InputError(
            f"A workload of kind `synthetic` needs `{which}_tokens`.",
            f"Write `{which}_tokens: {{mean: 512, stdev: 128}}`.",
        )
    return lengths
