"""Requests are made once, and what is to be said of them is said once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from builders import workload
from test_workload import WordTokenizer

from tuner.load.prepared import PreparedWorkloads
from tuner.load.workload import build, schedule
from tuner.types import LengthSpec, WorkloadKind


async def test_prepared_workloads_are_made_once_for_each_spec_and_round() -> None:
    prepare = PreparedWorkloads()
    first = await prepare(WordTokenizer(), workload())
    assert (await prepare(WordTokenizer(), workload(), 0)).requests is first.requests
    assert (await prepare(WordTokenizer(), workload(), 1)).requests is not first.requests
    assert (await prepare(WordTokenizer(), workload(requests=9), 0)).requests != first.requests


async def test_prepared_workloads_share_prompts_between_rates_and_not_times() -> None:
    prepare = PreparedWorkloads()
    slow = replace(workload(), concurrency=None, request_rate_per_s=1.0)
    fast = replace(slow, request_rate_per_s=4.0)
    first = await prepare(WordTokenizer(), slow)
    other = await prepare(WordTokenizer(), fast)
    closed = await prepare(WordTokenizer(), replace(workload(), levels=(2.0, 4.0)))
    assert other.requests is closed.requests is first.requests
    assert closed.arrivals_s is None
    assert other.arrivals_s == schedule(fast)
    assert first.arrivals_s == schedule(slow)
    assert first == await build(slow, WordTokenizer())
    assert other == await build(fast, WordTokenizer())


async def test_prepared_conversations_depend_on_how_many_go_on_at_a_time() -> None:
    prepare = PreparedWorkloads()
    one = replace(workload(requests=12, concurrency=1), turns=3)
    four = replace(one, concurrency=4)
    assert await prepare(WordTokenizer(), one) == await build(one, WordTokenizer())
    assert await prepare(WordTokenizer(), four) == await build(four, WordTokenizer())


async def test_prepared_workloads_keep_all_rounds_of_a_search_for_the_next_trial() -> None:
    prepare = PreparedWorkloads()
    rounds = [await prepare(WordTokenizer(), workload(), number) for number in range(14)]
    for number, made in enumerate(rounds):
        assert (await prepare(WordTokenizer(), workload(), number)).requests is made.requests


async def test_prepared_workloads_forget_what_was_not_used_for_longest() -> None:
    made = await PreparedWorkloads()(WordTokenizer(), workload())
    ids = sum(len(request.prompt) for request in (*made.requests, *made.warmup))
    prepare = PreparedWorkloads(kept_bytes=2 * 8 * ids)
    first, second = [await prepare(WordTokenizer(), workload(), number) for number in (0, 1)]
    assert (await prepare(WordTokenizer(), workload(), 0)).requests is first.requests
    await prepare(WordTokenizer(), workload(), 2)
    assert (await prepare(WordTokenizer(), workload(), 0)).requests is first.requests
    again = await prepare(WordTokenizer(), workload(), 1)
    assert again.requests is not second.requests
    assert again == second


async def test_prepared_workload_that_is_too_large_to_keep_is_kept_while_it_is_the_last() -> None:
    prepare = PreparedWorkloads(kept_bytes=1)
    first = await prepare(WordTokenizer(), workload())
    assert (await prepare(WordTokenizer(), workload())).requests is first.requests


async def test_prepared_workloads_say_once_that_texts_come_again(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"why {n}"}) + "\n" for n in range(7)))
    spec = replace(
        workload(requests=5), kind=WorkloadKind.CUSTOM, path=path, output_tokens=LengthSpec(4)
    )
    told: list[str] = []
    prepare = PreparedWorkloads(told.append)
    await prepare(WordTokenizer(), spec, 0)
    assert told == []
    for number in (1, 2, 3):
        await prepare(WordTokenizer(), spec, number)
    assert len(told) == 1
    assert "too few texts" in told[0]
