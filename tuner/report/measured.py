"""A measurement in rows: what was measured, for how long, how sure it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.measuring.finished import CUT_OFF
from tuner.metrics.slo import limit_name
from tuner.records import StudyRecord
from tuner.report.plain import plain_line
from tuner.types import (
    ClientHealth,
    MeasureEnd,
    Measurement,
    Percentiles,
    RateSearch,
    RequestStatus,
    ServerLatencies,
    SloLimit,
)

ESTIMATES = CUT_OFF
"""Ends whose figures are an estimate: of the requests in flight nothing is known."""

ENDS = {
    MeasureEnd.COMPLETE: "all requests were sent",
    MeasureEnd.PRECISE: "the score was known well enough",
    MeasureEnd.WORSE: "clearly worse than the best so far; the figures are an estimate",
    MeasureEnd.SATURATED: "requests came faster than they were served; the figures are an estimate",
    MeasureEnd.TIME: "the longest time to measure was over; the figures are an estimate",
}

DISAGREE_SHARE = 0.1
DISAGREE_S = 0.02
"""Client and server measure different things: on the way are a connection, HTTP, the tokenizer
and the server's own event loop, on one machine some milliseconds. By a tenth of the latency and
20 ms more, one of the clocks is not to be trusted with it."""


def measurement_rows(measured: Measurement) -> Iterator[tuple[str, str]]:
    """Label and value of each row of `tuner show`."""
    yield "requests", requests_words(measured)
    if measured.first_error:
        yield "first error", plain_line(measured.first_error)
    yield from _sureness_rows(measured)
    yield "throughput", _throughput(measured)
    if measured.goodput_per_s is not None:
        yield "goodput", f"{measured.goodput_per_s:.2f} requests/s within the SLO"
    if measured.slo_kept is not None:
        yield "SLO", _slo(measured, measured.slo_kept)
    yield from _latency_rows(measured)
    yield from _server_rows(measured)
    yield from _device_rows(measured)
    if measured.client is not None:
        yield "client", _client(measured.client)
    for number, level in enumerate(measured.levels, 1):
        yield f"load {number}", _level(level)
    if measured.rate is not None:
        yield from _rate_rows(measured.rate)


def estimate_note(study: StudyRecord) -> str | None:
    """A sentence where the figures of the best are an estimate; None where they are not."""
    best = study.best
    measured = best.measurement if best is not None else None
    if best is None or measured is None or measured.end not in ESTIMATES:
        return None
    why = ENDS[measured.end].partition(";")[0]
    return (
        f"The figures of the best (no. {best.number}) are an estimate: {why}, and the requests "
        "in flight were cut off."
    )


def broken_promises(measured: Measurement, slo: Sequence[SloLimit]) -> str:
    """Such as `ttft_p99 is 658 ms, promised 200 ms`; empty where all are kept, or unknown."""
    if measured.slo_kept is None:
        return ""
    parts = []
    for limit in slo:
        name = limit_name(limit)
        reached_s = measured.slo_reached_s.get(name)
        promised = f"promised {limit.limit_s * 1000:g} ms"
        if name not in measured.slo_missed:
            continue
        if reached_s is None:
            parts.append(f"{name} is none, because too few were served, {promised}")
        elif reached_s > limit.limit_s:
            parts.append(f"{name} is {reached_s * 1000:.4g} ms, {promised}")
    return "; ".join(parts)


def promise_note(study: StudyRecord) -> str | None:
    """A sentence where the best does not keep its SLO; None where it does, or has none."""
    best = study.best
    if best is None or best.measurement is None:
        return None
    broken = broken_promises(best.measurement, study.spec.objective.slo)
    return f"The best (no. {best.number}) does not keep the SLO: {broken}." if broken else None


def requests_words(measured: Measurement) -> str:
    """Such as `60 served, 1 rejected, 2 failed of 63 (2 timeout)`."""
    told = (RequestStatus.OK.value, RequestStatus.REJECTED.value)
    ways = [f"{count} {name}" for name, count in measured.statuses.items() if name not in told]
    how = f" ({', '.join(ways)})" if ways else ""
    return (
        f"{measured.served} served, {measured.rejected} rejected, {measured.failed} failed "
        f"of {measured.offered}{how}"
    )


def disagreement(server: ServerLatencies) -> str:
    """How the means of client and server differ beyond what lies between them; empty if not."""
    parts = []
    for name, own, seen_s in (
        ("TTFT", server.ttft_s, server.client_ttft_mean_s),
        ("E2E latency", server.e2e_s, server.client_e2e_mean_s),
    ):
        if own is None or seen_s is None:
            continue
        if abs(seen_s - own.mean) > DISAGREE_SHARE * max(seen_s, own.mean) + DISAGREE_S:
            parts.append(f"{name} {_ms(seen_s)} seen by the client, {_ms(own.mean)} by the server")
    return ", ".join(parts)


def _slo(measured: Measurement, kept: float) -> str:
    """Such as `48% of requests; missed ttft_p99 71, tpot_p99 12`."""
    missed = [f"{name} {count}" for name, count in measured.slo_missed.items() if count]
    return f"{kept:.0%} of requests" + (f"; missed {', '.join(missed)}" if missed else "")


def _sureness_rows(measured: Measurement) -> Iterator[tuple[str, str]]:
    part = "without ramp-up and ramp-down" if measured.steady else "all of the load"
    yield "window", f"{measured.window_s:.1f} s, {part}"
    yield "ended", ENDS[measured.end]
    if (interval := measured.interval) is not None:
        yield (
            "score lies",
            f"between {interval.low:.2f} and {interval.high:.2f} (±{interval.half_width:.1%}, "
            f"{interval.confidence:.0%} confidence, {measured.blocks} blocks)",
        )


def _throughput(measured: Measurement) -> str:
    return (
        f"{measured.output_throughput_tokens_per_s:.1f} output tokens/s, "
        f"{measured.input_throughput_tokens_per_s:.1f} input tokens/s, "
        f"{measured.request_throughput_per_s:.2f} requests/s"
    )


def _latency_rows(measured: Measurement) -> Iterator[tuple[str, str]]:
    for name, latency in (
        ("TTFT", measured.ttft_s),
        ("TPOT", measured.tpot_s),
        ("ITL", measured.itl_s),
        ("E2E latency", measured.e2e_s),
    ):
        if latency is not None:
            yield name, _latency(latency)
    if measured.server is not None:
        means = [
            f"{name} {_ms(own.mean)}"
            for name, own in (
                ("TTFT", measured.server.ttft_s),
                ("TPOT", measured.server.tpot_s),
                ("E2E", measured.server.e2e_s),
            )
            if own is not None
        ]
        if means:
            yield "server's means", ", ".join(means) + " (its own histograms, all of the load)"
        if odd := disagreement(measured.server):
            yield "they disagree", odd


def _server_rows(measured: Measurement) -> Iterator[tuple[str, str]]:
    counters = measured.counters
    yield "preemptions", str(counters.preemptions)
    yield (
        "KV cache usage",
        f"mean {counters.kv_cache_usage_mean:.0%}, peak {counters.kv_cache_usage_peak:.0%}",
    )
    yield (
        "scheduler",
        f"running mean {counters.running_mean:.1f}, peak {counters.running_peak:.0f}; "
        f"waiting mean {counters.waiting_mean:.1f}, peak {counters.waiting_peak:.0f}",
    )
    if counters.prefix_cache_queries_tokens:
        hits = counters.prefix_cache_hits_tokens / counters.prefix_cache_queries_tokens
        yield "prefix cache", f"{hits:.0%} of prompt tokens hit"


def _device_rows(measured: Measurement) -> Iterator[tuple[str, str]]:
    for name, total_gib, peak_gib in zip(
        measured.device.device_names,
        measured.device.device_total_gib,
        measured.device.device_peak_gib,
        strict=True,
    ):
        yield "device memory", f"{name}: peak {peak_gib:.2f} of {total_gib:.2f} GiB"
    if measured.device.host_peak_gib is not None:
        yield "host memory", f"peak {measured.device.host_peak_gib:.2f} GiB"
    if measured.energy_j is not None:
        yield "energy", _energy(measured, measured.energy_j)


def _energy(measured: Measurement, energy_j: float) -> str:
    tokens = measured.output_throughput_tokens_per_s * measured.window_s
    each = f", {energy_j / tokens:.3g} J per output token" if tokens > 0 else ""
    return f"{energy_j:.0f} J of all devices{each}"


def _client(client: ClientHealth) -> str:
    processes = "1 process" if client.processes == 1 else f"{client.processes} processes"
    return (
        f"{processes}, busy {client.cpu_share:.0%} of the time; p99: loop "
        f"{_ms(client.loop_lag_p99_s)} late, requests sent {_ms(client.lateness_p99_s)} late"
    )


def _level(level: Measurement) -> str:
    late = "-" if level.ttft_s is None else f"{level.ttft_s.p99 * 1000:.0f} ms"
    return (
        f"{_throughput(level)}, {level.counters.preemptions} preempted, TTFT p99 {late}; "
        f"{requests_words(level)}"
    )


def _rate_rows(rate: RateSearch) -> Iterator[tuple[str, str]]:
    yield (
        "highest load",
        f"{rate.load:.4g}, between {rate.interval.low:.4g} and {rate.interval.high:.4g} "
        f"({rate.interval.confidence:.0%} confidence)",
    )
    if rate.limited_by:
        yield "limited by", plain_line(f"the client: {rate.limited_by}")
    for number, probe in enumerate(rate.probes, 1):
        met = "meets the SLO" if probe.met else "does not meet the SLO"
        share = f"{probe.attained:.1%} of what it asks for, {probe.requests} requests"
        yield f"probe {number}", f"{probe.load:.4g} {met}: {share}"


def _latency(latency: Percentiles) -> str:
    parts = (("mean", latency.mean), ("p50", latency.p50), ("p90", latency.p90))
    values = [f"{name} {seconds * 1000:.1f}" for name, seconds in parts]
    return ", ".join([*values, f"p99 {_ms(latency.p99)}"])


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
