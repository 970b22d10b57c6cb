"""What a server life gave: facts, records of requests, a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What the server said of itself while starting; None where it said nothing.

    Attributes:
        kv_cache_tokens: size of the KV cache.
        max_concurrency: how many requests of `max_model_len_tokens` fit the KV cache.
        startup_s: launch to ready, as the tuner saw it.
        simulated: the server was a stand-in: no figure of it is of a real device.
    """

    vllm_version: str | None = None
    weights_gib: float | None = None
    kv_cache_gib: float | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    max_model_len_tokens: int | None = None
    graph_gib: float | None = None
    startup_s: float | None = None
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Memory seen from outside; None where there is no such device.

    Attributes:
        device_total_gib, device_peak_gib: per visible device, in NVML's order.
        host_peak_gib: of the server's processes together: their anonymous memory and the
            largest shared one.
    """

    device_names: tuple[str, ...] = ()
    device_total_gib: tuple[float, ...] = ()
    device_peak_gib: tuple[float, ...] = ()
    host_peak_gib: float | None = None


class RequestStatus(StrEnum):
    """How a request ended."""

    OK = "ok"
    REJECTED = "rejected"
    """Answered with a 4xx: the server will not serve it (too long for max-model-len)."""
    FAILED = "failed"
    """5xx, an error event in the stream, a broken connection, an empty answer."""
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it; times are seconds on one monotonic clock.

    Attributes:
        index: position in the workload; the same request in every trial.
        prompt_tokens, output_tokens: from the server's `usage`.
        token_times_s: arrival of each streamed chunk that carried a token, the first included.
    """

    index: int
    status: RequestStatus
    send_s: float
    end_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_times_s: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles (linear interpolation, numpy's default) in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """What the server's /metrics said over the measured window.

    Counters are exact differences between its two ends, summed over engines; usages and
    queue lengths are samples in between.
    """

    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries_tokens: int
    prefix_cache_hits_tokens: int
    kv_cache_usage_mean: float
    kv_cache_usage_peak: float
    running_mean: float
    running_peak: float
    waiting_mean: float
    waiting_peak: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One configuration under the workload.

    Latencies are None where no request was served (TPOT and ITL: none of two tokens).

    Attributes:
        window_s: first send to last end.
        offered: requests of the workload; `served + rejected + failed == offered`.
    """

    window_s: float
    offered: int
    served: int
    rejected: int
    failed: int
    request_throughput_per_s: float
    output_throughput_tokens_per_s: float
    input_throughput_tokens_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    counters: ServerCounters
    memory: MemoryFacts
    device: DeviceUse
    first_error: str = ""
