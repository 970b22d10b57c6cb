"""Where the search for the highest load begins and how far it goes, without a server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import builders
import pytest

from tuner.measuring import highest
from tuner.measuring.highest import highest_load
from tuner.measuring.session import Asked, Driven, Run
from tuner.types import (
    ArrivalKind,
    ClientHealth,
    MeasureEnd,
    MeasureSpec,
    Metric,
    ObjectiveSpec,
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
    """A session on a server that always keeps up."""

    asked: Asked
    specs: list[WorkloadSpec]

    async def measure(self, spec: WorkloadSpec) -> Run:
        self.specs.append(spec)
        records = [
            RequestRecord(n, RequestStatus.OK, float(n), n + 1.0, 8, 8, (n + 0.5, n + 1.0))
            for n in range(500)
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
