"""In which words a load, an SLO and the end of a measurement are told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from tuner.load.workload import has_texts, planned_lengths, schedule
from tuner.metrics.slo import limit_name
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


def workload_words(workload: WorkloadSpec, trace: TraceFigures | None = None) -> str:
    """Such as `500 requests of 512 input and 128 output tokens, 64 in flight`.

    Args:
        trace: what a file of recorded requests comes to, to be told as well.
    """
    words = f"{workload.requests:,} requests {_source(workload)}"
    if trace is not None:
        words += f" (mean {trace.input_tokens:.0f} input and {trace.output_tokens:.0f} output"
        words += " tokens)" if not trace.estimated else " tokens, estimated from texts)"
    words += f", {_load(workload)}"
    if trace is not None and trace.duration_s is not None:
        rate = trace.rate_per_s
        each = "all at once" if rate is None else f"{rate:.3g} a second"
        words += f": {each} over {duration(trace.duration_s)}"
    return words


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """What a file of recorded requests comes to, as it will be sent.

    Attributes:
        input_tokens, output_tokens: means.
        estimated: whether they are of texts, at four characters a token.
        duration_s: from the first request to the last where the recorded times are used.
        rate_per_s: the mean over that time; None where all come at once.
    """

    input_tokens: float
    output_tokens: float
    estimated: bool = False
    duration_s: float | None = None
    rate_per_s: float | None = None


def trace_figures(workload: WorkloadSpec) -> TraceFigures | None:
    """Read the file of a workload; None where there is none.

    Raises:
        InputError: the file cannot be used.
    """
    if workload.path is None:
        return None
    lengths = planned_lengths(workload)
    sent, asked = (sum(column) / len(lengths) for column in zip(*lengths, strict=True))
    figures = TraceFigures(sent, asked, has_texts(workload))
    due_s = schedule(workload)
    if due_s is None or workload.arrivals is not ArrivalKind.TRACE or workload.levels:
        return figures
    rate = (len(due_s) - 1) / due_s[-1] if due_s[-1] > 0 else None
    return replace(figures, duration_s=due_s[-1], rate_per_s=rate)


def slo_words(limits: tuple[SloLimit, ...]) -> str:
    """Such as `ttft_p99 500 ms, tpot_p99 50 ms`."""
    return ", ".join(f"{limit_name(limit)} {limit.limit_s * 1000:g} ms" for limit in limits)


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


def load_document(spec: StudySpec, trace: TraceFigures | None = None) -> dict[str, JsonValue]:
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
        "trace": None if trace is None else asdict(trace),
        "slo": {limit_name(limit): limit.limit_s for limit in spec.objective.slo},
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
