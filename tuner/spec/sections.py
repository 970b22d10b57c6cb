"""The sections of a space file as pydantic models, but for the workload.

Keys may be written with hyphens or underscores. What is named by the user (flags, environment,
parameters) is not here but in `tuner.spec.values` and `tuner.spec.knobs`.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from tuner.names import did_you_mean
from tuner.spec import fields
from tuner.spec.document import kind_of
from tuner.spec.fields import Duration, NamedValues, NotNegative, Section, Switch, Text, Whole
from tuner.spec.problems import wrong
from tuner.spec.workload import WorkloadSection
from tuner.types import ArrivalKind, MeasureSpec, Metric, SamplerKind, SloLimit, SloMetric

_SLO_EXAMPLE = "Write `slo: {ttft_p99: 500ms, tpot_p99: 50ms}`."
_PROMISE = re.compile(r"([a-z0-9]+?)(?:_p([0-9]+(?:\.[0-9]+)?))?")
_PERCENTILES = ("50", "90", "95", "99", "99.9")
_NEEDS_SLO = frozenset({Metric.GOODPUT, Metric.MAX_RATE})


def _slo(value: object) -> tuple[SloLimit, ...]:
    if not isinstance(value, dict) or not value:
        raise wrong(f"must be a mapping of limits, not {kind_of(value or None)}", _SLO_EXAMPLE)
    limits: dict[tuple[SloMetric, float], SloLimit] = {}
    for written, entry in value.items():
        metric, percentile = _promise(str(written))
        if (metric, percentile) in limits:
            raise wrong("is written twice", "Delete one of the two.", at=str(written))
        try:
            seconds = fields.latency(entry)
        except ValueError as error:
            context = getattr(error, "context", None) or {}
            raise wrong(
                str(context.get("message")), str(context.get("hint")), at=str(written)
            ) from None
        limits[metric, percentile] = SloLimit(metric, seconds, percentile)
    return tuple(limits.values())


def _promise(written: str) -> tuple[SloMetric, float]:
    """Metric and percentile of a key such as `ttft_p99`."""
    match = _PROMISE.fullmatch(written.strip().lower().replace("-", "_"))
    names = [metric.value for metric in SloMetric]
    if match is None or match[1] not in names:
        keys = [*names, *(f"{name}_p99" for name in names)]
        hint = did_you_mean(written, keys) or _SLO_EXAMPLE
        raise wrong(f"is no latency: {', '.join(names)} are, with _p99 or the like", hint, written)
    percentile = match[2] or "99"
    if percentile not in _PERCENTILES:
        known = ", ".join(f"p{known}" for known in _PERCENTILES)
        raise wrong(f"has no percentile of {known}", f"Write `{match[1]}_p99`.", written)
    return SloMetric(match[1]), float(percentile)


_MEASURE = MeasureSpec()

Slo = Annotated[tuple[SloLimit, ...], BeforeValidator(_slo)]
_Precision = Annotated[float, BeforeValidator(fields.share(0.0, 0.5, "`precision: 2%`"))]
_Confidence = Annotated[float, BeforeValidator(fields.share(0.5, 0.999, "`confidence: 95%`"))]


class ServerSection(Section):
    """`server:`"""

    model: Text
    command: Annotated[tuple[str, ...], BeforeValidator(fields.command)] = ("vllm", "serve")
    args: NamedValues = Field(default_factory=dict)
    env: NamedValues = Field(default_factory=dict)
    startup_timeout: Duration = 15 * 60.0
    hang_timeout: Duration = 120.0


class ObjectiveSection(Section):
    """`objective:`"""

    maximize: Annotated[Metric, BeforeValidator(fields.one_of(Metric))] = Metric.OUTPUT_THROUGHPUT
    preemption_weight: NotNegative = 1.0
    slo: Slo | None = None


class MeasureSection(Section):
    """`measure:`"""

    precision: _Precision = _MEASURE.precision
    confidence: _Confidence = _MEASURE.confidence
    stop_worse: Switch = _MEASURE.stop_worse
    time: Duration | None = None

    def spec(self) -> MeasureSpec:
        """The same as a plain value."""
        return MeasureSpec(self.precision, self.confidence, self.stop_worse, self.time)


class BudgetSection(Section):
    """`budget:`"""

    trials: Whole | None = None
    time: Duration | None = None

    @model_validator(mode="before")
    @classmethod
    def _something(cls, value: object) -> object:
        empty = value is None or (
            isinstance(value, dict) and all(entry is None for entry in value.values())
        )
        if empty:
            raise wrong("allows nothing", "Write `budget: {trials: 30, time: 4h}`, or one of them.")
        return value


class SearchSection(Section):
    """`search:`"""

    sampler: Annotated[SamplerKind, BeforeValidator(fields.one_of(SamplerKind))] = SamplerKind.AUTO
    seed: Annotated[int, BeforeValidator(fields.whole(0, 2**32 - 1))] = 0


class SpaceFile(Section):
    """The whole file."""

    needs_value: ClassVar[frozenset[str]] = frozenset({"budget", "search_space"})

    study: Annotated[str, BeforeValidator(fields.study)] | None = None
    server: ServerSection
    search_space: Annotated[dict[str, object], BeforeValidator(fields.searched)]
    constraints: Annotated[list[object], BeforeValidator(fields.lines)] = Field(
        default_factory=list
    )
    reference: NamedValues = Field(default_factory=dict)
    workload: WorkloadSection
    slo: Slo | None = None
    objective: ObjectiveSection = ObjectiveSection()
    measure: MeasureSection = MeasureSection()
    budget: BudgetSection = BudgetSection(trials=30)
    search: SearchSection = SearchSection()

    @property
    def promised(self) -> tuple[SloLimit, ...]:
        """The SLO, from either place."""
        return self.slo or self.objective.slo or ()

    @model_validator(mode="after")
    def _slo_fits(self) -> SpaceFile:
        metric = self.objective.maximize
        if self.slo and self.objective.slo:
            raise wrong("is written twice, here and in `objective`", "Delete one.", at="slo")
        if metric in _NEEDS_SLO and not self.promised:
            raise wrong(
                f"of {metric} needs an SLO: what a request may take", _SLO_EXAMPLE, at="objective"
            )
        if metric is Metric.MAX_RATE and self.workload.arrivals is ArrivalKind.RAMP:
            raise wrong(
                "has arrivals that rise, but max_rate looks for one rate that is kept up",
                "Write `arrivals: poisson`, and `request_rate` where the search begins.",
                at="workload",
            )
        if metric is Metric.MAX_RATE and self.workload.has_levels:
            raise wrong(
                "has several levels, but max_rate looks for one itself",
                "Write one `concurrency` or `request_rate`, where the search begins.",
                at="workload",
            )
        return self
