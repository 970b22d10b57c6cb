"""Servers and loads that differ in what makes a measurement hard."""

from __future__ import annotations

from dataclasses import replace

from bench.measuring_runs import Case

from tuner.types import (
    JsonValue,
    LengthKind,
    LengthSpec,
    Metric,
    ObjectiveSpec,
    SloLimit,
    SloMetric,
    WorkloadKind,
    WorkloadSpec,
)

CHAT = WorkloadSpec(
    kind=WorkloadKind.SYNTHETIC,
    path=None,
    input_tokens=LengthSpec(512, 128, 64, 1024),
    output_tokens=LengthSpec(192, 64, 16, 512),
    requests=1500,
    concurrency=64,
    request_rate_per_s=None,
    burstiness=1.0,
    warmup_requests=8,
    request_timeout_s=600.0,
    seed=0,
)
HEAVY_TAIL = replace(
    CHAT,
    input_tokens=LengthSpec(400, 500, 16, 4000, LengthKind.LOGNORMAL),
    output_tokens=LengthSpec(200, 250, 8, 2000, LengthKind.LOGNORMAL),
)
FIXED = replace(CHAT, input_tokens=LengthSpec(512), output_tokens=LengthSpec(128))
SLO = (SloLimit(SloMetric.TTFT, 1.5), SloLimit(SloMetric.E2E, 12.0))


def _open(workload: WorkloadSpec, rate_per_s: float, burstiness: float = 1.0) -> WorkloadSpec:
    return replace(workload, concurrency=None, request_rate_per_s=rate_per_s, burstiness=burstiness)


def _a10(**args: JsonValue) -> dict[str, JsonValue]:
    given = {"max-model-len": 8192, "kv-cache-dtype": "fp8"}
    return {**given, **{name.replace("_", "-"): value for name, value in args.items()}}


def _a10_case(name: str, workload: WorkloadSpec, **args: JsonValue) -> Case:
    return Case(name, "a10-24g", "llama-3.1-8b", _a10(**args), workload)


CASES = (
    _a10_case("queueing", replace(CHAT, concurrency=96), max_num_seqs=48),
    _a10_case("preempting", replace(CHAT, concurrency=96), kv_cache_dtype="auto"),
    _a10_case("fixed lengths", FIXED),
    _a10_case("heavy tail", HEAVY_TAIL),
    _a10_case("few at a time", replace(CHAT, requests=400, concurrency=4)),
    Case(
        "fast device",
        "h100-80g",
        "llama-3.1-8b",
        {"max-model-len": 8192},
        replace(CHAT, requests=4000, concurrency=128),
    ),
    Case(
        "cpu preempting",
        "cpu",
        "tiny",
        {"max-model-len": 512, "kv-cache-memory-bytes": 2**24, "max-num-seqs": 32},
        replace(
            CHAT,
            input_tokens=LengthSpec(64, 10, 16, 100),
            output_tokens=LengthSpec(256, 77, 32, 440),
            concurrency=32,
        ),
    ),
    _a10_case("open loop", _open(CHAT, 3.0)),
    _a10_case("bursty open loop", _open(CHAT, 3.0, burstiness=0.3)),
    replace(
        _a10_case("goodput", replace(CHAT, concurrency=48)),
        objective=ObjectiveSpec(Metric.GOODPUT, slo=SLO),
    ),
)
