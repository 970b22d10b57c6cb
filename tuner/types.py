"""The frozen values that the layers hand to one another.

Plain data that can cross a process or a network: no behaviour beyond derived properties,
no pydantic, no Optuna. Units stand in the names: `_s` seconds, `_gib` GiB (2^30 bytes),
`_tokens`, `_per_s`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

JsonValue: TypeAlias = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None

ENV_PREFIX = "env."
"""A searched or reference name `env.X` is the server's environment variable X."""


# --- the space -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IntRange:
    """Integers `low..high`, both included. `step` is 1 where `log` is set."""

    name: str
    low: int
    high: int
    step: int = 1
    log: bool = False


@dataclass(frozen=True, slots=True)
class FloatRange:
    """Real numbers `low..high`; with `step`, the grid `low + k·step`."""

    name: str
    low: float
    high: float
    step: float | None = None
    log: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the listed JSON values; `None` means "leave it at vLLM's default"."""

    name: str
    choices: tuple[JsonValue, ...]


Knob: TypeAlias = IntRange | FloatRange | Choice
"""One searched parameter. `name` is a flag with hyphens (`max-num-seqs`) or `env.NAME`."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What is set on a vLLM server beyond its fixed start: flags and environment.

    Attributes:
        args: flags by hyphenated name, values as JSON; a flag that is not named stays at
            vLLM's default. Holds the fixed and the searched ones.
        env: environment variables, values as vLLM reads them.
    """

    args: Mapping[str, JsonValue]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Twelve hex digits that are equal exactly for equal configurations."""
        text = json.dumps([dict(self.args), dict(self.env)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A configuration the search wants to see run.

    Attributes:
        number: Optuna's trial number.
        params: the searched parameters as the space file names and spells them. For the
            reference only those that it sets.
        config: what the server is started with.
        is_reference: whether this is what runs today (or vLLM's own default).
    """

    number: int
    params: Mapping[str, JsonValue]
    config: EngineConfig
    is_reference: bool = False


# --- what the user asked for -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How the server under test is started.

    Attributes:
        command: argv prefix such as `("vllm", "serve")`.
        model: a folder or a hub id.
        args: fixed flags by hyphenated name.
        env: fixed environment variables.
        startup_timeout_s: longest wait from launch to ready.
    """

    command: tuple[str, ...]
    model: str
    args: Mapping[str, JsonValue]
    env: Mapping[str, str]
    startup_timeout_s: float


@dataclass(frozen=True, slots=True)
class LengthSpec:
    """Token lengths: a normal distribution, rounded, cut at `minimum` and `maximum`.

    `stdev` 0 is a fixed length.
    """

    mean: float
    stdev: float = 0.0
    minimum: int = 1
    maximum: int | None = None


class WorkloadKind(StrEnum):
    """Where requests come from."""

    SYNTHETIC = "synthetic"
    SHAREGPT = "sharegpt"


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """The load that every trial is measured under.

    Exactly one of `concurrency` (closed loop: that many requests in flight) and
    `request_rate_per_s` (open loop: arrivals at that mean rate, gamma-distributed gaps of
    shape `burstiness`, 1 being Poisson) is set.

    Attributes:
        path: the file of kind `sharegpt`.
        input_tokens: prompt lengths of kind `synthetic`.
        output_tokens: output lengths; for `sharegpt` None means the recorded reply's length.
        requests: how many requests are measured.
        warmup_requests: how many are sent before, unmeasured.
        request_timeout_s: a request that takes longer counts as failed.
        seed: makes prompts, lengths and arrivals the same in every trial.
    """

    kind: WorkloadKind
    path: Path | None
    input_tokens: LengthSpec | None
    output_tokens: LengthSpec | None
    requests: int
    concurrency: int | None
    request_rate_per_s: float | None
    burstiness: float
    warmup_requests: int
    request_timeout_s: float
    seed: int


class Metric(StrEnum):
    """What a study maximises."""

    OUTPUT_THROUGHPUT = "output_throughput"
    REQUEST_THROUGHPUT = "request_throughput"


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """What is maximised and how much a preemption costs (see `tuner.objective`)."""

    maximize: Metric = Metric.OUTPUT_THROUGHPUT
    preemption_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class BudgetSpec:
    """When the study ends, whichever comes first; at least one is set.

    Attributes:
        trials: finished trials, the reference and those that failed included.
        time_s: seconds spent in trials, earlier runs of the study included.
    """

    trials: int | None
    time_s: float | None


class SamplerKind(StrEnum):
    """Optuna samplers by the name the space file uses."""

    AUTO = "auto"
    TPE = "tpe"
    GP = "gp"
    RANDOM = "random"
    QMC = "qmc"


@dataclass(frozen=True, slots=True)
class SearchSpec:
    """Which sampler, and its seed."""

    sampler: SamplerKind = SamplerKind.AUTO
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Constraint:
    """A line of `constraints:` such as `max-num-seqs <= max-num-batched-tokens`."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class StudySpec:
    """A space file, checked.

    Attributes:
        name: of the study; `studies/<name>/` is where it is kept.
        search_space: the searched parameters, in the file's order.
        reference: what runs today, by the names of `search_space` or any flag or `env.X`;
            a parameter that is not named stays at vLLM's default.
        path: of the space file.
        text: the file as it was read.
    """

    name: str
    server: ServerSpec
    search_space: tuple[Knob, ...]
    constraints: tuple[Constraint, ...]
    reference: Mapping[str, JsonValue]
    workload: WorkloadSpec
    objective: ObjectiveSpec
    budget: BudgetSpec
    search: SearchSpec
    path: Path
    text: str


# --- what is known of a server ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What the server said of itself while starting; None where it said nothing.

    Attributes:
        kv_cache_tokens: size of the KV cache.
        max_concurrency: how many requests of `max_model_len_tokens` fit the KV cache.
        startup_s: launch to ready, as the tuner saw it.
    """

    vllm_version: str | None = None
    weights_gib: float | None = None
    kv_cache_gib: float | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    max_model_len_tokens: int | None = None
    graph_gib: float | None = None
    startup_s: float | None = None


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


# --- one request, one measurement ------------------------------------------------------


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


# --- failure ---------------------------------------------------------------------------


class Blame(StrEnum):
    """Who has to change for the next start to go better."""

    CONFIGURATION = "configuration"
    ENVIRONMENT = "environment"
    UNKNOWN = "unknown"


class FailureCause(StrEnum):
    """Why a server life ended without a measurement."""

    OOM_LOAD = "oom_load"
    OOM_PROFILE = "oom_profile"
    OOM_KV_ALLOC = "oom_kv_alloc"
    OOM_WARMUP = "oom_warmup"
    OOM_GRAPH_CAPTURE = "oom_graph_capture"
    OOM_RUNTIME = "oom_runtime"
    HOST_OOM = "host_oom"
    KV_NO_BLOCKS = "kv_no_blocks"
    KV_TOO_SMALL = "kv_too_small"
    STATE_BLOCKS = "state_blocks"
    DEVICE_BUSY = "device_busy"
    MEMORY_BASELINE_MOVED = "memory_baseline_moved"
    STARTUP_TIMEOUT = "startup_timeout"
    HANG = "hang"
    CRASH = "crash"
    NCCL = "nccl"
    PORT_IN_USE = "port_in_use"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_ACCESS = "model_access"
    BAD_CONFIG = "bad_config"
    UNSUPPORTED = "unsupported"
    COMPILE_CACHE = "compile_cache"
    DISK_FULL = "disk_full"
    UNKNOWN = "unknown"

    @property
    def blame(self) -> Blame:
        """Whether the configuration or the machine has to change."""
        if self in _ENVIRONMENT_CAUSES:
            return Blame.ENVIRONMENT
        return Blame.UNKNOWN if self is FailureCause.UNKNOWN else Blame.CONFIGURATION


_ENVIRONMENT_CAUSES = frozenset(
    {
        FailureCause.DEVICE_BUSY,
        FailureCause.MEMORY_BASELINE_MOVED,
        FailureCause.NCCL,
        FailureCause.PORT_IN_USE,
        FailureCause.MODEL_NOT_FOUND,
        FailureCause.MODEL_ACCESS,
        FailureCause.COMPILE_CACHE,
        FailureCause.DISK_FULL,
    }
)


class Stage(StrEnum):
    """How far a server life has come."""

    LAUNCH = "launch"
    LOADING = "loading"
    COMPILING = "compiling"
    PROFILING = "profiling"
    KV_ALLOCATION = "kv_allocation"
    WARMUP = "warmup"
    GRAPH_CAPTURE = "graph_capture"
    READY = "ready"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Failure:
    """A server life that gave no measurement.

    Attributes:
        line: the decisive line of the log, or what the tuner saw.
        numbers: what that line says, by names such as `needed_gib`, `available_gib`,
            `estimated_max_model_len_tokens`, `tried_to_allocate_gib`.
        excerpt: the lines around it.
        exit_code: of the server process, None while it runs.
    """

    cause: FailureCause
    stage: Stage
    line: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    excerpt: str = ""
    exit_code: int | None = None
    log_path: Path | None = None
    memory: MemoryFacts = field(default_factory=MemoryFacts)

    @property
    def blame(self) -> Blame:
        """See `FailureCause.blame`."""
        return self.cause.blame


Outcome: TypeAlias = Measurement | Failure


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an outcome is worth to the search.

    Attributes:
        score: higher is better; 0 for a failure.
        constraints: the same names in every trial of a study, feasible at <= 0
            (see `tuner.objective.CONSTRAINTS`).
    """

    score: float
    constraints: Mapping[str, float]

    @property
    def feasible(self) -> bool:
        """Whether this configuration may win."""
        return all(value <= 0 for value in self.constraints.values())


@dataclass(frozen=True, slots=True)
class Progress:
    """What is going on now, for the person at the keyboard.

    Attributes:
        activity: such as "starting" or "measuring".
        elapsed_s: since the activity began.
        total_s: how long it may take at most or will take, where that is known.
        detail: such as "212/500 requests".
    """

    activity: str
    elapsed_s: float
    total_s: float | None = None
    detail: str = ""
