"""In which words a load, an SLO and the end of a measurement are told."""

from __future__ import annotations

from tuner.report.console import duration
from tuner.types import (
    ArrivalKind,
    JsonValue,
    LengthKind,
    LengthSpec,
    MeasureSpec,
    SloLimit,
    StudySpec,
    WorkloadKind,
    WorkloadSpec,
)


def workload_words(workload: WorkloadSpec) -> str:
    """Such as `500 requests of 512 input and 128 output tokens, 64 in flight`."""
    return f"{workload.requests:,} requests {_source(workload)}, {_load(workload)}"


def slo_words(limits: tuple[SloLimit, ...]) -> str:
    """Such as `ttft_p99 500 ms, tpot_p99 50 ms`."""
    return ", ".join(f"{slo_key(limit)} {limit.limit_s * 1000:g} ms" for limit in limits)


def slo_key(limit: SloLimit) -> str:
    """As in the space file."""
    return f"{limit.metric}_p{limit.percentile:g}"


def measure_words(measure: MeasureSpec, requests: int) -> str:
    """When the measurement of one configuration ends."""
    if measure.precision:
        sure = f"{100 * measure.confidence:g}% confidence"
        ends = [f"the score is known to ±{100 * measure.precision:g}% ({sure})"]
    else:
        ends = []
    ends.append(f"all {requests:,} requests are answered")
    if measure.time_s is not None:
        ends.append(f"{duration(measure.time_s)} are over")
    if measure.stop_worse:
        ends.append("it is clearly worse than the best so far")
    return "until " + ", or ".join(ends)


def load_document(spec: StudySpec) -> dict[str, JsonValue]:
    """The same for scripts."""
    workload, measure = spec.workload, spec.measure
    return {
        "workload": {
            "kind": workload.kind.value,
            "requests": workload.requests,
            "concurrency": workload.concurrency,
            "request_rate": workload.request_rate_per_s,
            "levels": list(workload.levels),
            "arrivals": None if workload.concurrency else workload.arrivals.value,
        },
        "slo": {slo_key(limit): limit.limit_s for limit in spec.objective.slo},
        "measure": {
            "precision": measure.precision,
            "confidence": measure.confidence,
            "stop_worse": measure.stop_worse,
            "time_s": measure.time_s,
        },
    }


def _source(workload: WorkloadSpec) -> str:
    if workload.kind is WorkloadKind.SYNTHETIC:
        sent, asked = _lengths(workload.input_tokens), _lengths(workload.output_tokens)
        words = f"of {sent} input and {asked} output tokens"
    else:
        words = f"from {workload.path or workload.url}"
        if workload.output_tokens is not None:
            words += f" with {_lengths(workload.output_tokens)} output tokens"
    if workload.shared_prefix is not None:
        shared = workload.shared_prefix
        words += f", {shared.tokens} of them shared in {shared.groups} groups"
    if workload.turns > 1:
        words += f", in conversations of {workload.turns} turns"
    if workload.input_scale != 1 or workload.output_scale != 1:
        words += f", lengths times {workload.input_scale:g} and {workload.output_scale:g}"
    return words


def _lengths(lengths: LengthSpec | None) -> str:
    if lengths is None:
        return "unknown"
    if lengths.kind is LengthKind.NORMAL and not lengths.stdev:
        return f"{lengths.mean:g}"
    if lengths.kind is LengthKind.UNIFORM:
        return f"{lengths.minimum} to {lengths.maximum}"
    kind = "" if lengths.kind is LengthKind.NORMAL else f" ({lengths.kind})"
    return f"about {lengths.mean:.0f}{kind}"


def _load(workload: WorkloadSpec) -> str:
    if workload.concurrency is not None:
        levels = workload.levels or (workload.concurrency,)
        return f"{_then(levels)} in flight"
    rate = workload.request_rate_per_s
    if rate is None:
        faster = "" if workload.speedup == 1 else f", {workload.speedup:g} times as fast"
        return f"at the recorded times{faster}"
    if workload.arrivals is ArrivalKind.RAMP:
        return f"{rate:.4g} a second rising to {workload.ramp_to_per_s:g}"
    shape = {
        ArrivalKind.CONSTANT: "evenly spaced",
        ArrivalKind.TRACE: "spaced as recorded",
    }.get(workload.arrivals, _randomness(workload.burstiness))
    return f"{_then(workload.levels or (rate,))} a second, {shape}"


def _randomness(burstiness: float) -> str:
    return "at random" if burstiness == 1 else f"at random (burstiness {burstiness:g})"


def _then(levels: tuple[float, ...]) -> str:
    return ", then ".join(f"{level:.4g}" for level in levels)
