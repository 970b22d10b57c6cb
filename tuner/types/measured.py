"""What a server life gave: facts, records of requests, a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    SERVER_ERROR = "server_error"
    """5xx, an error event in the stream, an answer that makes no sense."""
    DISCONNECTED = "disconnected"
    """The connection was refused or broke, or the answer ended before its end."""
    EMPTY = "empty"
    """Answered in good order, without a token."""
    WRONG_LENGTH = "wrong_length"
    """Answered in good order, with another number of tokens than was asked for."""
    TIMEOUT = "timeout"
    """Given up by the client."""

    @property
    def failed(self) -> bool:
        """Whether the server should have served it and did not: neither OK nor REJECTED."""
        return self not in (RequestStatus.OK, RequestStatus.REJECTED)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it; times are seconds on one monotonic clock.

    Attributes:
        index: position in the workload; the same request in every trial.
        prompt_tokens, output_tokens: from the server's `usage`.
        token_times_s: arrival of each event of the stream that carried tokens, the first
            included.
        token_counts: how many tokens each of these carried; empty where it was one each.
        intended_s: when it was due in an open loop; None where it was due when it was sent.
    """

    index: int
    status: RequestStatus
    send_s: float
    end_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_times_s: tuple[float, ...] = ()
    error: str = ""
    token_counts: tuple[int, ...] = ()
    intended_s: float | None = None


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
class Interval:
    """Where a figure lies with `confidence`, in its own unit."""

    low: float
    high: float
    confidence: float = 0.95

    @property
    def half_width(self) -> float:
        """Half its width as a share of its middle: 0.02 is ±2 %."""
        middle = (self.low + self.high) / 2
        return (self.high - self.low) / 2 / middle if middle > 0 else float("inf")


class MeasureEnd(StrEnum):
    """Why a measurement ended."""

    COMPLETE = "complete"
    """Every request of the workload was sent and has ended."""
    PRECISE = "precise"
    """The interval is narrow enough."""
    WORSE = "worse"
    """Clearly worse than the incumbent: the figures are an estimate."""
    SATURATED = "saturated"
    """Requests come faster than they are served, and the queue only grows."""
    TIME = "time"
    """The longest time to measure is over."""


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Whether the client kept up; it is no part of what is measured.

    Attributes:
        loop_lag_p99_s: how late its event loop ran what was due.
        lateness_p99_s: how late requests were sent; 0 in a closed loop.
        cpu_share: share of the time that the loop's thread ran, in all but the busiest tenth of
            the seconds; of several processes the busiest.
        processes: that the load was spread over.
    """

    loop_lag_p99_s: float
    lateness_p99_s: float
    cpu_share: float
    processes: int = 1


@dataclass(frozen=True, slots=True)
class ServerLatencies:
    """The server's own histograms over the window, as a check of the client's figures.

    Percentiles are interpolated within buckets, which are coarse: compare the means. They are of
    the whole load, ramp-up and ramp-down included.

    Attributes:
        client_ttft_mean_s, client_e2e_mean_s: what the client saw of the same requests, from
            when they were sent.
    """

    ttft_s: Percentiles | None = None
    tpot_s: Percentiles | None = None
    e2e_s: Percentiles | None = None
    client_ttft_mean_s: float | None = None
    client_e2e_mean_s: float | None = None


@dataclass(frozen=True, slots=True)
class RateProbe:
    """One load that was tried for `max_rate`.

    Attributes:
        attained: share of requests that met the SLO, by its scarcest limit.
    """

    load: float
    attained: float
    requests: int
    met: bool


@dataclass(frozen=True, slots=True)
class RateSearch:
    """The highest load that meets the SLO, found within one server life.

    Attributes:
        load: requests a second, or a concurrency where the workload is a closed loop.
        interval: the highest that surely met it and the lowest that surely did not.
        limited_by: why no higher load was tried, where the client could not drive the one at
            the interval's high end: the server may well bear more. Empty where the SLO is what
            limits.
    """

    load: float
    interval: Interval
    probes: tuple[RateProbe, ...]
    limited_by: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One configuration under the workload.

    Latencies are None where no request was served (TPOT and ITL: none of two tokens).

    Attributes:
        window_s: what throughputs are taken over; without ramp-up and ramp-down where the
            load was steady for long enough (`steady`), else first send to last end.
        offered: requests that were sent; `served + rejected + failed == offered`.
        statuses: how many requests ended how, by `RequestStatus` value.
        goodput_per_s: requests a second that met the SLO; None without one.
        slo_kept: share of the offered requests that met all limits of the SLO; of those due
            within the window. None without an SLO.
        slo_missed: how many of them missed each limit, by name such as `ttft_p99`.
        slo_reached_s: the latency at each limit's percentile; missing where so many requests
            were not served that there is none.
        interval: of the score; None where too little was seen for one, and of `max_rate`.
        blocks: that the interval rests on.
        energy_j: of the devices over the window; None without NVML.
        rate: of `max_rate`.
        levels: each load of the server life, where there are several; the figures above are
            then those of the last.
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
    steady: bool = False
    statuses: Mapping[str, int] = field(default_factory=dict)
    goodput_per_s: float | None = None
    interval: Interval | None = None
    blocks: int = 0
    end: MeasureEnd = MeasureEnd.COMPLETE
    client: ClientHealth | None = None
    server: ServerLatencies | None = None
    energy_j: float | None = None
    rate: RateSearch | None = None
    levels: tuple[Measurement, ...] = ()
    slo_kept: float | None = None
    slo_missed: Mapping[str, int] = field(default_factory=dict)
    slo_reached_s: Mapping[str, float] = field(default_factory=dict)
