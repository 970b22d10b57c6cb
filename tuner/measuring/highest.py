"""`max_rate`: the highest load that meets the SLO, within one server life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tuner.load.pool import most_connections
from tuner.load.workload import schedule
from tuner.measuring.rates import RateFinder
from tuner.measuring.session import Run, Session
from tuner.measuring.window import after_first_generation
from tuner.metrics.slo import attained
from tuner.types import (
    MeasureEnd,
    Measurement,
    RateProbe,
    SloLimit,
    WorkloadSpec,
)

WIDEST = 256.0
"""The search stays within this factor of where it starts, both ways."""

_MOST_IN_FLIGHT = 20_000.0
_DEFAULT_RATE_PER_S = 1.0
"""Where to start with a trace that has no times."""


async def highest_load(session: Session, spec: WorkloadSpec) -> Measurement:
    """Probe loads until the highest that meets the SLO is known.

    Each probe has prompts of its own. Returns the measurement at the highest probe that met the
    SLO, or at the lowest where none did, with the search's answer in `rate`.
    """
    asked = session.asked
    is_closed = spec.concurrency is not None
    start = asked.incumbent or spec.concurrency or _rate_per_s(spec)
    finder = RateFinder(
        float(start),
        least=1.0 if is_closed else start / WIDEST,
        most=min(start * WIDEST, _most_in_flight()) if is_closed else start * WIDEST,
        needed=max(limit.percentile for limit in asked.objective.slo) / 100,
        whole=is_closed,
        confidence=asked.measure.confidence,
    )
    runs: dict[float, Run] = {}
    while (load := finder.next_load()) is not None:
        run = await session.measure(_at(spec, load))
        runs[load] = run
        finder.tell(_probe(load, run, asked.objective.slo))
        await session.settle()
    found = finder.result()
    met = [probe.load for probe in found.probes if probe.met and probe.load <= found.load]
    shown = max(met, default=min(runs))
    return replace(runs[shown].measurement, rate=found)


def _most_in_flight() -> float:
    """The highest concurrency to try: each request in flight has a connection of its own."""
    return min(_MOST_IN_FLIGHT, float(most_connections()))


def _rate_per_s(spec: WorkloadSpec) -> float:
    """Of an open loop: as asked for, or as a trace was recorded."""
    if spec.request_rate_per_s is not None:
        return spec.request_rate_per_s
    due_s = schedule(spec)
    if not due_s or due_s[-1] <= 0:
        return _DEFAULT_RATE_PER_S
    return (len(due_s) - 1) / due_s[-1]


def _at(spec: WorkloadSpec, load: float) -> WorkloadSpec:
    if spec.concurrency is not None:
        return replace(spec, concurrency=round(load))
    return replace(spec, request_rate_per_s=load)


def _probe(load: float, run: Run, slo: Sequence[SloLimit]) -> RateProbe:
    """What a run says of its load; where it only waits longer, what is cut off has missed."""
    records = after_first_generation(run.records, run.concurrency) or run.records
    share = attained(records, slo)
    requests = len(records)
    if run.driven.end is MeasureEnd.SATURATED:
        share *= len(run.records) / run.driven.sent
        requests = run.driven.sent
    return RateProbe(load, share, requests, met=share >= 1.0)
