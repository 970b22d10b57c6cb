"""Where the search for the highest load begins and how far it goes, without a server."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import builders
import pytest

from tuner.measuring import highest
from tuner.measuring.highest import highest_load
from tuner.measuring.session import Asked, ClientTooSlow, Driven, Run
from tuner.types import (
    ArrivalKind,
    ClientHealth,
    MeasureEnd,
    Measurement,
    MeasureSpec,
    Metric,
    ObjectiveSpec,
    Progress,
    RequestRecord,
    RequestStatus,
    SloLimit,
    SloMetric,
    WorkloadKind,
    WorkloadSpec,
)

OBJECTIVE = ObjectiveSpec(Metric.MAX_RATE, slo=(SloLimit(SloMetric.E2E, 10.0),))


@dataclass
class Probed:
    """A session on a server that always keeps up.

    Attributes:
        drivable: from which load on the client is too slow.
        capacity: up to which load the server keeps the SLO.
    """

    asked: Asked
    specs: list[WorkloadSpec]
    drivable: float = float("inf")
    capacity: float = float("inf")
    activities: list[str] = field(default_factory=list)
    told: list[Progress] = field(default_factory=list)

    def on_progress(self, progress: Progress) -> None:
        self.told.append(progress)

    async def measure(self, spec: WorkloadSpec, activity: str = "measuring") -> Run:
        self.specs.append(spec)
        self.activities.append(activity)
        load = spec.concurrency or spec.request_rate_per_s or 0.0
        if load > self.drivable:
            raise ClientTooSlow("its loop was late", 3)
        good = 500 if load <= self.capacity else 400
        records = [
            RequestRecord(n, RequestStatus.OK, float(n), n + 1.0, 8, 8, (n + 0.5, n + took_s))
            for n in range(500)
            for took_s in [1.0 if n < good else 11.0]
        ]
        driven = Driven(
            records, len(records), MeasureEnd.COMPLETE, None, ClientHealth(0.0, 0.0, 0.0)
        )
        return Run(spec.concurrency, (), None, driven, builders.measurement())

    async def settle(self) -> None:
        pass


async def probed(spec: WorkloadSpec, incumbent: float | None = None) -> list[WorkloadSpec]:
    """The loads that are tried, in this order."""
    session = Probed(Asked(spec, MeasureSpec(), OBJECTIVE, 60.0, incumbent), [])
    await highest_load(session, spec)  # type: ignore[arg-type]
    return session.specs


def replayed(tmp_path: Path, times_s: tuple[float, ...]) -> WorkloadSpec:
    path = tmp_path / "trace.csv"
    rows = (f"2024-05-12 00:00:{at_s:04.1f}Z,10,5\n" for at_s in times_s)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    return replace(
        builders.workload(),
        kind=WorkloadKind.AZURE,
        path=path,
        input_tokens=None,
        output_tokens=None,
        requests=len(times_s),
        warmup_requests=0,
        concurrency=None,
        request_rate_per_s=None,
        arrivals=ArrivalKind.TRACE,
    )


async def test_search_begins_at_the_rate_that_a_trace_was_recorded_at(tmp_path: Path) -> None:
    trace = replayed(tmp_path, (0.0, 0.5, 1.0, 1.2, 2.0))
    assert (await probed(trace))[0].request_rate_per_s == pytest.approx(2.0)
    quicker = replace(trace, speedup=3.0)
    assert (await probed(quicker))[0].request_rate_per_s == pytest.approx(6.0)


async def test_search_begins_somewhere_with_a_trace_of_one_moment(tmp_path: Path) -> None:
    assert (await probed(replayed(tmp_path, (3.0, 3.0))))[0].request_rate_per_s == 1.0


async def test_search_begins_at_the_rate_asked_for_and_at_the_incumbent_if_there_is_one() -> None:
    asked = replace(builders.workload(), concurrency=None, request_rate_per_s=4.0)
    assert (await probed(asked))[0].request_rate_per_s == 4.0
    assert (await probed(asked, incumbent=9.0))[0].request_rate_per_s == 9.0


async def test_search_tries_no_concurrency_for_which_there_are_no_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(highest, "most_connections", lambda: 50)
    asked = replace(builders.workload(), concurrency=16)
    assert [spec.concurrency for spec in await probed(asked)] == [16, 32, 50]
    too_many = replace(builders.workload(), concurrency=80)
    assert [spec.concurrency for spec in await probed(too_many)] == [50]


# --- a client that is too slow -----------------------------------------------------------


async def searched(**of: float) -> tuple[Measurement, Probed]:
    """A search from 4 a second on."""
    spec = replace(builders.workload(), concurrency=None, request_rate_per_s=4.0)
    session = Probed(Asked(spec, MeasureSpec(), OBJECTIVE, 60.0), [], **of)
    return await highest_load(session, spec), session  # type: ignore[arg-type]


def rates(session: Probed) -> list[float | None]:
    return [spec.request_rate_per_s for spec in session.specs]


async def test_load_that_the_client_cannot_drive_ends_the_climb() -> None:
    found, session = await searched(drivable=20.0)
    assert rates(session) == [4.0, 8.0, 16.0, 32.0]
    assert found.rate is not None
    assert found.rate.load == 16.0
    assert found.rate.interval.high == 32.0
    assert "32/s could not be driven" in found.rate.limited_by
    assert "its loop was late" in found.rate.limited_by
    assert [probe.load for probe in found.rate.probes] == [4.0, 8.0, 16.0]


async def test_search_begins_at_half_of_what_the_client_cannot_drive() -> None:
    found, session = await searched(drivable=3.0)
    assert rates(session) == [4.0, 2.0]
    assert found.rate is not None
    assert (found.rate.load, found.rate.interval.high) == (2.0, 4.0)


async def test_server_that_fails_below_is_what_limits() -> None:
    found, session = await searched(drivable=3.0, capacity=1.2)
    assert rates(session)[:3] == [4.0, 2.0, 1.0]
    assert found.rate is not None
    assert found.rate.limited_by == ""
    assert found.rate.load == pytest.approx(1.2, rel=0.1)
    assert found.rate.interval.high <= 2.0


async def test_search_gives_up_where_half_cannot_be_driven_either() -> None:
    with pytest.raises(ClientTooSlow):
        await searched(drivable=1.0)


async def test_search_gives_up_where_there_is_no_half() -> None:
    spec = builders.workload(concurrency=1)
    session = Probed(Asked(spec, MeasureSpec(), OBJECTIVE, 60.0), [], drivable=0.0)
    with pytest.raises(ClientTooSlow):
        await highest_load(session, spec)  # type: ignore[arg-type]
    assert [spec.concurrency for spec in session.specs] == [1]


# --- what is told meanwhile --------------------------------------------------------------


async def test_search_tells_every_probe_and_what_came_of_it() -> None:
    found, session = await searched(capacity=5.0, drivable=1000.0)
    assert session.activities[:2] == ["probing 4/s", "probing 8/s"]
    said = [progress.activity for progress in session.told]
    assert said[:2] == ["probe 1: 4/s: 100 % in the SLO", "probe 2: 8/s: 80 % in the SLO"]
    assert found.rate is not None
    assert len(said) == len(found.rate.probes)


async def test_search_tells_that_the_client_is_too_slow() -> None:
    _, session = await searched(drivable=5.0)
    assert session.told[-1].activity.startswith("8/s could not be driven: ")


async def test_search_of_a_concurrency_tells_it_in_words() -> None:
    spec = builders.workload(concurrency=16)
    session = Probed(Asked(spec, MeasureSpec(), OBJECTIVE, 60.0), [], capacity=20.0)
    await highest_load(session, spec)  # type: ignore[arg-type]
    assert session.activities[0] == "probing 16 in flight"


async def test_measurement_of_a_search_tells_the_slo_of_the_same_requests() -> None:
    found, _ = await searched(capacity=5.0)
    assert found.slo_kept == 1.0
    assert found.slo_missed == {"e2e_p99": 0}
    missed, _ = await searched(capacity=0.0)
    assert missed.slo_kept == pytest.approx(0.8, abs=0.01)
    assert missed.slo_missed == {"e2e_p99": 100}
    assert missed.slo_reached_s == {"e2e_p99": pytest.approx(11.0)}


# --- what a probe is worth -------------------------------------------------------------


@dataclass
class Queueing(Probed):
    """A server that answers one request after the other, each in the same time.

    Attributes:
        per_s: how many it answers in a second: what is sent faster waits longer and longer.
    """

    per_s: float = 10.0

    async def measure(self, spec: WorkloadSpec, activity: str = "measuring") -> Run:
        self.specs.append(spec)
        rate = spec.request_rate_per_s or 0.0
        records, free_s = [], 0.0
        for number in range(spec.requests):
            due_s = number / rate
            free_s = max(free_s, due_s) + 1 / self.per_s
            times_s = (free_s - 0.01, free_s)
            records.append(
                RequestRecord(
                    number, RequestStatus.OK, due_s, free_s, 8, 2, times_s, intended_s=due_s
                )
            )
        driven = Driven(
            records, len(records), MeasureEnd.COMPLETE, None, ClientHealth(0.0, 0.0, 0.0)
        )
        return Run(None, (), None, driven, builders.measurement())


def queueing(limit_s: float, **changes: object) -> Queueing:
    asked = replace(
        builders.workload(requests=60), concurrency=None, request_rate_per_s=5.0, **changes
    )
    objective = ObjectiveSpec(Metric.MAX_RATE, slo=(SloLimit(SloMetric.TTFT, limit_s),))
    return Queueing(Asked(asked, MeasureSpec(), objective, 60.0, None), [])


async def test_burst_that_is_over_within_the_slo_is_no_rate() -> None:
    """Sixty requests take six seconds whenever they come: any burst of them meets ten."""
    session = queueing(limit_s=10.0)
    found = await highest_load(session, session.asked.workload)  # type: ignore[arg-type]
    assert found.rate is not None
    assert 9.0 <= found.rate.load <= 13.5  # a third above is noticed at the latest
    assert found.rate.interval.high <= 40.0
    assert max(spec.requests for spec in session.specs) > 60


async def test_rate_of_a_tight_slo_is_what_the_server_answers() -> None:
    session = queueing(limit_s=0.5)
    found = await highest_load(session, session.asked.workload)  # type: ignore[arg-type]
    assert found.rate is not None
    assert 9.0 <= found.rate.load <= 11.0


async def test_load_that_a_short_file_cannot_make_ends_the_climb(tmp_path: Path) -> None:
    trace = replayed(tmp_path, tuple(n / 10 for n in range(30)))
    objective = ObjectiveSpec(Metric.MAX_RATE, slo=(SloLimit(SloMetric.TTFT, 100.0),))
    session = Queueing(Asked(trace, MeasureSpec(), objective, 60.0, None), [], per_s=4.0)
    spec = replace(trace, request_rate_per_s=2.0)
    found = await highest_load(session, spec)  # type: ignore[arg-type]
    assert found.rate is not None
    assert found.rate.load <= 5.4
    assert {s.requests for s in session.specs} == {30}


def test_closed_loop_gets_requests_for_all_of_its_seats() -> None:
    asked = replace(builders.workload(requests=40), concurrency=64)
    assert highest.sized(asked, 0.0).requests == 256
    assert highest.sized(replace(asked, concurrency=4), 0.0).requests == 40
    assert highest.sized(replace(asked, concurrency=4096), 0.0).requests == 32 * 40
