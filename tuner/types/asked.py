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
