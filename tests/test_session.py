"""Measurements of a server on the stand-in: why they end, and what they then say."""

from __future__ import annotations

import errno
import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import builders
import pytest
from stand_in import StandIn

from tuner.errors import InputError
from tuner.load.health import bottleneck
from tuner.load.prepared import PreparedWorkloads
from tuner.measuring import session, window
from tuner.measuring.kept import REQUESTS_FILE, SERVER_FILE, keep, read_requests, read_server
from tuner.measuring.session import Asked, ClientTooSlow, Run, WrongLength
from tuner.measuring.under_load import Measured, measure
from tuner.metrics.latency import due_s
from tuner.types import (
    ArrivalKind,
    ClientHealth,
    DeviceUse,
    LengthSpec,
    MeasureEnd,
    MeasureSpec,
    MemoryFacts,
    Metric,
    ObjectiveSpec,
    Percentiles,
    Progress,
    RequestRecord,
    RequestStatus,
    SloLimit,
    SloMetric,
    WorkloadSpec,
)

SEATS = 8
"""Sequences that the server runs at a time; what comes on top of them waits."""

LOAD = replace(
    builders.workload(requests=4000, concurrency=SEATS),
    output_tokens=LengthSpec(16, 4, 8, 24),
    warmup_requests=8,
)
ROUGH = MeasureSpec(precision=0.15)
WHOLE = MeasureSpec(precision=0.0, stop_worse=False)

POWER_W = 350.0


@dataclass
class Served:
    """A `Server` for the session: one that runs already."""

    base_url: str
    model_name: str = "tiny"
    memory: MemoryFacts = field(default_factory=MemoryFacts)

    def device_use(self) -> DeviceUse:
        return DeviceUse()

    def energy_j(self, start_s: float, end_s: float) -> float | None:
        return POWER_W * (end_s - start_s)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    flags = ("--max-model-len", "512", "--kv-cache-memory-bytes", "16M")
    with StandIn(*flags, "--max-num-seqs", str(SEATS), SIMULATED_SPEED="10") as running:
        running.ready()
        yield Served(f"http://127.0.0.1:{running.port}")


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LOOK_S", 0.1)
    monkeypatch.setattr(session, "PROGRESS_S", 0.05)
    monkeypatch.setattr(window, "SHORTEST_BLOCK_S", 0.1)
    # The stand-in's requests take some ten milliseconds: beside other tests the client's loop is
    # late by more than that in most loads, which is not what these tests are about.
    monkeypatch.setattr(session, "bottleneck", lambda *_: "")


PREPARED = PreparedWorkloads()


async def measured(
    server: Served,
    load: WorkloadSpec = LOAD,
    spec: MeasureSpec = ROUGH,
    objective: ObjectiveSpec | None = None,
    *,
    incumbent: float | None = None,
    told: list[Progress] | None = None,
) -> Measured:
    asked = Asked(load, spec, objective or ObjectiveSpec(), 60.0, incumbent)
    tell = told.append if told is not None else lambda _: None
    return await measure(server, asked, PREPARED, tell)  # type: ignore[arg-type]


# --- why it ends ---------------------------------------------------------------------------


async def test_precise_measurement_ends_early_and_agrees_with_a_whole_one(server: Served) -> None:
    told: list[Progress] = []
    found = (await measured(server, told=told)).measurement
    assert found.end is MeasureEnd.PRECISE
    assert found.offered == found.served < LOAD.requests
    assert found.steady
    assert found.interval is not None
    assert found.interval.half_width < 0.25
    assert found.blocks >= window.FEWEST_BLOCKS
    whole = (await measured(server, replace(LOAD, requests=400), WHOLE)).measurement
    assert (whole.end, whole.offered) == (MeasureEnd.COMPLETE, 400)
    ratio = found.output_throughput_tokens_per_s / whole.output_throughput_tokens_per_s
    assert 0.6 < ratio < 1.6
    details = [progress.detail for progress in told if progress.activity == "measuring"]
    assert details[0].endswith(f"/{LOAD.requests} requests")
    assert "requests, score " in details[-1]
    assert "±" in details[-1]
    assert {progress.activity for progress in told} == {"warming up", "measuring"}


async def test_server_far_below_the_incumbent_is_given_up(server: Served) -> None:
    spec = replace(ROUGH, precision=0.0)
    given_up = await measured(server, spec=spec, incumbent=1e9)
    found, (run,) = given_up.measurement, given_up.runs
    assert found.end is MeasureEnd.WORSE
    assert found.offered < LOAD.requests
    assert found.interval is not None
    assert found.interval.high < 1e9
    # What was cut off has no record, and is not missing from the figure.
    assert len(run.records) < run.driven.sent <= len(run.records) + SEATS
    assert run.span is not None
    ended = sum(record.output_tokens for record in run.records if record.end_s in run.span)
    assert found.output_throughput_tokens_per_s * found.window_s > 0.5 * ended > 0


async def test_server_above_the_incumbent_is_not_given_up(server: Served) -> None:
    found = (await measured(server, incumbent=1.0)).measurement
    assert found.end is MeasureEnd.PRECISE


async def test_open_loop_above_the_capacity_ends_as_saturated(server: Served) -> None:
    load = replace(LOAD, concurrency=None, request_rate_per_s=800.0)
    found = await measured(server, load, replace(WHOLE))
    assert found.measurement.end is MeasureEnd.SATURATED
    (run,) = found.runs
    assert run.driven.sent > len(run.records)
    assert found.measurement.output_throughput_tokens_per_s < 800 * 16


async def test_goodput_is_measured_on_while_the_queue_grows(server: Served) -> None:
    """It falls while it does: a figure of the beginning would be too good."""
    load = replace(LOAD, concurrency=None, request_rate_per_s=800.0)
    slo = (SloLimit(SloMetric.TTFT, 0.05),)
    spec = replace(WHOLE, time_s=1.5)
    found = (await measured(server, load, spec, ObjectiveSpec(Metric.GOODPUT, slo=slo))).measurement
    assert found.end is MeasureEnd.TIME
    assert found.goodput_per_s is not None
    assert found.goodput_per_s < found.request_throughput_per_s


async def test_longest_time_ends_it(server: Served) -> None:
    found = await measured(server, spec=replace(WHOLE, time_s=1.0))
    assert found.measurement.end is MeasureEnd.TIME
    (run,) = found.runs
    assert max(r.end_s for r in run.records) - min(r.send_s for r in run.records) < 5.0
    assert len(run.records) <= run.driven.sent <= len(run.records) + SEATS
    assert run.driven.sent < LOAD.requests


async def test_ramp_is_measured_as_a_whole(server: Served) -> None:
    load = replace(
        LOAD,
        requests=60,
        concurrency=None,
        request_rate_per_s=20.0,
        arrivals=ArrivalKind.RAMP,
        ramp_to_per_s=60.0,
    )
    found = (await measured(server, load, incumbent=1e9)).measurement
    assert (found.end, found.offered) == (MeasureEnd.COMPLETE, 60)
    assert not found.steady
    assert found.interval is None


async def test_counters_are_those_of_the_window(server: Served) -> None:
    """The ramp-up is in none of them, to the precision of the readings."""
    found = (await measured(server, replace(LOAD, requests=600), WHOLE)).measurement
    assert found.steady
    tokens = found.output_throughput_tokens_per_s * found.window_s
    slack = 0.3 * found.output_throughput_tokens_per_s + 0.05 * tokens
    assert abs(found.counters.generation_tokens - tokens) < slack


# --- several loads -------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [600, 16])
async def test_energy_is_that_of_the_window(server: Served, requests: int) -> None:
    found = (await measured(server, replace(LOAD, requests=requests), WHOLE)).measurement
    assert found.steady is (requests == 600)
    assert found.energy_j == pytest.approx(POWER_W * found.window_s)


def most_at_once(records: Sequence[RequestRecord]) -> int:
    ends = [(record.end_s, -1) for record in records]
    steps = sorted([*ends, *((record.send_s, 1) for record in records)])
    return max(accumulate(step for _, step in steps))


async def test_levels_are_measured_one_after_another(server: Served) -> None:
    load = replace(LOAD, requests=60, levels=(1.0, 6.0))
    result = await measured(server, load, WHOLE)
    one, six = result.measurement.levels
    assert one.offered == six.offered == 60
    assert [most_at_once(run.records) for run in result.runs] == [1, 6]
    first, second = result.runs
    assert max(r.end_s for r in first.records) < min(r.send_s for r in second.records)
    assert replace(result.measurement, levels=()) == six


async def test_highest_concurrency_is_where_requests_begin_to_wait(server: Served) -> None:
    """A ninth request waits for as long as one takes."""
    load = replace(LOAD, requests=120, concurrency=3, output_tokens=LengthSpec(64))
    alone = await measured(server, replace(load, concurrency=SEATS, requests=60), WHOLE)
    request_s = alone.measurement.e2e_s.p50  # type: ignore[union-attr]
    slo = (SloLimit(SloMetric.TTFT, 0.5 * request_s, percentile=80.0),)
    told: list[Progress] = []
    objective = ObjectiveSpec(Metric.MAX_RATE, slo=slo)
    result = await measured(server, load, ROUGH, objective, told=told)
    rate = result.measurement.rate
    assert rate is not None
    assert SEATS - 2 <= rate.load <= SEATS + 5
    assert rate.interval.low <= rate.load <= rate.interval.high
    assert len(result.runs) == len(rate.probes)
    assert [probe.load for probe in rate.probes][:2] == [3.0, 6.0]
    running = {one.activity for one in told if one.detail.endswith("requests")}
    assert {"probing 3 in flight", "probing 6 in flight"} <= running


async def test_highest_rate_is_near_the_capacity(server: Served) -> None:
    load = replace(LOAD, requests=100, output_tokens=LengthSpec(64))
    busy = (await measured(server, load, WHOLE)).measurement
    capacity_per_s = busy.request_throughput_per_s
    slo = (SloLimit(SloMetric.TTFT, busy.e2e_s.p50, percentile=90.0),)  # type: ignore[union-attr]
    open_load = replace(load, concurrency=None, request_rate_per_s=0.5 * capacity_per_s)
    found = await measured(server, open_load, ROUGH, ObjectiveSpec(Metric.MAX_RATE, slo=slo))
    rate = found.measurement.rate
    assert rate is not None
    assert 0.4 * capacity_per_s < rate.load < 1.3 * capacity_per_s
    assert found.measurement.interval is None


# --- what voids it -------------------------------------------------------------------------


async def test_answers_of_the_wrong_length_void_it(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "wrong_length", lambda *_: "answers have 3 tokens")
    with pytest.raises(WrongLength, match="answers have 3 tokens"):
        await measured(server, replace(LOAD, requests=8), WHOLE)


async def test_prompts_of_the_wrong_length_void_it(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "mismatch", lambda *_: "one of 16 tokens was counted as 9")
    with pytest.raises(WrongLength, match="one of 16 tokens was counted as 9"):
        await measured(server, replace(LOAD, requests=8), WHOLE)


def _too_busy_alone(client: ClientHealth, *_: float | None) -> str:
    return "it had no time left" if client.processes == 1 else ""


class Hiccups:
    """A client that is late in the first `count` loads."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.loads_s: list[float] = []

    def __call__(
        self, client: ClientHealth, request_s: float, ttft_s: float | None, load_s: float
    ) -> str:
        self.loads_s.append(load_s)
        self.left -= 1
        return "it was late" if self.left >= 0 else ""


@pytest.mark.parametrize(
    ("client", "seconds", "why"),
    [
        (ClientHealth(0.0, 0.0, 1.0), 3.0, "was busy 100%"),
        (ClientHealth(0.0, 0.0, 1.0), 1.0, ""),  # mostly its start
        (ClientHealth(0.0, 0.12, 0.1), 3.0, "sent up to 120 ms late"),  # of a TTFT of 20 ms
    ],
)
def test_load_is_judged_by_its_client_its_requests_and_its_length(
    monkeypatch: pytest.MonkeyPatch, client: ClientHealth, seconds: float, why: str
) -> None:
    monkeypatch.setattr(session, "bottleneck", bottleneck)
    records = [
        RequestRecord(n, RequestStatus.OK, n * seconds / 9, (n + 1) * seconds / 9) for n in range(9)
    ]
    ttft_s = Percentiles(0.02, 0.02, 0.02, 0.02)
    driven = session.Driven(records, 9, MeasureEnd.COMPLETE, None, client)
    run = session.Run(8, (), None, driven, replace(builders.measurement(), ttft_s=ttft_s))
    told = session._too_slow(run)
    assert (why in told) if why else told == ""


@pytest.mark.parametrize("busy", [0.0, 2.0])
async def test_client_that_is_always_late_voids_it_after_some_tries(
    server: Served, monkeypatch: pytest.MonkeyPatch, busy: float
) -> None:
    hiccups = Hiccups(99)
    monkeypatch.setattr(session, "bottleneck", hiccups)
    monkeypatch.setattr(session, "BUSY", busy)
    monkeypatch.setattr(session, "most_processes", lambda: 1)
    with pytest.raises(ClientTooSlow, match=r"\(load tried 3 times\): it was late"):
        await measured(server, replace(LOAD, requests=16), WHOLE)
    assert len(hiccups.loads_s) == 1 + session.REPEATS
    assert all(0 < load_s < 60 for load_s in hiccups.loads_s)


async def test_hiccup_of_the_machine_costs_a_load_and_no_more(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "bottleneck", Hiccups(session.REPEATS))
    monkeypatch.setattr(session, "BUSY", 2.0)  # late, but not busy
    found = await measured(server, replace(LOAD, requests=16), WHOLE)
    assert found.measurement.served == 16
    assert found.measurement.client is not None
    assert found.measurement.client.processes == 1
    assert len(found.runs) == 1


async def test_load_too_much_for_one_process_is_driven_by_two(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "bottleneck", _too_busy_alone)
    monkeypatch.setattr(session, "most_processes", lambda: 2)
    monkeypatch.setattr(session, "BUSY", 0.0)
    found = await measured(server, replace(LOAD, requests=64), WHOLE)
    assert found.measurement.client is not None
    assert found.measurement.client.processes == 2
    assert found.measurement.served == 64
    assert len(found.runs) == 1  # the first one is void


# --- what is kept --------------------------------------------------------------------------


def _shifted(record: RequestRecord, by_s: float) -> Sequence[float]:
    return [at_s + by_s for at_s in (record.send_s, record.end_s, *record.token_times_s)]


async def test_kept_requests_are_read_as_they_were(server: Served, tmp_path: Path) -> None:
    load = replace(
        LOAD, requests=20, concurrency=None, request_rate_per_s=100.0, levels=(100.0, 200.0)
    )
    runs = (await measured(server, load, WHOLE)).runs
    keep(tmp_path, runs)
    kept = list(read_requests(tmp_path))
    assert [request.run for request in kept] == [0] * 20 + [1] * 20
    for number, run in enumerate(runs):
        start_s = min(record.send_s for record in run.records)
        for record, back in zip(run.records, kept[20 * number :], strict=False):
            assert _shifted(back.record, start_s) == pytest.approx(_shifted(record, 0.0), abs=2e-6)
            assert due_s(back.record) + start_s == pytest.approx(due_s(record), abs=2e-6)
            times = {"send_s": 0.0, "end_s": 0.0, "token_times_s": (), "intended_s": None}
            assert replace(back.record, **times) == replace(record, **times)  # type: ignore[arg-type]
    looks = list(read_server(tmp_path))
    assert [look.run for look in looks] == [n for n, run in enumerate(runs) for _ in run.samples]
    for number, run in enumerate(runs):
        start_s = min(record.send_s for record in run.records)
        of_run = [look for look in looks if look.run == number]
        for sample, look in zip(run.samples, of_run, strict=True):
            assert look.at_s == pytest.approx(sample.at_s - start_s, abs=2e-6)
            assert (look.running, look.waiting) == (sample.running, sample.waiting)
            assert look.kv_cache_usage == sample.kv_usage_mean
    assert looks[-1].generation_tokens > looks[0].generation_tokens > 0
    assert looks[-1].preemptions == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([REQUESTS_FILE, SERVER_FILE])
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o600}


def one_run(error: str = "") -> Run:
    record = RequestRecord(0, RequestStatus.TIMEOUT, 1.0, 2.0, error=error)
    driven = session.Driven([record], 1, MeasureEnd.COMPLETE, None, ClientHealth(0.0, 0.0, 0.0))
    return Run(1, (), None, driven, builders.measurement())


def test_kept_files_are_their_owners_alone_and_errors_are_masked(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl.part").touch(0o644)  # a killed run's
    (tmp_path / REQUESTS_FILE).touch(0o644)
    keep(tmp_path, [one_run("refused: Authorization: Bearer hf_abcdefghijklmnopqrstuvwxyz0123")])
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        REQUESTS_FILE: 0o600,
        SERVER_FILE: 0o600,
    }
    (kept,) = read_requests(tmp_path)
    assert "refused" in kept.record.error
    assert "hf_abc" not in kept.record.error


def test_keep_on_a_full_disk_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tuner.measuring.kept.redact_text", full)
    with pytest.raises(OSError, match="No space"):
        keep(tmp_path, [one_run()])
    assert list(tmp_path.iterdir()) == []


def test_requests_of_a_trial_without_any_are_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        list(read_requests(tmp_path))
    with pytest.raises(InputError, match="no such file"):
        list(read_server(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b"no json\n"),
        gzip.compress(b'{"run": 0}\n'),
        gzip.compress(b"[]\n"),
        gzip.compress(b'{"run": 0}\n' * 1000)[:-20],
    ],
)
def test_damaged_files_are_an_input_error(tmp_path: Path, content: bytes) -> None:
    for name, read in ((REQUESTS_FILE, read_requests), (SERVER_FILE, read_server)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="cannot be read"):
            list(read(tmp_path))
