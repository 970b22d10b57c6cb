"""What the user asked for: a space file, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tuner.types.config import JsonValue, Knob


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How the server under test is started.

    Attributes:
        command: argv prefix such as `("vllm", "serve")`.
        model: a folder or a hub id.
        args: fixed flags by hyphenated name.
        env: fixed environment variables.
        startup_timeout_s: longest wait from launch to ready.
        hang_timeout_s: a server that has requests and whose counters stand still for so long
            hangs.
    """

    command: tuple[str, ...]
    model: str
    args: Mapping[str, JsonValue]
    env: Mapping[str, str]
    startup_timeout_s: float
    hang_timeout_s: float = 120.0


class LengthKind(StrEnum):
    """How token lengths are distributed."""

    NORMAL = "normal"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class LengthBin:
    """A part of a histogram: lengths from `low` to `high`, both included, equally likely."""

    low: int
    high: int
    weight: float


@dataclass(frozen=True, slots=True)
class LengthSpec:
    """Token lengths, rounded, cut at `minimum` and `maximum`.

    Attributes:
        mean, stdev: of the lengths themselves, also where they are lognormal; `stdev` 0 is a
            fixed length. Of a uniform distribution `minimum` and `maximum` say all.
        bins: of a histogram.
    """

    mean: float
    stdev: float = 0.0
    minimum: int = 1
    maximum: int | None = None
    kind: LengthKind = LengthKind.NORMAL
    bins: tuple[LengthBin, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedPrefixSpec:
    """Prompts that begin alike, as those of one system prompt do.

    Attributes:
        tokens: of the common beginning, part of the input tokens.
        groups: how many different ones; each prompt has one of them, equally often.
    """

    tokens: int
    groups: int = 1


class WorkloadKind(StrEnum):
    """Where requests come from."""

    SYNTHETIC = "synthetic"
    SHAREGPT = "sharegpt"
    CUSTOM = "custom"
    OPENAI_BATCH = "openai-batch"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    MOONCAKE = "mooncake"
    GUIDELLM = "guidellm"
    TRACE = "trace"
    """A file of any of these formats, told by its content."""
    LIKE_SERVER = "like-server"
    """Synthetic, with the lengths, rate and prefix hits of a server in production."""


class ArrivalKind(StrEnum):
    """When requests of an open loop are due."""

    POISSON = "poisson"
    """At random; more or less bursty by `burstiness`."""
    CONSTANT = "constant"
    RAMP = "ramp"
    """At random, the rate rising evenly from `request_rate_per_s` to `ramp_to_per_s`."""
    TRACE = "trace"
    """As recorded, `speedup` times as fast."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """The load that every trial is measured under.

    A closed loop has `concurrency` (that many requests in flight) and no
    `request_rate_per_s`; an open loop has arrivals of kind `arrivals`, with a mean rate but for
    those of a trace (gamma-distributed gaps of shape `burstiness`, 1 being Poisson).

    Attributes:
        path: the file, of those kinds that have one.
        input_tokens: prompt lengths of kind `synthetic`.
        output_tokens: output lengths; for a file None means the recorded ones.
        requests: how many requests are measured at most.
        warmup_requests: how many are sent before, unmeasured, at least.
        request_timeout_s: a request that takes longer counts as failed.
        seed: makes prompts, lengths and arrivals the same in every trial.
        levels: the loads of one server life, one after another: concurrencies where
            `concurrency` is set, else rates; empty where there is only the one.
        input_scale, output_scale: what recorded lengths are multiplied with.
        max_input_tokens, max_output_tokens: what longer ones are cut to, after scaling.
        shared_prefix: of synthetic prompts.
        turns: of a synthetic conversation: each is sent with all that was said before.
        url: of the server that kind `like-server` asks.
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
    levels: tuple[float, ...] = ()
    arrivals: ArrivalKind = ArrivalKind.POISSON
    ramp_to_per_s: float | None = None
    speedup: float = 1.0
    input_scale: float = 1.0
    output_scale: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    shared_prefix: SharedPrefixSpec | None = None
    turns: int = 1
    url: str | None = None


class Metric(StrEnum):
    """What a study maximises."""

    OUTPUT_THROUGHPUT = "output_throughput"
    REQUEST_THROUGHPUT = "request_throughput"
    TOTAL_THROUGHPUT = "total_throughput"
    """Input and output tokens a second."""
    GOODPUT = "goodput"
    """Requests a second that meet the SLO."""
    MAX_RATE = "max_rate"
    """The highest load at which the SLO is met."""


class SloMetric(StrEnum):
    """Latencies that can be promised (definitions: `tuner.metrics.serving`)."""

    TTFT = "ttft"
    TPOT = "tpot"
    ITL = "itl"
    E2E = "e2e"


@dataclass(frozen=True, slots=True)
class SloLimit:
    """One promise, such as `ttft_p99: 500ms`.

    Goodput counts the requests that meet `limit_s` in every limit, whatever the percentile
    (DistServe, OSDI 2024); a load meets the SLO if `percentile` percent of its requests do.
    A request's ITL is its largest gap.
    """

    metric: SloMetric
    limit_s: float
    percentile: float = 99.0


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """What is maximised, how much a preemption costs (see `tuner.objective`), what is promised."""

    maximize: Metric = Metric.OUTPUT_THROUGHPUT
    preemption_weight: float = 1.0
    slo: tuple[SloLimit, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasureSpec:
    """How long a configuration is measured, within the requests of the workload.

    Attributes:
        precision: the measurement ends once the score's interval is this narrow: half its
            width as a share of the score; 0 sends every request.
        confidence: of that interval.
        stop_worse: end early where the configuration is clearly worse than the incumbent.
        time_s: the longest that is measured; None leaves it to the requests.
    """

    precision: float = 0.02
    confidence: float = 0.95
    stop_worse: bool = True
    time_s: float | None = None


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
    measure: MeasureSpec = MeasureSpec()
