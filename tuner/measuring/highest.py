"""`max_rate`: the highest load that meets the SLO, within one server life.

A probe has to last: a burst of requests that is over before the first is answered meets any SLO
at any rate, and so does a closed loop with fewer requests than seats. Probes therefore get as
many requests as their load needs, and a load is met only if the server kept up with it: what
had come by the last arrival was also answered, but for what is in flight at any time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from tuner.load.pool import most_connections
from tuner.load.workload import schedule
from tuner.measuring.finished import typical_s
from tuner.measuring.rates import RateFinder
from tuner.measuring.session import ClientTooSlow, Run, Session
from tuner.measuring.window import after_first_generation
from tuner.metrics.latency import due_s
from tuner.metrics.slo import attained, promises
from tuner.types import (
    MeasureEnd,
    Measurement,
    Progress,
    RateProbe,
    RequestRecord,
    SloLimit,
    WorkloadKind,
    WorkloadSpec,
)

WIDEST = 256.0
"""The search stays within this factor of where it starts, both ways."""

LASTS = 8.0
"""Arrivals of an open loop go on for so many times a typical request: then an eighth of them is
in flight at the last arrival, on a server that keeps up."""

SHORTEST = 4.0
"""Of fewer nothing can be said."""

BACKLOG = 0.25
"""Share of the requests that may be unanswered at the last arrival. On a server that is a third
too slow for the rate it is reached; with `LASTS`, one that keeps up stays at half of it."""

SEATS = 4
"""Requests for each seat of a closed loop: its first generation comes all at once."""

MOST_FOLD = 32
"""A probe has at most so many times the requests that the workload names."""

_MOST_IN_FLIGHT = 20_000.0
_DEFAULT_RATE_PER_S = 1.0
"""Where to start with a trace that has no times."""


async def highest_load(session: Session, spec: WorkloadSpec) -> Measurement:
    """Probe loads until the highest that meets the SLO is known.

    Each probe has prompts of its own. Returns the measurement at the highest probe that met the
    SLO, or at the lowest where none did, with the search's answer in `rate`. A load that the
    client cannot drive ends the climb: what was found up to there is the answer.

    Raises:
        ClientTooSlow: the client could drive neither where the search begins nor half of it.
    """
    asked = session.asked
    is_closed = spec.concurrency is not None
    named = float(spec.concurrency or _rate_per_s(spec))
    finder = RateFinder(
        asked.incumbent or named,
        least=1.0 if is_closed else named / WIDEST,
        most=min(named * WIDEST, _most_in_flight()) if is_closed else named * WIDEST,
        needed=max(limit.percentile for limit in asked.objective.slo) / 100,
        whole=is_closed,
        confidence=asked.measure.confidence,
    )
    runs = await _Search(session, spec, finder).runs()
    found = finder.result()
    met = [probe.load for probe in found.probes if probe.met and probe.load <= found.load]
    shown = runs[max(met, default=min(runs))]
    told = promises(_judged(shown), asked.objective.slo)
    if told is None:
        return replace(shown.measurement, rate=found)
    return replace(
        shown.measurement,
        rate=found,
        slo_kept=told.kept,
        slo_missed=told.missed,
        slo_reached_s=told.reached_s,
    )


class _Search:
    """Probes what a finder asks for, and tells how it goes."""

    def __init__(self, session: Session, spec: WorkloadSpec, finder: RateFinder) -> None:
        self._session = session
        self._spec = spec
        self._finder = finder
        self._runs: dict[float, Run] = {}
        self._typical_s = 0.0

    async def runs(self) -> dict[float, Run]:
        """The run of each load that could be driven; one at least.

        Raises:
            ClientTooSlow: not the first load, nor half of it, or a load below others that could.
        """
        failed: ClientTooSlow | None = None
        while (load := self._finder.next_load()) is not None:
            started_s = time.perf_counter()
            try:
                said = await self._probe(load)
            except ClientTooSlow as slow:
                if (failed and not self._runs) or (self._runs and load < min(self._runs)):
                    raise
                failed = slow
                said = f"{self._words(load)} could not be driven: {slow.message}"
                self._finder.cannot_drive(load, said)
            self._session.on_progress(Progress(said, time.perf_counter() - started_s))
            await self._session.settle()
        if failed is not None and not self._runs:
            raise failed
        return self._runs

    async def _probe(self, load: float) -> str:
        """What came of it, in words."""
        run = await self._lasting(load)
        if run is None:
            said = f"{self._words(load)} is over too soon to load the server: raise `requests`"
            self._finder.cannot_drive(load, said)
            return said
        self._runs[load] = run
        slo = self._session.asked.objective.slo
        self._finder.tell(_probe(load, run, slo))
        kept = promises(_judged(run), slo)
        share = (kept.kept if kept else 0.0) * _ended_share(run)
        number = len(self._finder.probes)
        queue = "" if _keeps_up(run) else ", and falls behind"
        return f"probe {number}: {self._words(load)}: {100 * share:.0f} % in the SLO{queue}"

    async def _lasting(self, load: float) -> Run | None:
        """A run that is long enough for this load; None where the workload has not enough.

        Where much is unanswered at the last arrival, either the server is too slow or the
        arrivals were over too soon: with more of them, once, it is the server.
        """
        spec = sized(at_load(self._spec, load), self._typical_s)
        run = await self._measured(spec, load)
        if not _keeps_up(run) and not _is_decided(run):
            longer = sized(spec, typical_s(run.records))
            if longer.requests > spec.requests:
                await self._session.settle()
                return await self._measured(longer, load)
            if _arrivals_s(run) < SHORTEST * typical_s(run.records):
                return None
        return run

    async def _measured(self, spec: WorkloadSpec, load: float) -> Run:
        run = await self._session.measure(spec, f"probing {self._words(load)}")
        if _keeps_up(run):
            self._typical_s = typical_s(run.records)
        return run

    def _words(self, load: float) -> str:
        if self._spec.concurrency is not None:
            return f"{load:.0f} in flight"
        return f"{load:.4g}/s"


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


def at_load(spec: WorkloadSpec, load: float) -> WorkloadSpec:
    """The same requests at another load: a closed loop's concurrency, an open one's rate."""
    if spec.concurrency is not None:
        return replace(spec, concurrency=round(load))
    return replace(spec, request_rate_per_s=load)


def sized(spec: WorkloadSpec, typical_s: float) -> WorkloadSpec:
    """With as many requests as a load needs to be one; a file has those that it has.

    Args:
        typical_s: that a request takes; 0 where it is not known yet.
    """
    if spec.kind is not WorkloadKind.SYNTHETIC:
        return spec
    needed = SEATS * spec.concurrency if spec.concurrency is not None else 0
    if spec.request_rate_per_s is not None:
        needed = math.ceil(LASTS * typical_s * spec.request_rate_per_s) + 1
    most = MOST_FOLD * spec.requests
    return replace(spec, requests=max(spec.requests, min(needed, most)))


def _probe(load: float, run: Run, slo: Sequence[SloLimit]) -> RateProbe:
    """What a run says of its load; where it only waits longer, what is cut off has missed."""
    records = _judged(run)
    share = attained(records, slo) * _ended_share(run)
    if not _keeps_up(run):
        share = min(share, (1 - _backlog(run)) / (1 - BACKLOG))
    requests = run.driven.sent if _is_saturated(run) else len(records)
    return RateProbe(load, share, requests, met=share >= 1.0)


def _is_decided(run: Run) -> bool:
    """Whether the load was found to be too much before its requests had been sent."""
    return run.driven.end in (MeasureEnd.SATURATED, MeasureEnd.WORSE)


def _keeps_up(run: Run) -> bool:
    return run.concurrency is not None or _backlog(run) <= BACKLOG


def _backlog(run: Run) -> float:
    """Share of the requests of an open loop that were unanswered at the last arrival."""
    if not run.records:
        return 1.0
    last_s = max(due_s(record) for record in run.records)
    return sum(record.end_s > last_s for record in run.records) / len(run.records)


def _arrivals_s(run: Run) -> float:
    due = [due_s(record) for record in run.records]
    return max(due) - min(due) if due else 0.0


def _judged(run: Run) -> Sequence[RequestRecord]:
    """The first requests of a closed loop, which come all at once, are no part of its load."""
    return after_first_generation(run.records, run.concurrency) or run.records


def _ended_share(run: Run) -> float:
    return len(run.records) / run.driven.sent if _is_saturated(run) else 1.0


def _is_saturated(run: Run) -> bool:
    return run.driven.end is MeasureEnd.SATURATED
