"""Requests follow from the spec and its seed alone, and no prompt looks like another."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuner.errors import InputError
from tuner.load import workload as module
from tuner.load.prompts import HEAD_ITEMS, WORDS_TEXT, unique_sequences
from tuner.load.workload import (
    WARMUP_OUTPUT_TOKENS,
    NoTokenizer,
    TokenizeError,
    Workload,
    arrivals,
    build,
    planned_lengths,
    too_long,
)
from tuner.types import LengthSpec, WorkloadKind, WorkloadSpec

SPEC = WorkloadSpec(
    kind=WorkloadKind.SYNTHETIC,
    path=None,
    input_tokens=LengthSpec(100, 20, maximum=140),
    output_tokens=LengthSpec(40, 10),
    requests=200,
    concurrency=8,
    request_rate_per_s=None,
    burstiness=1.0,
    warmup_requests=4,
    request_timeout_s=60.0,
    seed=7,
)


def with_(spec: WorkloadSpec = SPEC, **changes: Any) -> WorkloadSpec:
    return dataclasses.replace(spec, **changes)


class WordTokenizer:
    """Each word is a token; ids from 100 on, as special ones tend to be small."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    async def tokenize(self, text: str) -> list[int]:
        return [self.ids.setdefault(word, 100 + len(self.ids)) for word in text.split()]


class Absent:
    async def tokenize(self, text: str) -> list[int]:
        raise NoTokenizer


class Broken:
    async def tokenize(self, text: str) -> list[int]:
        raise TokenizeError("HTTP 500")


def test_planned_lengths_follow_the_distribution_and_its_limits() -> None:
    inputs, outputs = zip(*planned_lengths(with_(requests=4000)), strict=True)
    assert np.mean(outputs) == pytest.approx(40, abs=1)
    assert np.std(outputs) == pytest.approx(10, abs=1)
    assert max(inputs) == 140
    assert min(inputs) > 1


def test_planned_lengths_never_go_below_one_token() -> None:
    spec = with_(input_tokens=LengthSpec(2, 50), output_tokens=LengthSpec(0))
    lengths = planned_lengths(spec)
    assert min(sent for sent, _ in lengths) == 1
    assert {asked for _, asked in lengths} == {1}


def test_planned_lengths_of_no_deviation_are_fixed() -> None:
    spec = with_(input_tokens=LengthSpec(64), output_tokens=LengthSpec(16))
    assert set(planned_lengths(spec)) == {(64, 16)}


def test_planned_lengths_are_the_same_for_the_same_seed_only() -> None:
    assert planned_lengths(SPEC) == planned_lengths(with_())
    assert planned_lengths(SPEC) != planned_lengths(with_(seed=8))


def test_planned_lengths_of_more_requests_begin_with_those_of_fewer() -> None:
    assert planned_lengths(with_(requests=300))[:200] == planned_lengths(SPEC)


def test_planned_input_and_output_lengths_have_nothing_in_common() -> None:
    spec = with_(input_tokens=LengthSpec(500, 100), output_tokens=LengthSpec(500, 100))
    inputs, outputs = zip(*planned_lengths(spec), strict=True)
    assert abs(np.corrcoef(inputs, outputs)[0, 1]) < 0.3


def test_planned_input_lengths_do_not_move_with_the_output_lengths() -> None:
    other = planned_lengths(with_(output_tokens=LengthSpec(500, 100)))
    assert [sent for sent, _ in other] == [sent for sent, _ in planned_lengths(SPEC)]
    assert [asked for _, asked in other] != [asked for _, asked in planned_lengths(SPEC)]


def test_planned_output_lengths_do_not_move_with_the_input_lengths() -> None:
    other = planned_lengths(with_(input_tokens=LengthSpec(9)))
    assert [asked for _, asked in other] == [asked for _, asked in planned_lengths(SPEC)]


def test_too_long_counts_requests_whose_prompt_and_answer_exceed_the_context() -> None:
    spec = with_(input_tokens=LengthSpec(100), output_tokens=LengthSpec(28))
    assert too_long(spec, 128) == 0
    assert too_long(spec, 127) == 200
    lengths = planned_lengths(SPEC)
    assert too_long(SPEC, 140) == sum(sent + asked > 140 for sent, asked in lengths)
    assert 0 < too_long(SPEC, 140) < 200


def test_arrivals_of_a_closed_loop_are_none() -> None:
    assert arrivals(SPEC) is None


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_gamma_gaps_of_the_rate(burstiness: float) -> None:
    spec = with_(concurrency=None, request_rate_per_s=5.0, burstiness=burstiness, requests=20_000)
    due_s = arrivals(spec)
    assert due_s is not None
    assert due_s[0] == 0.0
    gaps = np.diff(due_s)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    # A gamma distribution of shape k has a coefficient of variation of 1/sqrt(k).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_are_seeded_and_scale_with_the_rate() -> None:
    slow = arrivals(with_(concurrency=None, request_rate_per_s=1.0))
    fast = arrivals(with_(concurrency=None, request_rate_per_s=10.0))
    assert slow is not None
    assert fast is not None
    assert slow == pytest.approx([10 * due_s for due_s in fast])


async def test_build_makes_prompts_of_exactly_the_planned_tokens() -> None:
    built = await build(SPEC, WordTokenizer())
    assert [
        (request.prompt_tokens, request.output_tokens) for request in built.requests
    ] == planned_lengths(SPEC)
    assert all(len(request.prompt) == request.prompt_tokens for request in built.requests)
    assert [request.index for request in built.requests] == list(range(200))
    assert all(request.ignore_eos for request in built.requests)
    assert built.arrivals_s is None


async def test_build_draws_ids_from_what_the_tokenizer_gave() -> None:
    tokenizer = WordTokenizer()
    built = await build(SPEC, tokenizer)
    used = {token for request in built.requests for token in request.prompt}
    assert used <= set(tokenizer.ids.values())
    assert len(used) > 200


async def test_build_is_the_same_each_time_and_differs_by_seed() -> None:
    first, second = await build(SPEC, WordTokenizer()), await build(SPEC, WordTokenizer())
    assert first == second
    assert first != await build(with_(seed=8), WordTokenizer())


async def test_build_keeps_the_measured_requests_when_the_warmup_changes() -> None:
    more = await build(with_(warmup_requests=9), WordTokenizer())
    assert more.requests == (await build(SPEC, WordTokenizer())).requests


def heads(built: Workload, block: int) -> list[Any]:
    return [request.prompt[:block] for request in (*built.requests, *built.warmup)]


@pytest.mark.parametrize("seed", range(5))
async def test_build_makes_no_two_prompts_with_the_same_first_block(seed: int) -> None:
    built = await build(with_(seed=seed, requests=2000), WordTokenizer())
    for block in (HEAD_ITEMS, 16):
        assert Counter(heads(built, block)).most_common(1)[0][1] == 1


async def test_build_makes_unique_prompts_of_a_few_tokens() -> None:
    spec = with_(input_tokens=LengthSpec(2), requests=3000)
    built = await build(spec, WordTokenizer())
    assert len({request.prompt for request in built.requests}) == 3000


async def test_build_repeats_prompts_where_there_are_no_others() -> None:
    built = await build(with_(input_tokens=LengthSpec(1), requests=2000), WordTokenizer())
    assert {request.prompt_tokens for request in built.requests} == {1}


@pytest.mark.parametrize("length", [LengthSpec(100), LengthSpec(1), LengthSpec(100, 30)])
async def test_build_warms_up_with_other_prompts_of_two_lengths(length: LengthSpec) -> None:
    built = await build(with_(input_tokens=length, requests=20), WordTokenizer())
    assert len(built.warmup) == 4
    assert [request.index for request in built.warmup] == [0, 1, 2, 3]
    assert len({request.prompt_tokens for request in built.warmup}) >= 2
    prompts = [request.prompt for request in (*built.requests, *built.warmup)]
    assert len(set(prompts)) == 24
    assert all(request.output_tokens <= WARMUP_OUTPUT_TOKENS for request in built.warmup)


async def test_build_without_warmup_has_none() -> None:
    assert (await build(with_(warmup_requests=0), WordTokenizer())).warmup == ()


async def test_build_falls_back_to_words_without_a_tokenizer() -> None:
    built = await build(SPEC, Absent())
    assert all(isinstance(request.prompt, str) for request in built.requests)
    assert {request.prompt_tokens for request in built.requests} == {None}
    words = [len(str(request.prompt).split()) for request in built.requests]
    assert words == [sent for sent, _ in planned_lengths(SPEC)]
    assert set(str(built.requests[0].prompt).split()) <= set(WORDS_TEXT.split())
    assert len({tuple(str(request.prompt).split()[:8]) for request in built.requests}) == 200


async def test_build_tells_of_a_server_that_breaks() -> None:
    with pytest.raises(TokenizeError, match="HTTP 500"):
        await build(SPEC, Broken())


async def test_build_without_lengths_says_what_to_write() -> None:
    with pytest.raises(InputError, match="input_tokens"):
        await build(with_(input_tokens=None), WordTokenizer())


def test_unique_sequences_tells_heads_apart_from_a_small_pool() -> None:
    sequences = unique_sequences(range(16), [20] * 5000, np.random.default_rng(0))
    assert len({sequence[:HEAD_ITEMS] for sequence in sequences}) == 5000


# --- recorded conversations ------------------------------------------------------------


def recording(tmp_path: Path, count: int) -> Path:
    rows = [
        {
            "conversations": [
                {"from": "human", "value": f"question {number} " + "why " * number},
                {"from": "gpt", "value": "because " * (number + 1)},
            ]
        }
        for number in range(count)
    ]
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(rows))
    return path


def recorded_spec(path: Path | None, **changes: Any) -> WorkloadSpec:
    given: dict[str, Any] = {
        "kind": WorkloadKind.SHAREGPT,
        "path": path,
        "input_tokens": None,
        "output_tokens": None,
        "requests": 20,
        "warmup_requests": 3,
    }
    return with_(**(given | changes))


async def test_build_sharegpt_asks_for_as_many_tokens_as_the_reply_had(tmp_path: Path) -> None:
    built = await build(recorded_spec(recording(tmp_path, 30)), WordTokenizer())
    assert len(built.requests) == 20
    for request in (*built.requests, *built.warmup):
        number = int(str(request.prompt).split()[1])
        assert request.output_tokens == min(number + 1, 32)
        assert request.prompt_tokens is None
        assert request.ignore_eos
    assert len({request.prompt for request in (*built.requests, *built.warmup)}) == 23


async def test_build_sharegpt_takes_rows_in_seeded_order(tmp_path: Path) -> None:
    path = recording(tmp_path, 30)
    first = await build(recorded_spec(path), WordTokenizer())
    assert first == await build(recorded_spec(path), WordTokenizer())
    other = await build(recorded_spec(path, seed=8), WordTokenizer())
    assert [r.prompt for r in first.requests] != [r.prompt for r in other.requests]
    numbers = [int(str(request.prompt).split()[1]) for request in first.requests]
    assert numbers != sorted(numbers)


async def test_build_sharegpt_with_given_output_lengths_needs_no_tokenizer(tmp_path: Path) -> None:
    spec = recorded_spec(recording(tmp_path, 30), output_tokens=LengthSpec(5))
    built = await build(spec, Broken())
    assert {request.output_tokens for request in (*built.requests, *built.warmup)} == {5}


async def test_build_sharegpt_estimates_without_a_tokenizer(tmp_path: Path) -> None:
    spec = recorded_spec(recording(tmp_path, 30))
    built = await build(spec, Absent())
    assert [r.output_tokens for r in built.requests] == [out for _, out in planned_lengths(spec)]


async def test_build_sharegpt_warms_up_with_two_lengths(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]}
        for n in range(10)
    ]
    path = tmp_path / "same.json"
    path.write_text(json.dumps(rows))
    built = await build(recorded_spec(path, requests=7), WordTokenizer())
    assert len({len(str(request.prompt)) for request in built.warmup}) == 2


def test_planned_lengths_of_sharegpt_estimate_four_characters_a_token(tmp_path: Path) -> None:
    rows = [
        {
            "conversations": [
                {"from": "human", "value": "x" * 400},
                {"from": "gpt", "value": "y" * 80},
            ]
        }
    ]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(rows))
    spec = recorded_spec(path, requests=1, warmup_requests=0)
    assert planned_lengths(spec) == [(100, 20)]
    assert too_long(spec, 119) == 1
    assert too_long(spec, 120) == 0


def test_planned_lengths_of_a_short_recording_says_how_many_it_has(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="only 12 usable") as caught:
        planned_lengths(recorded_spec(recording(tmp_path, 12)))
    assert "9 at most" in caught.value.hint


def test_planned_lengths_of_sharegpt_without_a_path_says_so() -> None:
    with pytest.raises(InputError, match="needs a file"):
        planned_lengths(recorded_spec(None))


def test_every_kind_of_workload_can_be_built() -> None:
    assert set(module._BUILDERS) == set(WorkloadKind)
