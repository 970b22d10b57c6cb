"""One server under the workload, from the warm-up to a measurement.

The load runs and the server's counters are read meanwhile; every second it is asked whether
enough was seen (`tuner.measuring.ending`). A load that the client could not drive is driven once
more with other prompts, by several processes where one was too busy, so that no figure is the
client's own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from tuner.engine.base import Server
from tuner.errors import EnvironmentProblem
from tuner.load.client import LoadClient
from tuner.load.health import BUSY, bottleneck
from tuner.load.running import Load, Pace, RunningLoad
from tuner.load.spread import SpreadLoad, Target
from tuner.load.workload import Request, Tokenizer, Workload, mismatch
from tuner.measuring.finished import (
    CUT_OFF,
    Finished,
    figures,
    is_even,
    typical_s,
    wrong_length,
)
from tuner.measuring.judges import Judge, ScoreJudge, SloJudge, TimeJudge
from tuner.measuring.lookout import Seen
from tuner.metrics.histograms import with_clients_means
from tuner.metrics.page import Snapshot
from tuner.metrics.scrape import MetricsWatcher, Stalled
from tuner.metrics.serving import Span, whole_span
from tuner.types import (
    ClientHealth,
    MeasureEnd,
    Measurement,
    MeasureSpec,
    Metric,
    ObjectiveSpec,
    Progress,
    ProgressSink,
    RequestRecord,
    RequestStatus,
    StudySpec,
    WorkloadSpec,
)

LOOK_S = 1.0
"""From one question whether enough was seen to the next."""

PROGRESS_S = 0.25

TIMED_OUT_SHARE = 0.5
"""Requests that time out while nothing has moved for this share of their time: a hang."""

REPEATS = 2
"""How often a load is measured again as it was because the client could not drive it: a busy
moment of the machine is no reason to end a study, three in a row are."""

SETTLE_S = 15.0
"""vLLM lets go of a request whose client has left within a step or two."""


class Prepare(Protocol):
    """Makes the requests, the same in every call with the same spec and round."""

    async def __call__(
        self, tokenizer: Tokenizer, spec: WorkloadSpec, round_number: int
    ) -> Workload:
        """Prompts of different rounds differ, so that no cache of the server knows them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a measurement is for.

    Attributes:
        incumbent: the low end of the best score so far; None without one.
    """

    workload: WorkloadSpec
    measure: MeasureSpec
    objective: ObjectiveSpec
    hang_timeout_s: float
    incumbent: float | None = None

    @classmethod
    def of(cls, spec: StudySpec) -> Asked:
        """What a study asks."""
        return cls(spec.workload, spec.measure, spec.objective, spec.server.hang_timeout_s)


@dataclass(frozen=True, slots=True)
class Driven:
    """A load as it was driven.

    Attributes:
        records: by the workload's order.
        sent: requests, those included that were cut off.
        stopped_s: up to when it went on, where it was stopped; None where it ended by itself.
    """

    records: Sequence[RequestRecord]
    sent: int
    end: MeasureEnd
    stopped_s: float | None
    client: ClientHealth


@dataclass(frozen=True, slots=True)
class Run:
    """One load on the server, over.

    Attributes:
        concurrency: of a closed loop; None for an open one.
        samples: of the server's counters, from its begin to its end.
        span: its steady part; None where it has none.
    """

    concurrency: int | None
    samples: Sequence[Snapshot]
    span: Span | None
    driven: Driven
    measurement: Measurement

    @property
    def records(self) -> Sequence[RequestRecord]:
        """In the workload's order."""
        return self.driven.records


class ClientTooSlow(EnvironmentProblem):
    """The load generator set the pace, each time: what it saw is void.

    Args:
        why: at the last of the `tries`.
    """

    def __init__(self, why: str, tries: int) -> None:
        super().__init__(
            f"the load generator was the bottleneck, not the server (load tried {tries} times): "
            f"{why}",
            "Nothing was measured. Leave it a free core of its own (a server bound to the others, "
            "nothing else on the machine), or ask for less load.",
        )


class Session:
    """Measures one server; made for one life of it.

    Attributes:
        processes: that the load is spread over; grows where one is not enough.
        runs: what was measured, warm-ups not included.
    """

    def __init__(
        self,
        server: Server,
        asked: Asked,
        prepare: Prepare,
        client: LoadClient,
        on_progress: ProgressSink,
    ) -> None:
        self.asked = asked
        self.processes = 1
        self.runs: list[Run] = []
        self._server = server
        self._prepare = prepare
        self._client = client
        self.on_progress = on_progress
        self._load: Load | None = None
        self._rounds = 0
        self.watcher = MetricsWatcher(
            server.base_url, hang_after_s=asked.hang_timeout_s, in_flight=self._in_flight
        )

    async def warm_up(self) -> None:
        """Send the warm-up requests: the first answers after a start are slow."""
        workload = await self._prepare(self._client, self.asked.workload, 0)
        count = len(workload.warmup)
        concurrency = min(self.asked.workload.concurrency or count, count) or 1
        await self._drive(workload.warmup, Pace(concurrency), "warming up", judge=None)

    async def measure(self, spec: WorkloadSpec, activity: str = "measuring") -> Run:
        """Send the requests of `spec`, each in a round of its own, until enough was seen.

        Raises:
            ClientTooSlow: the client cannot drive this load: not in several processes where it
                was busy, nor at another time.
            CounterReset, ScrapeError: the server was restarted, or does not tell.
            NoMoreConnections: the load needs more than the machine has.
            Stalled: it hangs.
        """
        tries = repeats = 0
        while True:
            workload = await self._prepare(self._client, spec, self._rounds)
            self._rounds += 1
            run = await self._measured(workload, spec, activity)
            problem = _too_slow(run)
            if not problem:
                self.runs.append(run)
                return run
            tries += 1
            if run.driven.client.cpu_share >= BUSY and self.processes < most_processes():
                self.processes = min(2 * self.processes, most_processes())
            elif repeats < REPEATS:
                repeats += 1
            else:
                raise ClientTooSlow(problem, tries)
            await self.settle()

    async def _measured(self, workload: Workload, spec: WorkloadSpec, activity: str) -> Run:
        pace = Pace(spec.concurrency, workload.arrivals_s)
        await self.watcher.begin()
        judge = self._judge(spec)
        driven = await self._drive(workload.requests, pace, activity, judge)
        records = driven.records
        self._must_not_hang(records)
        requests = workload.requests
        if problem := wrong_length(records, requests) or mismatch(records, requests):
            raise WrongLength(problem)
        counters = await self.watcher.window()
        load = Finished(records, self.watcher.samples, counters, driven.end, driven.stopped_s)
        found, span = figures(
            load,
            spec,
            self.asked.objective,
            self.asked.measure,
            self._server.memory,
            self._server.device_use(),
        )
        server = with_clients_means(await self.watcher.latencies(), records)
        energy = span or whole_span(records)
        energy_j = self._server.energy_j(energy.start_s, energy.end_s)
        found = replace(found, client=driven.client, server=server, energy_j=energy_j)
        return Run(spec.concurrency, load.samples, span, driven, found)

    async def settle(self) -> None:
        """Wait until the server has let go of what was cut off, so that the next load is alone."""
        deadline_s = time.perf_counter() + SETTLE_S
        while time.perf_counter() < deadline_s:
            await asyncio.sleep(PROGRESS_S)
            samples = self.watcher.samples
            if samples and samples[-1].running + samples[-1].waiting == 0:
                return

    def _must_not_hang(self, records: Sequence[RequestRecord]) -> None:
        """Where the last requests ran out of time because the server had stopped to work.

        Raises:
            Stalled: the end of the load has cut its hang short of the time-out for hangs.
        """
        standstill = self.watcher.standstill
        limit_s = TIMED_OUT_SHARE * self.asked.workload.request_timeout_s
        timed_out = any(record.status is RequestStatus.TIMEOUT for record in records)
        if timed_out and standstill.lasted_s >= limit_s:
            raise Stalled(standstill)

    def _judge(self, spec: WorkloadSpec) -> Judge:
        if not is_even(spec):
            return TimeJudge(self.asked.measure)
        if self.asked.objective.maximize is Metric.MAX_RATE:
            return SloJudge(self.asked.objective.slo, self.asked.measure, spec.concurrency)
        return ScoreJudge(
            self.asked.measure, self.asked.objective, spec.concurrency, self.asked.incumbent
        )

    async def _drive(
        self, requests: Sequence[Request], pace: Pace, activity: str, judge: Judge | None
    ) -> Driven:
        """Send `requests`; with `judge`, stop when enough was seen."""
        async with self._loading(requests, pace) as load:
            watching = _Watching(load, self.watcher, self.on_progress, activity, len(requests))
            end = await self.watcher.guard(watching.until_enough(judge))
            records = sorted(load.records, key=lambda record: record.index)
            return Driven(records, load.sent, end, watching.stopped_s, load.health())

    @asynccontextmanager
    async def _loading(self, requests: Sequence[Request], pace: Pace) -> AsyncIterator[Load]:
        async with self._new_load(requests, pace) as load:
            self._load = load
            try:
                yield load
            finally:
                self._load = None

    def _new_load(
        self, requests: Sequence[Request], pace: Pace
    ) -> AbstractAsyncContextManager[Load]:
        if self.processes > 1:
            timeout_s = self.asked.workload.request_timeout_s
            target = Target(self._server.base_url, self._server.model_name, timeout_s)
            return SpreadLoad(target, requests, pace, self.processes)
        return RunningLoad(self._client, requests, pace)

    def _in_flight(self) -> int:
        return 0 if self._load is None else self._load.sent - len(self._load.records)


@dataclass(slots=True)
class _Watching:
    """Looks at a load until enough was seen, and tells how far it is."""

    load: Load
    watcher: MetricsWatcher
    on_progress: ProgressSink
    activity: str
    expected: int
    started_s: float = field(default_factory=time.perf_counter)
    stopped_s: float | None = None

    async def until_enough(self, judge: Judge | None) -> MeasureEnd:
        """Why the load ended."""
        end: MeasureEnd | None = None
        look_s = time.perf_counter() + LOOK_S
        while not await self.load.ended(PROGRESS_S):
            self._tell(judge)
            if judge is None or end is not None or self.load.all_sent:
                continue
            if time.perf_counter() >= look_s:
                look_s = time.perf_counter() + LOOK_S
                seen = self._seen()
                end = judge.end(seen)
                if end is not None:
                    self.load.stop()
                    self.stopped_s = seen.known_until_s
                    if end in CUT_OFF:
                        break
        self._tell(judge)
        return end or MeasureEnd.COMPLETE

    def _seen(self) -> Seen:
        now_s, load = time.perf_counter(), self.load
        return Seen(now_s, now_s - self.started_s, load.sent, load.records, self.watcher.samples)

    def _tell(self, judge: Judge | None) -> None:
        known = f", {judge.known}" if judge is not None and judge.known else ""
        detail = f"{len(self.load.records)}/{self.expected} requests{known}"
        elapsed_s = time.perf_counter() - self.started_s
        self.on_progress(Progress(self.activity, elapsed_s, detail=detail))


class WrongLength(Exception):
    """Answers or prompts are not as long as was asked for: the measurement is void."""


def _too_slow(run: Run) -> str:
    """Why it says nothing of the server; empty if the client kept up."""
    ttft_s = run.measurement.ttft_s
    return bottleneck(
        run.driven.client,
        typical_s(run.records),
        ttft_s.p99 if ttft_s is not None else None,
        whole_span(run.records).length_s,
    )


def most_processes() -> int:
    """How many processes may drive the load: the machine's cores but one, for the server."""
    return max(1, len(os.sched_getaffinity(0)) - 1)
