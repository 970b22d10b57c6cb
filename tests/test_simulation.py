"""Whole studies on virtual time, and the command that reports on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tuner import spec as spec_file
from tuner.cli import main
from tuner.errors import InputError
from tuner.simulation import (
    Optimum,
    SimulationReport,
    Trace,
    VirtualEvaluator,
    find_optimum,
    played,
    simulate,
)
from tuner.space import Space
from tuner.types import BudgetSpec, EngineConfig

SPACE = {
    "study": "virtual",
    "server": {
        "command": ["{python}", "-m", "tuner.engine.simulated", "serve"],
        "model": "Qwen/Qwen2.5-1.5B-Instruct",
        "args": {"max-model-len": 2048},
        "env": {"SIMULATED_DEVICE": "a10-24g"},
    },
    "search_space": {
        "gpu-memory-utilization": [0.1, 0.2, 0.3, 0.9],
        "max-num-seqs": [4, 16, 64],
    },
    "workload": {
        "kind": "synthetic",
        "input_tokens": 128,
        "output_tokens": {"mean": 64, "stdev": 16, "min": 8, "max": 128},
        "requests": 40,
        "concurrency": 40,
    },
    "budget": {"trials": 8},
}


@pytest.fixture
def space(in_tmp):
    Path("space.yaml").write_text(yaml.safe_dump(SPACE))
    return Path("space.yaml")


@pytest.fixture
def spec(space):
    return spec_file.load(space)


def test_find_optimum_of_a_small_space_is_its_best_point(spec):
    optimum = find_optimum(spec)
    evaluator, points = VirtualEvaluator(spec, 0), Space(spec)
    worths = [evaluator.worth(points.decode(p)) for p in points.points()]
    assert optimum.is_exact
    assert optimum.score == max(worths)
    assert evaluator.worth(points.decode(optimum.params)) == optimum.score
    assert min(worths) == 0.0  # 0.1 of 24 GiB does not hold the weights


def test_find_optimum_of_a_large_space_beats_random_points(spec):
    text = {**SPACE, "search_space": {
        "gpu-memory-utilization": {"low": 0.2, "high": 0.9},
        "max-num-seqs": {"low": 1, "high": 256, "log": True},
    }}  # fmt: skip
    large = spec_file.parse(yaml.safe_dump(text), Path("large.yaml"))
    optimum = find_optimum(large)
    assert not optimum.is_exact
    assert optimum.score >= 0.999 * find_optimum(spec).score


def test_simulate_is_repeatable_by_its_seed(spec):
    assert simulate(spec, 3) == simulate(spec, 3)
    assert simulate(spec, 3) != simulate(spec, 4)


def test_simulate_traces_every_trial_and_never_beats_the_optimum(spec):
    trace = simulate(spec, 1)
    assert len(trace.worth) == 8
    assert trace.failed >= 1
    assert max(trace.worth) <= find_optimum(spec).score
    assert trace.worth[-1] > 0


def test_simulate_ends_when_the_space_is_used_up(spec):
    long = replace(spec, budget=BudgetSpec(100, None))
    trace = simulate(long, 1)
    assert len(trace.worth) == 13  # twelve points and the reference
    assert trace.worth[-1] >= 0.9 * find_optimum(spec).score


def test_played_names_a_model_that_has_no_profile(spec):
    unknown = replace(spec, server=replace(spec.server, model="no/such-model"))
    with pytest.raises(InputError, match="no/such-model"):
        played(unknown)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"search_space": {"frobnicate": [1, 2]}}, "frobnicate"),
        ({"search_space": {"env.SIMULATED_DEVICE": ["a10-24g", "h100-80g"]}}, "SIMULATED_DEVICE"),
        (
            {"server": {**SPACE["server"], "env": {"SIMULATED_FAULT": "oom_load"}}},
            "SIMULATED_FAULT",
        ),
        (
            {"objective": {"maximize": "max_rate"}, "slo": {"ttft_p99": "500ms"}},
            "max_rate` is not simulated",
        ),
        (
            {"workload": {**SPACE["workload"], "concurrency": [4, 40]}},
            "several levels of load are not simulated",
        ),
    ],
)
def test_simulate_command_refuses_what_it_would_ignore(in_tmp, capsys, changes, told):
    Path("space.yaml").write_text(yaml.safe_dump({**SPACE, **changes}))
    with pytest.raises(SystemExit) as leaving:
        main(["simulate", "space.yaml", "--seeds", "1"])
    assert leaving.value.code == 2
    assert told in capsys.readouterr().err


def test_simulate_of_goodput_finds_what_meets_the_slo(in_tmp):
    text = {**SPACE, "objective": {"maximize": "goodput"}, "slo": {"e2e_p99": "60s"}}
    evaluator = VirtualEvaluator(spec_file.parse(yaml.safe_dump(text), Path("space.yaml")), 0)
    config = EngineConfig({"gpu-memory-utilization": 0.9, "max-model-len": 2048})
    assert evaluator.worth(config) > 0


def report(*traces):
    spec = spec_file.parse(yaml.safe_dump(SPACE), Path("space.yaml"))
    made = [Trace(n, tuple(worth), 1) for n, worth in enumerate(traces)]
    return SimulationReport(spec, Optimum({}, 100.0, True), made)


def test_report_counts_trials_until_near_the_optimum():
    shown = report((0, 50, 96, 99), (95, 95, 95, 95), (0, 1, 2, 3))
    assert shown.trials_to_near == [3, 1, None]
    assert shown.median_trials_to_near == 3
    assert report((0, 1), (0, 2), (99, 99)).median_trials_to_near is None


def test_report_takes_an_early_end_for_the_rest():
    shown = report((0, 50), (10, 20, 30, 40, 50, 90))
    assert shown.milestones == [5, 6]
    assert shown.share_after(5) == [0.5, 0.5]
    assert shown.share_after(6) == [0.5, 0.9]


def test_simulate_command_says_that_nothing_was_measured(space, capsys):
    main_arguments = ["simulate", str(space), "--seeds", "3", "--trials", "6"]
    with pytest.raises(SystemExit) as leaving:
        main(main_arguments)
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert "3 simulated studies" in out
    assert "no figure here was measured" in out
    assert "SIMULATED: qwen2.5-1.5b on a10-24g" in out
    with pytest.raises(SystemExit):
        main([*main_arguments, "--json", "--sampler", "random"])
    document = json.loads(capsys.readouterr().out)
    assert document["simulated"] is True
    assert document["sampler"] == "random"
    assert len(document["trials_to_within_5_percent"]) == 3
    assert all(0 <= share <= 1 for share in document["share_of_optimum"]["6"])
