"""Which requests every trial is measured under.

All of it follows from the `WorkloadSpec` and its seed, so that two configurations meet the
same requests in the same order. Input lengths, output lengths, arrivals and prompts come
from random streams of their own: changing one leaves the others as they were.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

from tuner.errors import InputError
from tuner.load import prompts, sharegpt
from tuner.types import LengthSpec, WorkloadKind, WorkloadSpec

WARMUP_OUTPUT_TOKENS = 32
"""Longest warm-up answer: enough for decoding to run warm, short enough not to cost a trial
much time."""

_LONGEST_TOKENS = 2**31 - 1


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
    """

    index: int
    prompt: str | tuple[int, ...]
    prompt_tokens: int | None
    output_tokens: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one trial.

    Attributes:
        requests: measured, in this order.
        warmup: sent before, unmeasured; their prompts are none of the measured ones and,
            from two on, have at least two lengths.
        arrivals_s: open loop: when each request is due, seconds after the first, rising.
            None for a closed loop.
    """

    requests: tuple[Request, ...]
    warmup: tuple[Request, ...]
    arrivals_s: tuple[float, ...] | None


class _Stream(IntEnum):
    """Numbers of the random streams; a change of one would change everybody's workload."""

    INPUT = 0
    OUTPUT = 1
    ARRIVALS = 2
    PROMPTS = 3
    WARMUP = 4
    ORDER = 5


def planned_lengths(spec: WorkloadSpec) -> list[tuple[int, int]]:
    """Input and output tokens of each measured request, without asking a server.

    Exact for `synthetic`. For `sharegpt` an estimate of four characters a token (output
    lengths that the spec gives are exact).

    Raises:
        InputError: the recorded conversations cannot be used.
    """
    if spec.kind is WorkloadKind.SYNTHETIC:
        inputs = _draw(_inputs(spec), spec.requests, _rng(spec, _Stream.INPUT))
    else:
        exchanges = _chosen_exchanges(spec)[: spec.requests]
        inputs = [sharegpt.estimated_tokens(exchange.prompt) for exchange in exchanges]
        if spec.output_tokens is None:
            outputs = [sharegpt.estimated_tokens(exchange.reply) for exchange in exchanges]
            return list(zip(inputs, outputs, strict=True))
    return list(zip(inputs, _output_lengths(spec), strict=True))


def too_long(spec: WorkloadSpec, max_model_len: int) -> int:
    """How many measured requests a context of `max_model_len` tokens does not hold.

    As exact as `planned_lengths`.

    Raises:
        InputError: the recorded conversations cannot be used.
    """
    return sum(sent + asked > max_model_len for sent, asked in planned_lengths(spec))


def arrivals(spec: WorkloadSpec) -> tuple[float, ...] | None:
    """Seconds from the first request to each, or None for a closed loop.

    Gaps are gamma-distributed with shape `burstiness` and mean 1/rate, that is of scale
    1/(rate * burstiness): the same as in vLLM's own serving benchmark. Shape 1 is a Poisson
    process, below is burstier, above more even. As there, the schedule is stretched so that
    the rate comes out exactly: of a hundred gaps the mean alone would be off by a tenth.
    """
    rate = spec.request_rate_per_s
    if rate is None:
        return None
    gaps = _rng(spec, _Stream.ARRIVALS).gamma(
        shape=spec.burstiness, scale=1 / (rate * spec.burstiness), size=spec.requests
    )
    due = np.cumsum(gaps) - gaps[0]
    if due[-1] > 0:
        due *= (spec.requests - 1) / rate / due[-1]
    return tuple(due.tolist())


async def build(spec: WorkloadSpec, tokenizer: Tokenizer) -> Workload:
    """Make the requests for the model that `tokenizer` knows.

    Synthetic prompts have exactly the planned number of tokens. From a server without
    `/tokenize` (vLLM has it) they are plain words, about one token each, and the lengths of
    recorded replies are estimates of four characters a token.

    Raises:
        InputError: the recorded conversations cannot be used.
        TokenizeError: the server broke while it was asked.
    """
    requests = await _BUILDERS[spec.kind](spec, tokenizer)
    return Workload(
        requests=tuple(requests[: spec.requests]),
        warmup=tuple(_as_warmup(requests[spec.requests :])),
        arrivals_s=arrivals(spec),
    )


async def _build_synthetic(spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Request]:
    """The measured requests, then those of the warm-up."""
    warmup_rng = _rng(spec, _Stream.WARMUP)
    inputs, outputs = (list(lengths) for lengths in zip(*planned_lengths(spec), strict=True))
    inputs += _two_lengths(_draw(_inputs(spec), spec.warmup_requests, warmup_rng))
    outputs += _draw(_outputs(spec), spec.warmup_requests, warmup_rng)
    rng = _rng(spec, _Stream.PROMPTS)
    ids = await _vocabulary(tokenizer)
    if len(ids) < prompts.MIN_VOCABULARY:
        texts = prompts.unique_sequences(prompts.words(), inputs, rng)
        return _text_requests([" ".join(text) for text in texts], outputs)
    sequences = prompts.unique_sequences(ids, inputs, rng)
    return [
        Request(index, sequence, len(sequence), asked, ignore_eos=True)
        for index, (sequence, asked) in enumerate(zip(sequences, outputs, strict=True))
    ]


async def _build_sharegpt(spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Request]:
    """The measured requests, then those of the warm-up."""
    exchanges = _chosen_exchanges(spec)
    texts = [exchange.prompt for exchange in exchanges]
    recorded = texts[spec.requests :]
    if len(recorded) > 1 and len({len(text) for text in recorded}) == 1:
        texts[-1] += " " + prompts.words()[0]
    if spec.output_tokens is None:
        outputs = await _reply_lengths([exchange.reply for exchange in exchanges], tokenizer)
    else:
        outputs = _output_lengths(spec)
        outputs += _draw(spec.output_tokens, spec.warmup_requests, _rng(spec, _Stream.WARMUP))
    return _text_requests(texts, outputs)


_BUILDERS: dict[WorkloadKind, Callable[[WorkloadSpec, Tokenizer], Awaitable[list[Request]]]] = {
    WorkloadKind.SYNTHETIC: _build_synthetic,
    WorkloadKind.SHAREGPT: _build_sharegpt,
}


def _text_requests(texts: Sequence[str], outputs: Sequence[int]) -> list[Request]:
    return [
        Request(index, text, None, asked, ignore_eos=True)
        for index, (text, asked) in enumerate(zip(texts, outputs, strict=True))
    ]


def _as_warmup(requests: Sequence[Request]) -> list[Request]:
    return [
        Request(
            index,
            request.prompt,
            request.prompt_tokens,
            min(request.output_tokens, WARMUP_OUTPUT_TOKENS),
            request.ignore_eos,
        )
        for index, request in enumerate(requests)
    ]


async def _vocabulary(tokenizer: Tokenizer) -> list[int]:
    """Ordinary token ids, in rising order; none if nobody can be asked."""
    try:
        return sorted(set(await tokenizer.tokenize(prompts.WORDS_TEXT)))
    except NoTokenizer:
        return []


async def _reply_lengths(replies: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    try:
        return [max(1, len(await tokenizer.tokenize(reply))) for reply in replies]
    except NoTokenizer:
        return [sharegpt.estimated_tokens(reply) for reply in replies]


def _chosen_exchanges(spec: WorkloadSpec) -> list[sharegpt.Exchange]:
    """Measured and warm-up exchanges in seeded order."""
    if spec.path is None:
        raise InputError(
            "A workload of kind `sharegpt` needs a file.", "Set `workload: path:` to it."
        )
    recording = sharegpt.load(spec.path)
    needed = spec.requests + spec.warmup_requests
    usable = len(recording.exchanges)
    if usable < needed:
        raise InputError(
            f"{spec.path}: has only {usable} usable conversations ({recording.skipped} rows "
            f"are unusable or repeat a prompt), but {spec.requests} requests and "
            f"{spec.warmup_requests} for the warm-up are asked for.",
            f"Set `workload: requests:` to {usable - spec.warmup_requests} at most."
            if usable > spec.warmup_requests
            else "Give a larger file; repeated prompts would be answered from the prefix cache.",
        )
    order = _rng(spec, _Stream.ORDER).permutation(usable)[:needed]
    return [recording.exchanges[position] for position in order.tolist()]


def _output_lengths(spec: WorkloadSpec) -> list[int]:
    return _draw(_outputs(spec), spec.requests, _rng(spec, _Stream.OUTPUT))


def _inputs(spec: WorkloadSpec) -> LengthSpec:
    return _given(spec.input_tokens, "input_tokens")


def _outputs(spec: WorkloadSpec) -> LengthSpec:
    return _given(spec.output_tokens, "output_tokens")


def _given(lengths: LengthSpec | None, name: str) -> LengthSpec:
    if lengths is None:
        raise InputError(
            f"A workload of kind `synthetic` needs `{name}`.",
            f"Write `{name}: {{mean: 512, stdev: 128}}`.",
        )
    return lengths


def _draw(lengths: LengthSpec, count: int, rng: np.random.Generator) -> list[int]:
    drawn = np.rint(rng.normal(lengths.mean, lengths.stdev, count))
    low, high = max(1, lengths.minimum), lengths.maximum or _LONGEST_TOKENS
    return [int(length) for length in np.clip(drawn, low, high)]


def _two_lengths(lengths: list[int]) -> list[int]:
    """Halve every second length where all are equal: a first prompt of a new length is slow."""
    if len(set(lengths)) != 1:
        return lengths
    length = lengths[0]
    other = length // 2 if length > 1 else 2
    return [other if position % 2 else length for position in range(len(lengths))]


def _rng(spec: WorkloadSpec, stream: _Stream) -> np.random.Generator:
    return np.random.default_rng([spec.seed, stream])
