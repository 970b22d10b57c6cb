"""The search on real measurements: a space of which every point was measured on vLLM."""

from __future__ import annotations

import json
import re

import pytest
from bench import replay_table
from bench.replay import TABLE, main, optimum, replay, worth

from tuner.engine.simulated.profiles import DEVICES, MODELS
from tuner.engine.simulated.virtual import evaluate_virtually
from tuner.objective import judge
from tuner.simulation import SimulationReport
from tuner.space import Space
from tuner.types import Failure, FailureCause, Measurement, SamplerKind


@pytest.fixture(scope="module")
def table():
    return replay_table.read(TABLE)


def test_table_holds_every_point_of_its_space_once(table):
    space = Space(table.spec)
    points = [space.decode(params).digest for params in space.points()]
    assert sorted(table.by_digest()) == sorted(points)
    assert len(table.runs) == len(points) == space.size()


def test_table_says_where_it_was_measured(table):
    source = table.provenance
    assert source.machine["cpu"]
    assert int(source.machine["cores"]) >= 1
    assert source.versions["vLLM"].startswith("0.32")
    assert len(source.reference_tokens_per_s) >= 3
    assert not re.search(r"(?<![\w.])/[a-z]+/", TABLE.read_text())


def test_table_shows_what_memory_does(table):
    for params, outcome in table.runs:
        kv_tokens = params["kv-cache-memory-bytes"] // 4096
        kv_tokens *= 2 if params["kv-cache-dtype"] == "fp8" else 1
        # One block of 32 tokens is vLLM's own.
        if kv_tokens - 32 < 512:
            assert isinstance(outcome, Failure)
            assert outcome.cause is FailureCause.KV_TOO_SMALL
            continue
        assert isinstance(outcome, Measurement)
        assert outcome.memory.kv_cache_tokens == kv_tokens
        assert outcome.served == outcome.offered == 32
        wanted = params["max-num-seqs"] * 320
        if wanted > 2 * kv_tokens:
            assert outcome.counters.preemptions > 20
        elif wanted < kv_tokens / 2:
            assert outcome.counters.preemptions == 0


def test_stand_in_tells_every_row_of_the_table_as_it_was(table):
    space, unlike = Space(table.spec), []
    for params, real in table.runs:
        model = evaluate_virtually(
            space.decode(params),
            table.spec.workload,
            model=MODELS["tiny"],
            device=DEVICES["cpu"],
            seed=0,
            launch=0,
            noise=False,
        )
        if isinstance(real, Failure):
            assert isinstance(model, Failure)
            assert (model.cause, model.stage) == (real.cause, real.stage)
            continue
        assert isinstance(model, Measurement)
        assert model.memory.kv_cache_tokens == real.memory.kv_cache_tokens
        counts = real.counters.preemptions, model.counters.preemptions
        if abs(counts[0] - counts[1]) > max(3, 0.2 * max(counts)):
            unlike.append((params, counts))
    assert unlike == []


def test_best_of_the_table_is_not_the_reference(table):
    best = optimum(table)
    scores = [judge(outcome, table.spec.objective).score for _, outcome in table.runs]
    assert best.score == max(scores)
    reference, _ = Space(table.spec).reference()
    [of_reference] = [outcome for params, outcome in table.runs if params == reference]
    assert best.score > 1.3 * worth(of_reference, table.spec.objective)


def test_written_table_reads_as_it_was(table, tmp_path):
    copy = tmp_path / "copy.json"
    space = json.loads(TABLE.read_text())["space"]
    replay_table.write(copy, table.provenance, space, table.runs)
    assert copy.read_text() == TABLE.read_text()


@pytest.mark.parametrize("sampler", [SamplerKind.TPE, SamplerKind.RANDOM])
def test_search_ends_at_the_best_when_every_point_was_seen(table, sampler):
    trace = replay(table, sampler, trials=1000, seed=1)
    failed = sum(isinstance(outcome, Failure) for _, outcome in table.runs)
    assert len(trace.worth) == len(table.runs)  # the reference is one of them
    assert trace.worth[-1] == optimum(table).score
    assert list(trace.worth) == sorted(trace.worth)
    assert trace.failed == failed > 0


def test_search_with_a_model_is_no_slower_than_chance(table):
    def trials_to_near(sampler):
        traces = [replay(table, sampler, trials=40, seed=seed) for seed in range(4)]
        return SimulationReport(table.spec, optimum(table), traces).median_trials_to_near or 41

    assert trials_to_near(SamplerKind.TPE) <= 1.5 * trials_to_near(SamplerKind.RANDOM)


def test_replay_command_prints_a_line_a_sampler(capsys):
    assert main(["--seeds", "2", "--trials", "6"]) == 0
    out = capsys.readouterr().out
    assert "vLLM 0.32" in out
    lines = out.splitlines()
    assert lines[-2].startswith("tpe ")
    assert lines[-1].startswith("random ")
    assert lines[-1].count("%") == 4  # after 5 and after 6 trials
