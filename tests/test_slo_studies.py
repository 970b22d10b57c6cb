"""Whole studies under real kinds of load and an SLO, on the stand-in engine: from a space file to
the configuration to deploy."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_traces import write_azure, write_mooncake
from stand_in import COMMAND, FAST, StandIn, write_tiny_model

from tuner.cli import main
from tuner.measuring import session, window
from tuner.measuring.kept import read_requests
from tuner.types import RequestRecord

Json = dict[str, Any]

FEW, MANY = 2, 32
"""Of max-num-seqs: less than half as fast, and more than any load here needs."""

SYNTHETIC = {"kind": "synthetic", "input_tokens": 32, "output_tokens": 32}
SERVED = {"block-size": 32, "max-model-len": 1024, "kv-cache-memory-bytes": "64MiB"}
FULLY = {"precision": 0, "stop_worse": False}


@dataclass(frozen=True, slots=True)
class Study:
    """A study of two trials: the reference, and another value of max-num-seqs."""

    name: str
    status: Json
    trials: Sequence[Json]

    def measured(self, number: int) -> Json:
        found: Json = self.trials[number]["measurement"]
        return found

    def requests(self, number: int, *, run: int = 0) -> list[RequestRecord]:
        folder = Path("studies", self.name, "trials", f"{number:04d}")
        return [kept.record for kept in read_requests(folder) if kept.run == run]

    @property
    def deployed(self) -> Json:
        config: Json = yaml.safe_load(Path("studies", self.name, "best.yaml").read_text())
        return config


Tuning = Callable[..., Study]


@pytest.fixture
def tuning(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Tuning:
    """A function that runs a study and reads what `tuner` tells of it."""
    monkeypatch.setattr(session, "LOOK_S", 0.1)
    monkeypatch.setattr(session, "PROGRESS_S", 0.05)
    monkeypatch.setattr(window, "SHORTEST_BLOCK_S", 0.1)
    # Whether the client kept up on a machine that runs other tests as well is not meant here.
    monkeypatch.setattr(session, "bottleneck", lambda *_: "")
    write_tiny_model(in_tmp / "model")

    def told(*words: str) -> Json:
        capsys.readouterr()
        assert call(*words, "--json") == 0
        document: Json = json.loads(capsys.readouterr().out)
        return document

    def run(workload: Json, *, reference: int = FEW, speed: int = 10, **sections: Any) -> Study:
        trials = sections.pop("trials", 2)
        document = {
            "study": "s",
            "server": {
                "command": COMMAND,
                "model": "./model",
                "args": SERVED,
                "env": {**FAST, "SIMULATED_SPEED": str(speed)},
            },
            "search_space": {"max-num-seqs": [FEW, MANY]},
            "reference": {"max-num-seqs": reference},
            "workload": {"warmup": 2, **workload},
            "measure": FULLY,
            "budget": {"trials": trials},
            **sections,
        }
        Path("s.yaml").write_text(yaml.safe_dump(document))
        assert call("run", "s.yaml") == 0, capsys.readouterr()
        status = told("status", "s")
        shown = [told("show", "s", str(number)) for number in range(trials)]
        return Study("s", status, shown)

    return run


def call(*arguments: str) -> int:
    """Run a command in this process; its exit code."""
    try:
        main(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def in_flight(records: Sequence[RequestRecord]) -> int:
    """How many requests were under way at once, at most."""
    return max(sum(r.send_s <= at.send_s < r.end_s for r in records) for at in records)


# --- what is maximised -----------------------------------------------------------------


def test_goodput_in_an_open_loop_counts_who_is_answered_in_time(tuning: Tuning) -> None:
    study = tuning(
        {**SYNTHETIC, "output_tokens": 64, "requests": 90, "request_rate": 60},
        slo={"ttft_p90": "250ms"},
        objective={"maximize": "goodput"},
    )
    slow, fast = study.measured(0), study.measured(1)
    assert slow["served"] == fast["served"] == 90
    assert fast["goodput_per_s"] > 45
    assert slow["goodput_per_s"] < 0.5 * fast["goodput_per_s"]
    assert study.status["objective"] == "goodput"
    for trial, summary in zip(study.trials, study.status["trials"], strict=True):
        assert trial["score"] == trial["measurement"]["goodput_per_s"] == summary["goodput"]
    assert study.status["best"]["number"] == 1
    assert study.deployed["max-num-seqs"] == MANY
    # It is the schedule that sets the pace, also of a server that falls behind.
    due_s = [record.intended_s or 0.0 for record in study.requests(0)]
    assert due_s[-1] - due_s[0] == pytest.approx(89 / 60, rel=0.02)
    assert max(r.send_s - (r.intended_s or 0.0) for r in study.requests(0)) < 0.5


def test_max_rate_in_an_open_loop_finds_the_rate_that_a_server_can_take(tuning: Tuning) -> None:
    study = tuning(
        {**SYNTHETIC, "requests": 60, "request_rate": 40},
        slo={"ttft_p90": "100ms"},
        objective={"maximize": "max_rate"},
        trials=1,
    )
    rate = study.measured(0)["rate"]
    assert study.status["best"]["score"] == rate["load"]
    low, high = study.status["best"]["score_interval"]
    assert (low, high) == (rate["interval"]["low"], rate["interval"]["high"])
    assert low <= rate["load"] <= high
    met = [probe["load"] for probe in rate["probes"] if probe["met"]]
    missed = [probe["load"] for probe in rate["probes"] if not probe["met"]]
    assert min(met) <= rate["load"] <= max(missed)
    # Two at a time, of 32 tokens of 3 to 10 ms, ten times as fast.
    assert 20 < rate["load"] < 200
    assert study.measured(0)["goodput_per_s"] > 0


def test_max_rate_in_a_closed_loop_finds_how_many_fit(tuning: Tuning) -> None:
    """Who waits for one of the seats waits for as long as an answer takes."""
    study = tuning(
        {**SYNTHETIC, "output_tokens": 96, "requests": 40, "concurrency": 4},
        reference=4,
        search_space={"max-num-seqs": [4, 12]},
        slo={"ttft_p90": "60ms"},
        objective={"maximize": "max_rate"},
    )
    few, many = (study.measured(number)["rate"] for number in range(2))
    assert all(probe["load"] == int(probe["load"]) for probe in few["probes"])
    assert 3 < few["load"] < 8
    assert 8 < many["load"] < 24
    assert study.status["best"]["score"] == many["load"]
    assert study.status["gain"] == pytest.approx(many["load"] / few["load"] - 1)
    assert study.deployed["max-num-seqs"] == 12


def test_levels_are_measured_one_after_the_other_in_one_server_life(tuning: Tuning) -> None:
    study = tuning({**SYNTHETIC, "requests": 60, "concurrency": [1, 12]})
    for trial in study.trials:
        one, twelve = trial["measurement"]["levels"]
        assert one["served"] == twelve["served"] == 60
        assert in_flight(study.requests(trial["number"], run=0)) == 1
        assert in_flight(study.requests(trial["number"], run=1)) == 12
        assert trial["score"] == twelve["output_throughput_tokens_per_s"]
    # One at a time needs no more seats; twelve do.
    (lone_few, few), (lone_many, many) = (t["measurement"]["levels"] for t in study.trials)
    speed = "output_throughput_tokens_per_s"
    assert lone_few[speed] == pytest.approx(lone_many[speed], rel=0.3)
    assert many[speed] > 1.5 * few[speed]
    assert study.deployed["max-num-seqs"] == MANY


# --- how long is measured --------------------------------------------------------------


def test_a_measurement_ends_when_it_is_precise_or_clearly_worse(tuning: Tuning) -> None:
    study = tuning(
        {**SYNTHETIC, "requests": 3000, "concurrency": 16},
        reference=MANY,
        measure={"precision": "10%", "stop_worse": True},
    )
    good, bad = study.trials
    assert (good["end"], bad["end"]) == ("precise", "worse")
    low, high = good["score_interval"]
    assert low < good["score"] < high
    assert (high - low) / 2 <= 0.1 * good["score"] * 1.05
    assert good["measurement"]["blocks"] >= 8
    assert good["measurement"]["steady"] is True
    assert good["measurement"]["offered"] < 3000
    assert bad["measurement"]["offered"] < 3000
    assert bad["score"] < 0.8 * good["score"]
    assert study.status["best"]["number"] == 0
    assert study.deployed["max-num-seqs"] == MANY


# --- real kinds of traffic -------------------------------------------------------------


def test_an_azure_trace_is_replayed_scaled_and_faster(tuning: Tuning) -> None:
    write_azure(Path("azure.csv"), 80, rate=5)
    study = tuning(
        {
            **{"kind": "azure", "path": "azure.csv", "requests": 60},
            **{"arrivals": "trace", "speedup": 8, "scale": 0.1, "max_output_tokens": 64},
        },
        slo={"ttft_p90": "150ms", "e2e": "2s"},
        objective={"maximize": "goodput"},
    )
    with open("azure.csv", newline="") as file:
        rows = list(csv.DictReader(file))[:60]
    for number in range(2):
        records = study.requests(number)
        assert [record.prompt_tokens for record in records] == [
            max(1, round(int(row["ContextTokens"]) * 0.1)) for row in rows
        ]
        assert [record.output_tokens for record in records] == [
            min(64, max(1, round(int(row["GeneratedTokens"]) * 0.1))) for row in rows
        ]
        seconds = [float(row["TIMESTAMP"].split(":")[2]) for row in rows]
        recorded_s = (seconds[1] - seconds[0]) % 60
        due_s = [record.intended_s or 0.0 for record in records]
        assert due_s[1] - due_s[0] == pytest.approx(recorded_s / 8, abs=1e-4)
        assert due_s[-1] - due_s[0] < 60 / 5 / 8 * 1.5
    assert study.status["best"]["goodput"] == study.status["best"]["score"] > 0
    assert study.measured(0)["steady"] is False, "what changes by itself counts as a whole"


def test_a_mooncake_trace_meets_the_prefix_cache_as_often_as_it_shares(
    tuning: Tuning, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mooncake(Path("mooncake.jsonl"), 60)
    study = tuning(
        {
            **{"kind": "mooncake", "path": "mooncake.jsonl", "requests": 60},
            **{"arrivals": "trace", "speedup": 5, "scale": {"input": 0.125, "output": 0.1}},
        },
        speed=20,
        trials=1,
        objective={"maximize": "request_throughput"},
    )
    capsys.readouterr()
    assert call("workload", "mooncake.jsonl", "--json") == 0
    shared = json.loads(capsys.readouterr().out)["shared_prefix_fraction"]
    counters = study.measured(0)["counters"]
    hits = counters["prefix_cache_hits_tokens"] / counters["prefix_cache_queries_tokens"]
    assert 0.5 < shared < 0.9
    assert hits == pytest.approx(shared, abs=0.05)
    assert study.status["best"]["score"] == study.measured(0)["request_throughput_per_s"]


def test_turns_of_a_conversation_carry_what_was_said(tuning: Tuning) -> None:
    study = tuning(
        {**SYNTHETIC, "requests": 48, "turns": 4, "concurrency": 6}, trials=1, reference=MANY
    )
    records = study.requests(0)
    # Twelve conversations side by side, turn by turn: each has 32 + 32 tokens more than before.
    assert [record.prompt_tokens for record in records] == [
        32 + 64 * turn for turn in range(4) for _ in range(12)
    ]
    counters = study.measured(0)["counters"]
    hits = counters["prefix_cache_hits_tokens"] / counters["prefix_cache_queries_tokens"]
    # Of each turn the cache has the prompt of the one before: 32, 96 and 160 tokens.
    assert hits == pytest.approx((32 + 96 + 160) / (32 + 96 + 160 + 224), abs=0.03)


def test_like_server_sends_what_another_server_got_also_when_that_is_gone(
    tuning: Tuning, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "64M")
    with StandIn(*flags) as production:
        production.ready()
        for number in range(24):
            prompt = [number + place for place in range(80 + number % 3)]
            production.post("/v1/completions", prompt=prompt, max_tokens=15, ignore_eos=True)
        url = f"http://127.0.0.1:{production.port}/metrics"
        load = {"kind": "like-server", "url": url, "requests": 60, "concurrency": 8}
        study = tuning(load, trials=1, slo={"ttft": "1s"}, objective={"maximize": "goodput"})
    # Buckets of the page: 51 to 100, and 11 to 20.
    records = study.requests(0)
    assert all(51 <= record.prompt_tokens <= 100 for record in records)
    assert all(11 <= record.output_tokens <= 20 for record in records)
    assert len({record.prompt_tokens for record in records}) > 10
    again = tuning(load, trials=2, slo={"ttft": "1s"}, objective={"maximize": "goodput"})
    assert [r.prompt_tokens for r in again.requests(1)] == [r.prompt_tokens for r in records]
    assert again.status["best"]["score"] == again.status["best"]["goodput"]
