"""Requests are made once, and what is to be said of them is said once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from builders import workload
from test_workload import WordTokenizer

from tuner.load.prepared import KEPT, PreparedWorkloads
from tuner.types import LengthSpec, WorkloadKind


async def test_prepared_workloads_are_made_once_for_each_spec_and_round() -> None:
    prepare = PreparedWorkloads()
    first = await prepare(WordTokenizer(), workload())
    assert await prepare(WordTokenizer(), workload(), 0) is first
    assert await prepare(WordTokenizer(), workload(), 1) is not first
    assert await prepare(WordTokenizer(), workload(requests=9), 0) is not first


async def test_prepared_workloads_forget_the_oldest_and_make_it_again() -> None:
    prepare = PreparedWorkloads()
    first = await prepare(WordTokenizer(), workload(), 0)
    for number in range(1, KEPT + 1):
        await prepare(WordTokenizer(), workload(), number)
    again = await prepare(WordTokenizer(), workload(), 0)
    assert again is not first
    assert again == first


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
