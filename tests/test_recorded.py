"""Requests of recorded files: which rows, which lengths, what they share, what is refused."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import workload
from test_workload import Absent, WordTokenizer

from tuner.errors import InputError
from tuner.load.workload import build, build_without_server, planned_lengths
from tuner.types import ArrivalKind, LengthSpec, WorkloadKind, WorkloadSpec


def spec(path: Path, **changes: Any) -> WorkloadSpec:
    given: dict[str, Any] = {
        "kind": WorkloadKind.TRACE,
        "path": path,
        "input_tokens": None,
        "output_tokens": None,
        "requests": 3,
        "warmup_requests": 2,
    }
    return replace(workload(), **(given | changes))


def write(tmp_path: Path, rows: list[dict[str, Any]], name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def block_row(length: int, *names: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": length, "output_length": 9, "hash_ids": names, **more}


def common(one: Any, other: Any) -> int:
    """How many tokens two prompts have in common at their beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(
        len(one), len(other)
    ))  # fmt: skip


async def prompts(asked: WorkloadSpec, round_number: int = 0) -> list[Any]:
    built = await build(asked, WordTokenizer(), round_number)
    return [request.prompt for request in built.requests]


# --- lengths -----------------------------------------------------------------------------


def azure(tmp_path: Path, lengths: list[tuple[int, int]]) -> Path:
    path = tmp_path / "azure.csv"
    rows = (f"2024-05-12 00:00:{n:02d}Z,{i},{o}\n" for n, (i, o) in enumerate(lengths))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    return path


async def test_build_makes_prompts_of_exactly_the_recorded_lengths(tmp_path: Path) -> None:
    path = azure(tmp_path, [(100, 10), (37, 20), (5, 30), (64, 40), (8, 50)])
    built = await build(spec(path), WordTokenizer())
    assert [(len(r.prompt), r.prompt_tokens) for r in built.requests] == [
        (100, 100),
        (37, 37),
        (5, 5),
    ]
    assert [r.output_tokens for r in built.requests] == [10, 20, 30]
    assert [r.prompt_tokens for r in built.warmup] == [64, 8]
    assert planned_lengths(spec(path)) == [(100, 10), (37, 20), (5, 30)]


def test_planned_lengths_are_scaled_then_cut(tmp_path: Path) -> None:
    path = azure(tmp_path, [(400, 40), (3, 1), (1000, 90)])
    scaled = spec(
        path,
        input_scale=0.25,
        output_scale=0.5,
        max_input_tokens=150,
        max_output_tokens=30,
        warmup_requests=0,
    )
    assert planned_lengths(scaled) == [(100, 20), (1, 1), (150, 30)]


def test_planned_lengths_may_have_other_answers_than_recorded(tmp_path: Path) -> None:
    path = azure(tmp_path, [(4, 40), (3, 1), (10, 90)])
    asked = spec(path, output_tokens=LengthSpec(7), warmup_requests=0)
    assert planned_lengths(asked) == [(4, 7), (3, 7), (10, 7)]


def test_planned_lengths_take_the_first_rows_and_wrap_for_the_warmup(tmp_path: Path) -> None:
    path = azure(tmp_path, [(4, 40), (30, 1), (10, 90)])
    built = build_without_server(spec(path, warmup_requests=5))
    assert [r.prompt_tokens for r in built.warmup] == [4, 30, 10, 4, 30]


@pytest.mark.parametrize("kind", [WorkloadKind.AZURE, WorkloadKind.TRACE])
def test_planned_lengths_of_too_few_rows_say_how_many_and_why(
    tmp_path: Path, kind: WorkloadKind
) -> None:
    path = azure(tmp_path, [(4, 40), (0, 1), (10, 0)])
    with pytest.raises(InputError, match="only 1 usable") as caught:
        planned_lengths(spec(path, kind=kind))
    assert "input tokens is 0: 1 (line 3)" in caught.value.message
    assert "1 at most" in caught.value.hint


def test_planned_lengths_without_answers_ask_for_output_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": f"say {n}"} for n in range(9)])
    with pytest.raises(InputError, match="without output tokens: 9") as caught:
        planned_lengths(spec(path))
    assert "output_tokens: 128" in caught.value.hint
    assert len(planned_lengths(spec(path, output_tokens=LengthSpec(5)))) == 3


def test_planned_lengths_of_a_file_of_another_format_say_so(tmp_path: Path) -> None:
    path = azure(tmp_path, [(4, 40)] * 9)
    with pytest.raises(InputError, match=r"azure\.csv"):
        planned_lengths(spec(path, kind=WorkloadKind.MOONCAKE))


def test_planned_lengths_notice_that_the_file_has_changed(tmp_path: Path) -> None:
    asked = spec(azure(tmp_path, [(4, 40)] * 9))
    assert planned_lengths(asked)[0] == (4, 40)
    azure(tmp_path, [(5, 40)] * 10)
    assert planned_lengths(asked)[0] == (5, 40)


def test_planned_lengths_read_no_more_of_a_large_trace_than_they_need(tmp_path: Path) -> None:
    path = tmp_path / "large.csv"
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    path.write_text(header + "2024-05-12 00:00:01Z,10,20\n" * 200_000)
    tracemalloc.start()
    assert len(planned_lengths(spec(path, requests=100))) == 100
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 2**20  # the file has 5 MiB, its rows as objects have 40


# --- shared blocks -----------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "block"), [(1.0, 512), (0.25, 128), (0.1, 51), (0.003, 2)])
async def test_build_shares_what_hash_ids_say_also_when_scaled(
    tmp_path: Path, scale: float, block: int
) -> None:
    path = write(
        tmp_path,
        [
            block_row(1300, 7, 8, 9),
            block_row(2000, 7, 8, 10, 11),
            block_row(600, 8, 7),
            block_row(520, 12, 13),
            block_row(700, 14, 15),
        ],
    )
    asked = spec(path, input_scale=scale, requests=4, warmup_requests=1)
    found = await prompts(asked)
    assert [len(prompt) for prompt in found] == [round(n * scale) for n in (1300, 2000, 600, 520)]
    assert common(found[0], found[1]) == pytest.approx(2 * block, abs=1 if scale < 0.01 else 0)
    assert common(found[0], found[2]) < 2
    if block > 8:
        assert found[2][:block] == found[0][block : 2 * block]


async def test_build_shares_nothing_between_rounds_and_warmup(tmp_path: Path) -> None:
    path = write(tmp_path, [block_row(1300, 7, 8, 9)] * 6)
    asked = spec(path)
    blocks = []
    for round_number in range(3):
        built = await build(asked, WordTokenizer(), round_number)
        blocks.append({built.requests[0].prompt[:16]})
        assert len({r.prompt[:16] for r in built.requests}) == 1
        blocks += [{r.prompt[:16]} for r in built.warmup]
    assert len(set().union(*blocks)) == len(blocks)


# --- conversations -----------------------------------------------------------------------


async def test_build_continues_sessions_with_all_that_was_said(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "input_length": 20, "output_length": 5},
        {"session_id": "b", "input_length": 30, "output_length": 6},
        {"session_id": "a", "delay": 100, "input_length": 10, "output_length": 7},
        {"session_id": "a", "delay": 100, "input_length": 9, "output_length": 8},
    ]
    asked = spec(write(tmp_path, rows), requests=4)
    built = await build(asked, WordTokenizer())
    first, _, second, third = built.requests
    assert [r.after for r in built.requests] == [None, None, 0, 2]
    assert second.prompt[:20] == first.prompt
    assert len(second.prompt) == 20 + 5 + 10
    assert third.prompt[:35] == second.prompt
    assert len(third.prompt) == 35 + 7 + 9
    assert planned_lengths(asked) == [(20, 5), (30, 6), (35, 7), (51, 8)]


async def test_build_takes_a_whole_chat_as_it_is(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "A?"}]
    more = [*chat, {"role": "assistant", "content": "B."}, {"role": "user", "content": "C?"}]
    rows = [
        {"session_id": "s", "timestamp": 0, "messages": chat, "output_length": 4},
        {"session_id": "s", "delay": 5, "messages": more, "output_length": 4},
    ]
    path = write(tmp_path, rows)
    asked = spec(path, requests=2, arrivals=ArrivalKind.TRACE, concurrency=None, warmup_requests=0)
    built = await build(asked, WordTokenizer())
    assert [r.prompt for r in built.requests] == ["user: A?", "user: A?\nassistant: B.\nuser: C?"]
    assert built.requests[1].after == 0


async def test_build_joins_the_texts_of_a_session(tmp_path: Path) -> None:
    rows = [
        {"session_id": "s", "timestamp": 0, "text_input": "one two", "output_length": 3},
        {"session_id": "s", "delay": 5, "text_input": "three", "output_length": 4},
    ]
    path = write(tmp_path, rows)
    asked = spec(path, requests=2, arrivals=ArrivalKind.TRACE, concurrency=None, warmup_requests=0)
    for tokenizer in (WordTokenizer(), Absent()):
        second = str((await build(asked, tokenizer)).requests[1].prompt).split("\n")
        assert (second[0], second[2]) == ("one two", "three")
        assert len(second[1].split()) == 3


# --- texts -------------------------------------------------------------------------------


def texts(tmp_path: Path, count: int, words: int = 12) -> Path:
    rows = [
        {"prompt": f"question {n} " + "why " * (words - 2), "output_tokens": 5 + n}
        for n in range(count)
    ]
    return write(tmp_path, rows)


async def test_build_takes_other_texts_in_each_round_until_all_were_used(tmp_path: Path) -> None:
    path = texts(tmp_path, 11)  # three rounds of three, and two for the warm-up
    seen: list[Any] = []
    for round_number in range(6):
        built = await build(spec(path), WordTokenizer(), round_number)
        assert bool(built.note) == (round_number > 2)
        seen += [r.prompt for r in built.requests]
        if not round_number:
            seen += [r.prompt for r in built.warmup]
    assert len(set(seen)) == len(seen) == 20
    assert {text.startswith("question") for text in seen[:11]} == {True}
    assert {text.startswith("(1) question") for text in seen[11:]} == {True}


async def test_build_uses_no_text_twice(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {n % 4}", "output_tokens": 5} for n in range(9)]
    with pytest.raises(InputError, match="repeat an earlier prompt: 5"):
        await build(spec(write(tmp_path, rows)), WordTokenizer())


async def test_build_replays_texts_with_their_repetitions(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * n, "text_input": f"question {n % 2}", "output_length": 5}
        for n in range(4)
    ]
    path = write(tmp_path, rows)
    asked = spec(path, requests=4, arrivals=ArrivalKind.TRACE, concurrency=None)
    first, second = await prompts(asked), await prompts(asked, 1)
    assert first == ["question 0", "question 1"] * 2
    assert second == ["(1) question 0", "(1) question 1"] * 2


async def test_build_cuts_texts_to_exactly_so_many_tokens(tmp_path: Path) -> None:
    path = texts(tmp_path, 9)
    tokenizer = WordTokenizer()
    built = await build(spec(path, max_input_tokens=7), tokenizer)
    for request in built.requests:
        assert request.prompt_tokens == len(request.prompt) == 7
        assert request.prompt[0] == tokenizer.ids["question"]
    half = await build(spec(path, input_scale=0.5), WordTokenizer())
    assert {request.prompt_tokens for request in half.requests} == {6}
    whole = await build(spec(path, max_input_tokens=12), WordTokenizer())
    assert {request.prompt_tokens for request in whole.requests} == {None}


async def test_build_cuts_texts_by_characters_without_a_tokenizer(tmp_path: Path) -> None:
    built = await build(spec(texts(tmp_path, 9), max_input_tokens=5), Absent())
    assert {len(request.prompt) for request in built.requests} == {20}


async def test_build_does_not_make_texts_longer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be made longer"):
        await build(spec(texts(tmp_path, 9), input_scale=2.0), WordTokenizer())


async def test_build_sends_role_lines_for_a_conversation_with_a_system_prompt(
    tmp_path: Path,
) -> None:
    rows = [
        {"messages": [{"role": "system", "content": "Be brief."},
                      {"role": "user", "content": f"Why {n}?"},
                      {"role": "assistant", "content": "So."}]}
        for n in range(5)
    ]  # fmt: skip
    found = await prompts(spec(write(tmp_path, rows), requests=5, warmup_requests=0))
    assert sorted(found) == [f"system: Be brief.\nuser: Why {n}?" for n in range(5)]


# --- another format than the space file says -----------------------------------------------


@pytest.mark.parametrize("kind", [WorkloadKind.MOONCAKE, WorkloadKind.GUIDELLM])
def test_build_names_the_kind_and_what_the_file_looks_like(
    tmp_path: Path, kind: WorkloadKind
) -> None:
    path = azure(tmp_path, [(10, 5)] * 9)
    with pytest.raises(InputError) as refused:
        build_without_server(spec(path, kind=kind))
    assert f"`workload.kind` says {kind}, but the file looks like azure" in refused.value.message
    assert "`kind: azure`" in refused.value.hint
    assert "--format" not in refused.value.hint


def test_build_keeps_what_is_wrong_with_a_file_of_the_named_kind(tmp_path: Path) -> None:
    path = write(tmp_path, [{"timestamp": 0, "input_length": -1, "output_length": 9}])
    with pytest.raises(InputError, match="none of its 1 rows") as refused:
        build_without_server(spec(path, kind=WorkloadKind.MOONCAKE))
    assert "`workload.kind`" in refused.value.hint
