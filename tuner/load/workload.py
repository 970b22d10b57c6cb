"""Which requests every trial is measured under.

All of it follows from the `WorkloadSpec`, its seed and the number of the round, so that two
configurations meet the same requests in the same order. Input lengths, output lengths, arrivals
and prompts come from random streams of their own: changing one leaves the others as they were.

One life of a server may see several rounds. They have the same lengths and arrivals, but no
prompt of one begins as a prompt of another does, so that what the server's prefix cache still
holds is of no use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tuner.errors import InputError
from tuner.load import making, prompts, recorded, synthetic
from tuner.load.plan import Plan, prompt_lengths
from tuner.load.prompts import PromptMaker
from tuner.load.request import (
    NoTokenizer,
    Request,
    TokenizeError,
    Tokenizer,
    Workload,
)
from tuner.load.schedule import schedule
from tuner.types import RequestRecord, RequestStatus, WorkloadKind, WorkloadSpec

__all__ = [
    "WARMUP_OUTPUT_TOKENS",
    "NoTokenizer",
    "Request",
    "TokenizeError",
    "Tokenizer",
    "Workload",
    "build",
    "build_without_server",
    "has_texts",
    "mismatch",
    "planned_lengths",
    "schedule",
    "shares_prompts",
    "too_long",
]

MOST_ADDED_TOKENS = 4
"""Of a server that puts something of its own before each prompt, such as a BOS token."""

WARMUP_OUTPUT_TOKENS = 32
"""Longest warm-up answer: enough for decoding to run warm, short enough not to cost a trial
much time."""

_MADE_UP_IDS = range(1000, 1512)


async def build(spec: WorkloadSpec, tokenizer: Tokenizer, round_number: int = 0) -> Workload:
    """Make the requests for the model that `tokenizer` knows.

    Prompts of recorded or drawn lengths are ids, of exactly that many tokens; recorded texts are
    sent as they are, where they need not be cut. From a server without `/tokenize` (vLLM has
    it) prompts are plain words, about one token each, and lengths of texts are estimates of
    four characters a token.

    In a conversation a prompt is all that was said before and its own input. The answers in it
    are made up, as long as those asked for: the server's own would differ from one
    configuration to the next.

    Raises:
        InputError: the recorded requests cannot be used, or do not fit into memory.
        TokenizeError: the server broke while it was asked.
    """
    plan = _plan(spec, round_number)
    drafts = [*plan.measured, *plan.warmup]
    making.check_size(drafts)
    told = await making.told(drafts, spec, tokenizer)
    needs_ids = any(draft.text is None or draft.after is not None for draft, _ in told)
    ids = await making.vocabulary(tokenizer) if needs_ids else []
    if ids or not needs_ids:
        maker = PromptMaker(ids or _MADE_UP_IDS, spec.seed, round_number)
        requests = making.requests_of_ids(told, maker)
    else:
        words = PromptMaker(prompts.words(), spec.seed, round_number)
        requests = making.requests_of_words([draft for draft, _ in told], words)
    return _workload(spec, plan, requests, round_number)


def build_without_server(spec: WorkloadSpec, round_number: int = 0) -> Workload:
    """The same with made-up tokens, for a simulation: lengths and shared beginnings are right.

    Raises:
        InputError: as `build`.
    """
    plan = _plan(spec, round_number)
    drafts = [replace(draft, text=None) for draft in (*plan.measured, *plan.warmup)]
    making.check_size(drafts)
    maker = PromptMaker(_MADE_UP_IDS, spec.seed, round_number)
    requests = making.requests_of_ids([(draft, None) for draft in drafts], maker)
    return _workload(spec, plan, requests, round_number)


def planned_lengths(spec: WorkloadSpec) -> list[tuple[int, int]]:
    """Input and output tokens of each measured request, without asking a server.

    Exact but for recorded texts, which are estimated at four characters a token (output lengths
    that the spec gives are exact). The input of a later turn is all that was said before, too.

    Raises:
        InputError: the recorded requests cannot be used.
    """
    drafts = _plan(spec, 0).measured
    outputs = [draft.output_tokens for draft in drafts]
    return list(zip(prompt_lengths(drafts), outputs, strict=True))


def shares_prompts(spec: WorkloadSpec) -> bool:
    """Whether prompts begin alike, so that a prefix cache matters.

    Raises:
        InputError: the recorded requests cannot be used.
    """
    return any(draft.blocks or draft.after is not None for draft in _plan(spec, 0).measured)


def has_texts(spec: WorkloadSpec) -> bool:
    """Whether recorded texts are sent, so that `planned_lengths` are estimates.

    Raises:
        InputError: the recorded requests cannot be used.
    """
    return any(draft.text is not None for draft in _plan(spec, 0).measured)


def too_long(spec: WorkloadSpec, max_model_len: int) -> int:
    """How many measured requests a context of `max_model_len` tokens does not hold.

    As exact as `planned_lengths`.

    Raises:
        InputError: the recorded requests cannot be used.
    """
    return sum(sent + asked > max_model_len for sent, asked in planned_lengths(spec))


def mismatch(records: Sequence[RequestRecord], requests: Sequence[Request]) -> str:
    """Why prompts are not as long as they were made, by the server's count; empty if they are.

    Only of prompts of ids that were answered: the length of others is the server's to say. Up
    to `MOST_ADDED_TOKENS` more, the same number for every prompt, are the server's way of
    serving them (vLLM adds none to ids): each configuration has them, and they cost as good as
    nothing.
    """
    made = {request.index: request.prompt_tokens for request in requests}
    counted = [
        (wanted, record.prompt_tokens)
        for record in records
        if record.status is RequestStatus.OK
        and record.prompt_tokens
        and (wanted := made.get(record.index)) is not None
    ]
    wrong = [(wanted, got) for wanted, got in counted if wanted != got]
    added = {got - wanted for wanted, got in counted}
    if not wrong or (len(added) == 1 and 0 < min(added) <= MOST_ADDED_TOKENS):
        return ""
    wanted, got = wrong[0]
    return (
        f"{len(wrong)} of {len(counted)} prompts are of another length for the server: "
        f"one of {wanted} tokens was counted as {got}"
    )


def _plan(spec: WorkloadSpec, round_number: int) -> Plan:
    match spec.kind:
        case WorkloadKind.SYNTHETIC:
            return synthetic.plan(spec)
        case WorkloadKind.LIKE_SERVER:
            raise InputError(
                f"The server at {spec.url} has not been asked yet what its workload is like.",
                "Use `tuner run`, which asks it once at the beginning of a study.",
            )
        case _:
            return recorded.plan(spec, round_number)


def _workload(
    spec: WorkloadSpec, plan: Plan, requests: Sequence[Request], round_number: int
) -> Workload:
    count, limit = len(plan.measured), WARMUP_OUTPUT_TOKENS
    warmup = tuple(
        replace(request, index=index, output_tokens=min(request.output_tokens, limit))
        for index, request in enumerate(requests[count:])
    )
    arrivals_s = schedule(spec, round_number)
    return Workload(tuple(requests[:count]), warmup, arrivals_s, plan.note)
