"""The benchmark `tests/bench/measuring.py` in short, with wide bounds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from bench import measuring
from bench.measuring import Row, main, print_rows, run
from bench.measuring_cases import CASES

SEEDS = 6


def case(name: str, requests: int):
    found = next(case for case in CASES if case.name == name)
    return replace(found, workload=replace(found.workload, requests=requests))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return run([case("few at a time", 300), case("cpu preempting", 600)], SEEDS, truths=2)


def test_precise_stop_saves_time_and_the_score_is_near_the_truth(rows: list[Row]) -> None:
    few, _ = rows
    assert few.precise_s < 0.6 * few.full_s
    for row in rows:
        assert row.error < 0.04
        assert abs(row.bias) < 0.03


def test_interval_mostly_holds_the_truth(rows: list[Row]) -> None:
    assert sum(row.covered for row in rows) >= 0.8 * sum(row.intervals for row in rows)
    assert sum(row.intervals for row in rows) >= SEEDS


def test_nothing_as_good_as_the_incumbent_is_given_up(rows: list[Row]) -> None:
    assert sum(row.asked for row in rows) >= 2 * SEEDS**2
    assert sum(row.wrong for row in rows) == 0


def test_half_as_good_as_the_incumbent_is_given_up_early(rows: list[Row]) -> None:
    for row in rows:
        assert row.given_up["0.5"] == 1.0
        assert row.saved["0.5"] > 0.5


def test_table_has_a_line_a_case(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(rows)
    out = capsys.readouterr().out
    assert "few at a time" in out
    assert "configurations given up wrongly: 0 of" in out


def test_command_prints_json(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(measuring, "run", lambda *given: asked.append(given) or rows)
    given = ["--json", "--seeds", "3", "--first-seed", "1000", "--case", "queueing"]
    assert main(given) == 0
    assert [row["case"] for row in json.loads(capsys.readouterr().out)] == [r.case for r in rows]
    ((cases, seeds, first_seed),) = asked
    assert ([c.name for c in cases], seeds, first_seed) == (["queueing"], 3, 1000)
