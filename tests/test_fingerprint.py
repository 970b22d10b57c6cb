"""What makes old results incomparable, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import KNOBS, study_spec, workload

from tuner.fingerprint import differences, fingerprint
from tuner.types import (
    BudgetSpec,
    Choice,
    Constraint,
    FloatRange,
    IntRange,
    MeasureSpec,
    ObjectiveSpec,
    SamplerKind,
    SearchSpec,
    SloLimit,
    SloMetric,
)

SPEC = study_spec()


def changed(spec, *, version="0.32.0", device=None):
    old = fingerprint(SPEC, vllm_version="0.32.0", device={"gpu0": "A100 GPU-1"})
    new = fingerprint(spec, vllm_version=version, device=device or {"gpu0": "A100 GPU-1"})
    return differences(old, new)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, budget=BudgetSpec(99, 60.0)),
        replace(SPEC, search=SearchSpec(SamplerKind.RANDOM, 7)),
        replace(SPEC, constraints=(Constraint("max-num-seqs < 99", 3),)),
        replace(SPEC, search_space=(IntRange("max-num-seqs", 8, 64, log=True), *KNOBS[1:])),
        replace(SPEC, server=replace(SPEC.server, startup_timeout_s=5.0)),
        replace(SPEC, measure=MeasureSpec(precision=0.1, stop_worse=False, time_s=9.0)),
    ],
)
def test_differences_let_go_on_what_only_changes_the_search(spec):
    assert changed(spec) == []


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (replace(SPEC, server=replace(SPEC.server, model="other")), "model: org/model -> other"),
        (
            replace(SPEC, server=replace(SPEC.server, args={})),
            "server.args.enforce-eager: true -> (unset)",
        ),
        (replace(SPEC, workload=workload(requests=9)), "workload.requests: 8 -> 9"),
        (
            replace(SPEC, objective=ObjectiveSpec(preemption_weight=2.0)),
            "objective.preemption_weight: 1.0 -> 2.0",
        ),
        (
            replace(SPEC, search_space=KNOBS[1:]),
            "search_space.max-num-seqs: integers by ratio -> (unset)",
        ),
        (
            replace(SPEC, search_space=(*KNOBS[:2], Choice("kv-cache-dtype", ("auto",)))),
            'search_space.kv-cache-dtype: {"choices": ["auto", "fp8"]} -> {"choices": ["auto"]}',
        ),
        (
            replace(SPEC, search_space=(IntRange("max-num-seqs", 4, 128), *KNOBS[1:])),
            "search_space.max-num-seqs: integers by ratio -> integers",
        ),
        (
            replace(SPEC, search_space=(FloatRange("max-num-seqs", 4, 128, log=True), *KNOBS[1:])),
            "search_space.max-num-seqs: integers by ratio -> numbers by ratio",
        ),
        (replace(SPEC, reference={"max-num-seqs": 8}), "reference.max-num-seqs: (unset) -> 8"),
        (
            replace(SPEC, workload=replace(SPEC.workload, turns=3)),
            "workload.turns: (unset) -> 3",
        ),
        (
            replace(SPEC, workload=replace(SPEC.workload, levels=(4.0, 8.0))),
            "workload.levels: (unset) -> [4.0, 8.0]",
        ),
        (
            replace(SPEC, objective=ObjectiveSpec(slo=(SloLimit(SloMetric.TTFT, 0.5),))),
            "objective.slo.ttft_p99: (unset) -> 0.5 s",
        ),
    ],
)
def test_differences_name_what_makes_results_incomparable(spec, told):
    assert changed(spec) == [told]


def test_fingerprint_of_what_older_studies_could_say_is_theirs():
    facts = fingerprint(SPEC, vllm_version=None, device={})
    assert facts["objective"] == {"maximize": "output_throughput", "preemption_weight": 1.0}
    assert set(facts["workload"]) == {
        "kind", "path", "input_tokens", "output_tokens", "requests", "concurrency",
        "request_rate_per_s", "burstiness", "warmup_requests", "request_timeout_s", "seed",
    }  # fmt: skip
    assert facts["workload"]["input_tokens"] == {
        "mean": 16, "stdev": 0.0, "minimum": 1, "maximum": None,
    }  # fmt: skip


def test_differences_name_another_vllm_and_device():
    assert changed(SPEC, version="0.33.0") == ["vLLM version: 0.32.0 -> 0.33.0"]
    assert changed(SPEC, device={"gpu0": "H100 GPU-2"}) == ["device.gpu0: A100 GPU-1 -> H100 GPU-2"]


def test_differences_take_an_unknown_version_for_no_difference():
    assert changed(SPEC, version=None) == []


def test_fingerprint_notices_another_model_under_the_same_path(tmp_path):
    spec = replace(SPEC, server=replace(SPEC.server, model=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"layers": 2}')
    old = fingerprint(spec, vllm_version=None, device={})
    (tmp_path / "config.json").write_text('{"layers": 4}')
    new = fingerprint(spec, vllm_version=None, device={})
    assert [line.split(":")[0] for line in differences(old, new)] == ["model files"]


def test_fingerprint_holds_no_secret():
    spec = replace(SPEC, server=replace(SPEC.server, env={"HF_TOKEN": "hf_verysecretindeed"}))
    assert "verysecret" not in str(fingerprint(spec, vllm_version=None, device={}))
