"""What an outcome is worth: one score to maximise and a fixed vector of constraints.

The score of a measurement is::

    throughput x served / offered / (1 + weight x preemptions / served)

Three reasons, one a factor. Throughput is what is asked for. `served / offered` makes
turning requests away worth nothing, so that a shorter context cannot win by refusing the
long ones. The last factor prices preemption: on current vLLM a preempted request is
recomputed at little cost to raw throughput, but it stands still meanwhile, which multiplies
the tail of TPOT and ITL by three and by twenty; a throughput alone would call that free.
With the default weight 1, one preemption per finished request halves the score.

`max_rate` is a load, not a throughput: the highest at which the SLO is met. The SLO says what a
stall costs, so preemptions are not priced once more.

A measurement that was cut short is an estimate, and may win like any other, but for one: that it
was given up as worse says that it lies below the best. One that ran out of time has all requests
that ended until then. One that was saturated, an open loop, has the throughput of a full server,
which is its capacity; goodput is never cut short there, because it falls while the queue grows.

A failure is told to the search as a finished trial with score 0 (it served nothing) and a
violated constraint, never as an error: samplers ignore failed trials and would propose the
same out-of-memory corner again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.types import (
    Failure,
    FailureCause,
    Measurement,
    MemoryFacts,
    Metric,
    ObjectiveSpec,
    Outcome,
    Verdict,
)

CONSTRAINTS = ("valid", "memory", "served")
"""Names of the constraints that every trial of every study is told with; feasible at <= 0.

`valid`: vLLM's own check takes the configuration (-1) or not (1).
`memory`: the signed margin by which the KV cache misses (> 0) or exceeds (< 0) what one
request of full length needs, as a share; 1 for a failure that names no numbers.
`served`: minus the share of requests that were served; 1 where none was, or the score is 0.
"""

_MISS_AT_LEAST = 0.01  # a miss rounded to 0 GiB by the log is still a miss
_REFUSALS = frozenset({FailureCause.BAD_CONFIG, FailureCause.UNSUPPORTED})


def judge(outcome: Outcome, objective: ObjectiveSpec) -> Verdict:
    """Turn an outcome into what the search is told."""
    if isinstance(outcome, Failure):
        return Verdict(score=0.0, constraints=_failure_constraints(outcome))
    value = score(outcome, objective)
    constraints = {
        "valid": -1.0,
        "memory": -_headroom(outcome.memory),
        # Where no request, or no load, met what was promised, there is nothing to deploy.
        "served": -outcome.served / outcome.offered if value > 0 else 1.0,
    }
    return Verdict(score=value, constraints=constraints)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a score is made of; of a whole measurement or a part of it.

    Attributes:
        good_per_s: requests a second that met the SLO.
        served, offered, preemptions: counts over the same time.
    """

    output_per_s: float
    input_per_s: float
    served_per_s: float
    good_per_s: float
    served: float
    offered: float
    preemptions: float


def score(measurement: Measurement, objective: ObjectiveSpec) -> float:
    """The formula of this module's docstring, in the unit of the metric."""
    if objective.maximize is Metric.MAX_RATE:
        return measurement.rate.load if measurement.rate else 0.0
    # Preemptions are those of the window, and so must the requests be that they are priced by.
    ended = measurement.request_throughput_per_s * measurement.window_s
    served = ended if measurement.steady else float(measurement.served)
    share = measurement.served / measurement.offered if measurement.offered else 0.0
    return score_of(
        Figures(
            output_per_s=measurement.output_throughput_tokens_per_s,
            input_per_s=measurement.input_throughput_tokens_per_s,
            served_per_s=measurement.request_throughput_per_s,
            good_per_s=measurement.goodput_per_s or 0.0,
            served=served,
            offered=served / share if share > 0 else 0.0,
            preemptions=measurement.counters.preemptions,
        ),
        objective,
    )


def score_of(figures: Figures, objective: ObjectiveSpec) -> float:
    """The same of any part of a measurement; 0 where nothing was served."""
    if figures.served <= 0:
        return 0.0
    served_share = figures.served / figures.offered
    price = 1.0 + objective.preemption_weight * figures.preemptions / figures.served
    return _throughput(figures, objective.maximize) * served_share / price


def refused() -> Mapping[str, float]:
    """The constraints of a configuration that was never launched because vLLM refuses it."""
    return {"valid": 1.0, "memory": 0.0, "served": 1.0}


def _throughput(figures: Figures, metric: Metric) -> float:
    match metric:
        case Metric.OUTPUT_THROUGHPUT:
            return figures.output_per_s
        case Metric.REQUEST_THROUGHPUT:
            return figures.served_per_s
        case Metric.TOTAL_THROUGHPUT:
            return figures.input_per_s + figures.output_per_s
        case Metric.GOODPUT | Metric.MAX_RATE:
            return figures.good_per_s


def _failure_constraints(failure: Failure) -> dict[str, float]:
    if failure.cause in _REFUSALS:
        return dict(refused())
    return {"valid": -1.0, "memory": _shortfall(failure), "served": 1.0}


def _shortfall(failure: Failure) -> float:
    """How much of what was needed was missing, as a share in (0, 1]."""
    numbers = failure.numbers
    for needed_name, available_name in (
        ("max_model_len_tokens", "estimated_max_model_len_tokens"),  # exact in tokens ...
        ("needed_gib", "available_gib"),  # ... where GiB are rounded to two digits
    ):
        needed, available = numbers.get(needed_name), numbers.get(available_name)
        if needed is not None and available is not None and needed > 0:
            return min(1.0, max(_MISS_AT_LEAST, (needed - available) / needed))
    return 1.0


def _headroom(memory: MemoryFacts) -> float:
    """Share of the KV cache beyond one request of full length, in [0, 1]; 0 if unknown."""
    if not memory.kv_cache_tokens or not memory.max_model_len_tokens:
        return 0.0
    return max(0.0, 1.0 - memory.max_model_len_tokens / memory.kv_cache_tokens)
