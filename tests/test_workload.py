"""Requests follow from the spec and its seed alone, and no prompt looks like another."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.errors import InputError
from tuner.load.prompts import HEAD_ITEMS, WORDS_TEXT, PromptMaker
from tuner.load.workload import (
    WARMUP_OUTPUT_TOKENS,
    NoTokenizer,
    TokenizeError,
    Workload,
    build,
    build_without_server,
    mismatch,
    planned_lengths,
    schedule,
    shares_prompts,
    too_long,
)
from tuner.types import (
    ArrivalKind,
    LengthKind,
    LengthSpec,
    RequestRecord,
    RequestStatus,
    SharedPrefixSpec,
    WorkloadKind,
    WorkloadSpec,
)

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


def test_schedule_of_a_closed_loop_are_none() -> None:
    assert schedule(SPEC) is None


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_schedule_have_gamma_gaps_of_the_rate(burstiness: float) -> None:
    spec = with_(concurrency=None, request_rate_per_s=5.0, burstiness=burstiness, requests=20_000)
    due_s = schedule(spec)
    assert due_s is not None
    assert due_s[0] == 0.0
    gaps = np.diff(due_s)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    # A gamma distribution of shape k has a coefficient of variation of 1/sqrt(k).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_schedule_are_seeded_and_scale_with_the_rate() -> None:
    slow = schedule(with_(concurrency=None, request_rate_per_s=1.0))
    fast = schedule(with_(concurrency=None, request_rate_per_s=10.0))
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


@pytest.mark.parametrize("size", [16, 17, 300])
def test_prompt_maker_gives_different_heads_from_a_small_pool(size: int) -> None:
    heads = {
        tuple(PromptMaker(range(size), 3, number).own(slot, 20)[:HEAD_ITEMS])
        for number in range(20)
        for slot in range(100)
    }
    assert len(heads) == 2000


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


# --- rounds, shared beginnings, conversations --------------------------------------------

SHARED = with_(shared_prefix=SharedPrefixSpec(48, groups=3))
TURNS = with_(turns=3, concurrency=4, requests=50)


def first_blocks(built: Workload) -> set[Any]:
    return {request.prompt[:16] for request in (*built.requests, *built.warmup)}


@pytest.mark.parametrize("spec", [SPEC, SHARED, TURNS], ids=["plain", "shared", "turns"])
async def test_build_makes_rounds_of_the_same_lengths_without_a_common_block(
    spec: WorkloadSpec,
) -> None:
    rounds = [await build(spec, WordTokenizer(), number) for number in range(4)]
    lengths = [[(len(r.prompt), r.output_tokens) for r in built.requests] for built in rounds]
    assert lengths == [lengths[0]] * 4
    blocks = [first_blocks(built) for built in rounds]
    assert len(set().union(*blocks)) == sum(map(len, blocks))
    assert rounds[2] == await build(spec, WordTokenizer(), 2)


async def test_build_keeps_rounds_apart_for_fewer_requests_too() -> None:
    many = await build(with_(requests=100), WordTokenizer(), 0)
    few = await build(with_(requests=50), WordTokenizer(), 1)
    assert not first_blocks(many) & first_blocks(few)


async def test_build_begins_each_prompt_with_the_prefix_of_its_group() -> None:
    spec = with_(SHARED, input_tokens=LengthSpec(100, 20, minimum=56))
    built = await build(spec, WordTokenizer())
    groups = Counter(request.prompt[:48] for request in built.requests)
    assert sorted(groups.values()) == [66, 67, 67]
    assert len({request.prompt[48:56] for request in built.requests}) == 200
    assert not {request.prompt[:16] for request in built.warmup} & {g[:16] for g in groups}


async def test_build_leaves_short_prompts_some_tokens_of_their_own() -> None:
    spec = with_(SHARED, input_tokens=LengthSpec(40, minimum=1, stdev=20))
    built = await build(spec, WordTokenizer())
    longer = [request.prompt for request in built.requests if len(request.prompt) > HEAD_ITEMS]
    assert len(set(longer)) == len(longer)


async def test_build_makes_each_turn_of_all_that_was_said_before() -> None:
    built = await build(TURNS, WordTokenizer())
    followers = [request for request in built.requests if request.after is not None]
    assert len(built.requests) == 50
    assert len(followers) == 50 - 17
    for turn in followers:
        assert turn.after is not None
        before = built.requests[turn.after]
        assert before.index < turn.index
        assert turn.prompt[: len(before.prompt)] == before.prompt
        assert len(turn.prompt) > len(before.prompt) + before.output_tokens
    assert len({turn.after for turn in followers}) == len(followers)
    lengths = [(len(request.prompt), request.output_tokens) for request in built.requests]
    assert lengths == planned_lengths(TURNS)


async def test_build_lets_others_speak_between_two_turns() -> None:
    built = await build(TURNS, WordTokenizer())
    pauses = [r.index - r.after for r in built.requests if r.after is not None]
    assert max(pauses) == 8  # twice as many conversations as are in flight
    assert Counter(pauses).most_common(1)[0][0] == 8


async def test_build_makes_turns_of_words_without_a_tokenizer() -> None:
    built = await build(TURNS, Absent())
    words = [len(str(request.prompt).split()) for request in built.requests]
    assert words == [sent for sent, _ in planned_lengths(TURNS)]


@pytest.mark.parametrize("spec", [SPEC, SHARED, TURNS], ids=["plain", "shared", "turns"])
def test_build_without_server_has_the_planned_lengths(spec: WorkloadSpec) -> None:
    built = build_without_server(spec)
    assert [(r.prompt_tokens, r.output_tokens) for r in built.requests] == planned_lengths(spec)
    assert shares_prompts(spec) == (spec is not SPEC)


async def test_build_of_more_tokens_than_can_be_kept_says_so() -> None:
    with pytest.raises(InputError, match=r"1,002,000,000 tokens in all"):
        await build(with_(input_tokens=LengthSpec(1_000_000), requests=999), WordTokenizer())


async def test_build_of_a_server_that_was_not_asked_says_so() -> None:
    spec = with_(kind=WorkloadKind.LIKE_SERVER, url="http://127.0.0.1:1/metrics")
    with pytest.raises(InputError, match="has not been asked yet"):
        await build(spec, WordTokenizer())


# --- checks against the server's count ---------------------------------------------------


def record(index: int, prompt_tokens: int, status: RequestStatus = RequestStatus.OK) -> Any:
    return RequestRecord(index, status, 0.0, 1.0, prompt_tokens=prompt_tokens)


async def test_mismatch_tells_prompts_that_the_server_counts_otherwise() -> None:
    requests = (await build(SPEC, WordTokenizer())).requests
    right = [record(r.index, r.prompt_tokens or 0) for r in requests]
    assert mismatch(right, requests) == ""
    failed = record(3, 0, RequestStatus.REJECTED)
    wrong = record(4, (requests[4].prompt_tokens or 0) + 1)
    told = mismatch([*right[:3], failed, wrong], requests)
    assert told.startswith("1 of 4 prompts")
    assert f"was counted as {wrong.prompt_tokens}" in told


@pytest.mark.parametrize(("added", "voids"), [(1, False), (4, False), (5, True), (-1, True)])
async def test_mismatch_lets_a_server_add_a_few_tokens_to_each(added: int, voids: bool) -> None:
    requests = (await build(SPEC, WordTokenizer())).requests
    counted = [record(r.index, (r.prompt_tokens or 0) + added) for r in requests]
    assert bool(mismatch(counted, requests)) is voids
    assert mismatch([*counted[1:], record(0, requests[0].prompt_tokens or 0)], requests)


async def test_mismatch_says_nothing_of_texts() -> None:
    requests = (await build(SPEC, Absent())).requests
    assert mismatch([record(0, 12345)], requests) == ""


# --- any spec ----------------------------------------------------------------------------

LENGTHS = st.builds(
    LengthSpec,
    mean=st.floats(0.01, 2.0**31),
    stdev=st.floats(0, 1e6),
    maximum=st.none() | st.integers(1, 60),
    kind=st.sampled_from([kind for kind in LengthKind if kind is not LengthKind.HISTOGRAM]),
)
RATES = st.none() | st.floats(1e-6, 1e6)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(WorkloadKind),
    lengths=st.tuples(LENGTHS, st.none() | LENGTHS),
    counts=st.tuples(st.integers(1, 12), st.integers(0, 4), st.integers(1, 4)),
    load=st.tuples(st.none() | st.integers(1, 9), RATES, RATES, st.sampled_from(ArrivalKind)),
    scale=st.floats(1e-6, 3) | st.just(1.0),
    limit=st.none() | st.integers(1, 9),
    shared=st.none() | st.builds(SharedPrefixSpec, st.integers(1, 40), st.integers(1, 5)),
    tokenizer=st.sampled_from([WordTokenizer(), Absent()]),
)
def test_build_of_any_spec_gives_its_requests_or_an_input_error(
    traces: Path,
    kind: WorkloadKind,
    lengths: tuple[LengthSpec, LengthSpec | None],
    counts: tuple[int, int, int],
    load: tuple[int | None, float | None, float | None, ArrivalKind],
    scale: float,
    limit: int | None,
    shared: SharedPrefixSpec | None,
    tokenizer: Any,
) -> None:
    concurrency, rate, ramp_to, kind_of_arrivals = load
    spec = with_(
        kind=kind,
        path=traces / f"{kind}",
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        requests=counts[0],
        warmup_requests=counts[1],
        turns=counts[2],
        concurrency=concurrency,
        request_rate_per_s=None if concurrency else rate,
        ramp_to_per_s=ramp_to,
        arrivals=kind_of_arrivals if kind is not WorkloadKind.SYNTHETIC else ArrivalKind.POISSON,
        input_scale=scale,
        max_input_tokens=limit,
        shared_prefix=shared,
    )
    try:
        built = asyncio.run(build(spec, tokenizer, counts[2]))
    except InputError:
        return
    assert len(built.requests) == counts[0]
    assert len(built.warmup) == counts[1]
    assert all(len(request.prompt) and request.output_tokens for request in built.requests)
    due_s = built.arrivals_s
    if due_s is not None:
        assert len(due_s) == counts[0]
        assert list(due_s) == sorted(due_s)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file of each kind."""
    folder = tmp_path_factory.mktemp("traces")
    csv = {
        WorkloadKind.AZURE: (
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2024-05-12 00:00:0{n}Z,{n},3",
        ),
        WorkloadKind.BURSTGPT: (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "{n},m,{n},3,9,API log",
        ),
        WorkloadKind.GUIDELLM: ("prompt_tokens,output_tokens", "{n},3"),
    }  # fmt: skip
    for kind, (header, row) in csv.items():
        rows = [row.format(n=n) for n in range(1, 10)]
        (folder / f"{kind}").write_text("\n".join([header, *rows]))
    ask = [{"role": "user", "content": "Why?"}]
    rows_of: dict[WorkloadKind, Any] = {
        WorkloadKind.CUSTOM: lambda n: {"prompt": f"why {n}", "output_tokens": n},
        WorkloadKind.SHAREGPT: lambda n: {
            "messages": [{"role": "user", "content": f"Q{n}"}, {"role": "gpt", "content": "A"}],
        },
        WorkloadKind.OPENAI_BATCH: lambda n: {
            "custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": ask, "max_tokens": n},
        },
        WorkloadKind.MOONCAKE: lambda n: {
            "timestamp": n * 100, "input_length": 600, "output_length": n, "hash_ids": [n % 2, n],
        },
        WorkloadKind.TRACE: lambda n: {
            "session_id": f"{n % 3}", "timestamp": n, "text_input": f"t{n}", "output_length": 3,
        },
    }  # fmt: skip
    for kind, row_of in rows_of.items():
        rows = [json.dumps(row_of(n)) for n in range(1, 10)]
        (folder / f"{kind}").write_text("\n".join(rows))
    return folder
