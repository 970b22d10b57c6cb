"""Whole studies on a real vLLM under recorded traffic and an SLO.

The traces are small ones in the public formats that the tests draw themselves. With TUNER_TRACES
set to a folder that holds `azure_llm_2023_conv.csv` (Azure Public Dataset) and
`mooncake_synthetic.jsonl` (Mooncake's FAST25 traces), those are used in their place:

    TUNER_TRACES=~/traces python -m pytest tests/real/test_slo_studies_real.py

Lengths are scaled to the tiny model's context of 512 tokens.
"""

from __future__ import annotations

import csv
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from made_traces import MOONCAKE_BLOCK, write_azure, write_mooncake
from tuning import Json, Workplace, cpu_tiny

from tuner.measuring.kept import read_requests
from tuner.metrics.slo import meets
from tuner.types import RequestRecord, SloLimit, SloMetric

CONTEXT = 512
SERVER_BLOCK = 32
LONGEST_PROMPT, LONGEST_ANSWER = 384, 96

SCALE = {"input": 0.0625, "output": 0.2}
"""A sixteenth: the blocks of a Mooncake trace are then the server's."""

RATE = 12
"""Requests a second: more than one at a time can be served of."""

FULLY = {"precision": 0, "stop_worse": False}

CLOCKS_SHARE, CLOCKS_S = 0.1, 0.04
"""How far client and server may be apart, beside what the client's own loop was late: HTTP and the
server's event loop lie between them, on two cores that the engine works on."""


@dataclass(frozen=True, slots=True)
class Study:
    """A study of two trials, with what `tuner` tells of it.

    Attributes:
        trace: the file that its load is from; None of a synthetic one.
    """

    workplace: Workplace
    name: str
    trace: Path | None
    status: Json
    trials: tuple[Json, ...]

    def measured(self, number: int) -> Json:
        found: Json = self.trials[number]["measurement"]
        return found

    def requests(self, number: int) -> list[RequestRecord]:
        folder = self.workplace.study(self.name) / "trials" / f"{number:04d}"
        return [kept.record for kept in read_requests(folder)]


def run(workplace: Workplace, space: Json, trace: Path | None = None) -> Study:
    name = space["study"]
    done = workplace.tuner("run", workplace.write_space(space))
    assert done.code == 0, done
    status = workplace.tuner("status", name, "--json").json()
    shown = (workplace.tuner("show", name, str(n), "--json").json() for n in range(2))
    return Study(workplace, name, trace, status, tuple(shown))


def trace_file(folder: Path, name: str) -> Path:
    """The real trace of that name where there is one, else a made one."""
    real = Path(os.environ["TUNER_TRACES"], name) if "TUNER_TRACES" in os.environ else None
    if real is not None:
        assert real.is_file(), f"TUNER_TRACES has no {name}"
        return real
    made = folder / name
    if name.endswith(".csv"):
        write_azure(made, 60)
    else:
        write_mooncake(made, 60)
    return made


def scaled(tokens: int, which: str, most: int) -> int:
    return min(most, max(1, round(tokens * SCALE[which])))


@pytest.fixture(scope="module")
def place(flag_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("slo"), flag_cache)


def space_of(command: Path, model: Path, study: str, **sections: object) -> Json:
    """Two trials on a KV cache that no load here fills."""
    fixed = {"kv-cache-memory-bytes": "128MiB", "max-model-len": CONTEXT}
    space = cpu_tiny(command, model, study=study, server_args=fixed, constraints=[], measure=FULLY)
    return {**space, "budget": {"trials": 2}, **sections}


# --- a recorded chat service: goodput in an open loop ----------------------------------

SLO = (SloLimit(SloMetric.TTFT, 0.5, 90), SloLimit(SloMetric.E2E, 4.0, 99))


@pytest.fixture(scope="module")
def goodput(place: Workplace, forked_vllm: Path, tiny_model: Path) -> Study:
    trace = trace_file(place.folder, "azure_llm_2023_conv.csv")
    load = {
        **{"kind": "azure", "path": str(trace), "requests": 40, "warmup": 2},
        **{"arrivals": "trace", "request_rate": RATE, "request_timeout": "1m", "scale": SCALE},
        **{"max_input_tokens": LONGEST_PROMPT, "max_output_tokens": LONGEST_ANSWER},
    }
    space = space_of(
        forked_vllm,
        tiny_model,
        "goodput",
        search_space={"max-num-seqs": [1, 16]},
        reference={"max-num-seqs": 1},
        workload=load,
        slo={"ttft_p90": "500ms", "e2e": "4s"},
        objective={"maximize": "goodput"},
    )
    return run(place, space, trace)


def test_goodput_counts_the_requests_that_met_every_limit(goodput: Study) -> None:
    for number, trial in enumerate(goodput.trials):
        measured, requests = goodput.measured(number), goodput.requests(number)
        assert measured["served"] == measured["offered"] == len(requests) == 40
        good = sum(meets(record, SLO) for record in requests)
        # A trace as recorded counts as a whole.
        assert measured["goodput_per_s"] * measured["window_s"] == pytest.approx(good)
        assert trial["score"] == pytest.approx(measured["goodput_per_s"])
        assert goodput.status["trials"][number]["goodput"] == measured["goodput_per_s"]
    assert goodput.status["best"]["score"] > 0


def test_goodput_is_of_the_trace_at_its_own_pace(goodput: Study) -> None:
    assert goodput.trace is not None
    with goodput.trace.open(newline="") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(40), strict=False)]
    for number in range(2):
        records = goodput.requests(number)
        assert [(record.prompt_tokens, record.output_tokens) for record in records] == [
            (
                scaled(int(row["ContextTokens"]), "input", LONGEST_PROMPT),
                scaled(int(row["GeneratedTokens"]), "output", LONGEST_ANSWER),
            )
            for row in rows
        ]
        due_s = [record.intended_s or 0.0 for record in records]
        assert due_s[-1] - due_s[0] == pytest.approx(39 / RATE, abs=0.001)
        late_s = [record.send_s - (record.intended_s or 0.0) for record in records]
        assert min(late_s) > -0.01
        assert sorted(late_s)[len(late_s) // 2] < 0.1


def test_goodput_prefers_the_server_that_answers_in_time(goodput: Study) -> None:
    lone, many = goodput.trials
    assert (lone["params"]["max-num-seqs"], many["params"]["max-num-seqs"]) == (1, 16)
    assert lone["measurement"]["ttft_s"]["p90"] > 1.5 * many["measurement"]["ttft_s"]["p90"]
    assert many["score"] > lone["score"]
    assert goodput.status["best"]["number"] == 1
    assert goodput.status["gain"] == pytest.approx(many["score"] / lone["score"] - 1)
    config = yaml.safe_load((goodput.workplace.study("goodput") / "best.yaml").read_text())
    assert config["max-num-seqs"] == 16


# --- the highest load that meets an SLO ------------------------------------------------


@pytest.fixture(scope="module")
def highest(place: Workplace, forked_vllm: Path, tiny_model: Path) -> Study:
    load = {
        **{"kind": "synthetic", "input_tokens": 32, "output_tokens": 128, "requests": 16},
        **{"concurrency": 2, "warmup": 2, "request_timeout": "1m"},
    }
    space = space_of(
        forked_vllm,
        tiny_model,
        "highest",
        search_space={"max-num-seqs": [2, 6]},
        reference={"max-num-seqs": 2},
        workload=load,
        slo={"ttft_p90": "500ms"},
        objective={"maximize": "max_rate"},
    )
    return run(place, space)


def test_max_rate_ends_where_requests_wait_for_a_seat(highest: Study) -> None:
    """Who has no seat waits for a part of an answer, which takes half a second and more."""
    two, six = (highest.measured(number)["rate"] for number in range(2))
    assert 1 <= two["load"] < 8
    assert two["load"] < six["load"] < 20
    for trial, rate in zip(highest.trials, (two, six), strict=True):
        assert trial["score"] == rate["load"]
        assert trial["score_interval"] == [rate["interval"]["low"], rate["interval"]["high"]]
        assert rate["interval"]["low"] <= rate["load"] <= rate["interval"]["high"]
        assert any(probe["met"] for probe in rate["probes"])
        assert not all(probe["met"] for probe in rate["probes"])
    assert highest.status["best"]["params"] == {"max-num-seqs": 6}


# --- shared beginnings: the prefix cache -----------------------------------------------


@pytest.fixture(scope="module")
def shared(place: Workplace, forked_vllm: Path, tiny_model: Path) -> Study:
    trace = trace_file(place.folder, "mooncake_synthetic.jsonl")
    load = {
        **{"kind": "mooncake", "path": str(trace), "requests": 60, "warmup": 2},
        **{"concurrency": 2, "request_timeout": "1m", "scale": SCALE},
        **{"max_input_tokens": LONGEST_PROMPT, "max_output_tokens": 16},
    }
    space = space_of(
        forked_vllm,
        tiny_model,
        "shared",
        search_space={"enable-prefix-caching": [False, True]},
        reference={"enable-prefix-caching": False},
        workload=load,
        slo={"ttft": "2s"},
        objective={"maximize": "goodput"},
    )
    return run(place, space, trace)


def rows_of(trace: Path, count: int) -> list[Json]:
    with trace.open() as file:
        return [json.loads(line) for line, _ in zip(file, range(count), strict=False)]


def cached_share(rows: list[Json]) -> float:
    """Of the prompt tokens, those in whole blocks that an earlier prompt began with.

    The last token of a prompt is always computed, and with it its block.
    """
    block = round(MOONCAKE_BLOCK * SCALE["input"])
    known: set[tuple[int, ...]] = set()
    hits = total = 0
    for row in rows:
        length = scaled(row["input_length"], "input", LONGEST_PROMPT)
        names = [name for name in row["hash_ids"] for _ in range(block)][:length]
        whole = [tuple(names[:end]) for end in range(SERVER_BLOCK, length + 1, SERVER_BLOCK)]
        hits += SERVER_BLOCK * sum(prefix in known for prefix in whole if len(prefix) < length)
        total += length
        known.update(whole)
    return hits / total


def test_shared_beginnings_meet_the_prefix_cache(shared: Study) -> None:
    assert shared.trace is not None
    without, cached = (shared.measured(number)["counters"] for number in range(2))
    assert without["prefix_cache_hits_tokens"] == 0
    hits = cached["prefix_cache_hits_tokens"] / cached["prefix_cache_queries_tokens"]
    assert hits == pytest.approx(cached_share(rows_of(shared.trace, 60)), abs=0.03)
    assert hits > 0


def test_prompts_of_shared_beginnings_have_their_exact_lengths(shared: Study) -> None:
    assert shared.trace is not None
    wanted = [
        scaled(row["input_length"], "input", LONGEST_PROMPT) for row in rows_of(shared.trace, 60)
    ]
    for number in range(2):
        records = shared.requests(number)
        assert [record.prompt_tokens for record in records] == wanted, "by the server's usage"
        # The window leaves out the requests that the ramp-up and the ramp-down are made of.
        counted = shared.measured(number)["counters"]["prompt_tokens"]
        assert 0.7 * sum(wanted) < counted <= sum(wanted)


# --- the clocks of client and server ---------------------------------------------------


@pytest.mark.parametrize("study", ["goodput", "highest", "shared"])
def test_client_and_server_agree_on_latencies(study: str, request: pytest.FixtureRequest) -> None:
    found: Study = request.getfixturevalue(study)
    for number in range(2):
        server = found.measured(number)["server"]
        late_s = found.measured(number)["client"]["loop_lag_p99_s"]
        for name in ("ttft", "e2e"):
            own_s, seen_s = server[f"{name}_s"]["mean"], server[f"client_{name}_mean_s"]
            assert seen_s > 0.9 * own_s, "the client cannot see a token before it is there"
            assert seen_s - own_s < CLOCKS_SHARE * own_s + CLOCKS_S + late_s
