"""Small values of the shared types, for tests that care about one or two fields."""

from __future__ import annotations

from pathlib import Path

from tuner.types import (
    BudgetSpec,
    Choice,
    DeviceUse,
    FloatRange,
    IntRange,
    LengthSpec,
    Measurement,
    MemoryFacts,
    ObjectiveSpec,
    Percentiles,
    SearchSpec,
    ServerCounters,
    ServerSpec,
    StudySpec,
    WorkloadKind,
    WorkloadSpec,
)

KNOBS = (
    IntRange("max-num-seqs", 4, 128, log=True),
    FloatRange("gpu-memory-utilization", 0.7, 0.95, step=0.01),
    Choice("kv-cache-dtype", ("auto", "fp8")),
)


def counters(preemptions: int = 0) -> ServerCounters:
    return ServerCounters(
        preemptions=preemptions,
        prompt_tokens=2048,
        generation_tokens=8192,
        prefix_cache_queries_tokens=2048,
        prefix_cache_hits_tokens=0,
        kv_cache_usage_mean=0.5,
        kv_cache_usage_peak=0.9,
        running_mean=12.0,
        running_peak=16.0,
        waiting_mean=3.0,
        waiting_peak=8.0,
    )


def measurement(
    *,
    throughput: float = 800.0,
    request_throughput: float = 3.0,
    served: int = 32,
    offered: int = 32,
    preemptions: int = 0,
    memory: MemoryFacts | None = None,
) -> Measurement:
    latency = Percentiles(0.02, 0.02, 0.03, 0.04)
    return Measurement(
        window_s=10.0,
        offered=offered,
        served=served,
        rejected=offered - served,
        failed=0,
        request_throughput_per_s=request_throughput,
        output_throughput_tokens_per_s=throughput,
        input_throughput_tokens_per_s=200.0,
        ttft_s=latency,
        tpot_s=latency,
        itl_s=latency,
        e2e_s=latency,
        counters=counters(preemptions),
        memory=memory or MemoryFacts(kv_cache_tokens=4096, max_model_len_tokens=512),
        device=DeviceUse(),
    )


def workload(requests: int = 8, concurrency: int = 4) -> WorkloadSpec:
    return WorkloadSpec(
        kind=WorkloadKind.SYNTHETIC,
        path=None,
        input_tokens=LengthSpec(16),
        output_tokens=LengthSpec(8),
        requests=requests,
        concurrency=concurrency,
        request_rate_per_s=None,
        burstiness=1.0,
        warmup_requests=2,
        request_timeout_s=30.0,
        seed=0,
    )


def study_spec(**changes: object) -> StudySpec:
    fields: dict[str, object] = {
        "name": "test",
        "server": ServerSpec(
            ("vllm", "serve"), "org/model", {"enforce-eager": True}, {"A": "1"}, 60.0
        ),
        "search_space": KNOBS,
        "constraints": (),
        "reference": {},
        "workload": workload(),
        "objective": ObjectiveSpec(),
        "budget": BudgetSpec(trials=4, time_s=None),
        "search": SearchSpec(),
        "path": Path("space.yaml"),
        "text": "# a space file\n",
    }
    return StudySpec(**(fields | changes))  # type: ignore[arg-type]
