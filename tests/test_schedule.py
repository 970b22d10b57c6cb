"""When requests of an open loop are due."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import workload

from tuner.errors import InputError
from tuner.load.schedule import schedule
from tuner.types import ArrivalKind, WorkloadKind, WorkloadSpec


def open_loop(**changes: Any) -> WorkloadSpec:
    given: dict[str, Any] = {"concurrency": None, "request_rate_per_s": 5.0, "requests": 1000}
    return replace(workload(), **(given | changes))


def due(spec: WorkloadSpec) -> list[float]:
    found = schedule(spec)
    assert found is not None
    return list(found)


def replayed(tmp_path: Path, times: list[Any], **changes: Any) -> WorkloadSpec:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{time},8,4\n" for time in times)
    path.write_text(f"timestamp,prompt_tokens,output_tokens\n{rows}")
    given: dict[str, Any] = {
        "kind": WorkloadKind.TRACE,
        "path": path,
        "input_tokens": None,
        "output_tokens": None,
        "arrivals": ArrivalKind.TRACE,
        "request_rate_per_s": None,
        "requests": len(times),
    }
    return open_loop(**(given | changes))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("requests", [2, 50, 999])
def test_schedule_has_exactly_the_rate(burstiness: float, requests: int) -> None:
    times = due(open_loop(burstiness=burstiness, requests=requests))
    assert times[0] == 0.0
    assert times[-1] == pytest.approx((requests - 1) / 5.0)
    assert times == sorted(times)


def test_schedule_of_constant_arrivals_is_even() -> None:
    assert np.diff(due(open_loop(arrivals=ArrivalKind.CONSTANT))) == pytest.approx([0.2] * 999)


@pytest.mark.parametrize(("low", "high"), [(2.0, 18.0), (18.0, 2.0), (5.0, 5.0)])
def test_schedule_of_a_ramp_changes_its_rate_evenly(low: float, high: float) -> None:
    count = 20_000
    spec = open_loop(
        arrivals=ArrivalKind.RAMP, request_rate_per_s=low, ramp_to_per_s=high, requests=count
    )
    times = np.array(due(spec))
    whole_s = 2 * (count - 1) / (low + high)
    assert times[-1] == pytest.approx(whole_s)
    counts, edges = np.histogram(times, bins=20, range=(0, whole_s))
    middles = (edges[:-1] + edges[1:]) / 2
    expected = low + (high - low) * middles / whole_s
    assert counts / (whole_s / 20) == pytest.approx(expected, rel=0.12)


def test_schedule_of_one_request_is_now() -> None:
    for kind in (ArrivalKind.POISSON, ArrivalKind.CONSTANT, ArrivalKind.RAMP):
        assert due(open_loop(arrivals=kind, ramp_to_per_s=9.0, requests=1)) == [0.0]


def test_schedule_is_the_same_in_every_round() -> None:
    assert schedule(open_loop(), 0) == schedule(open_loop(), 3)


def test_schedule_replays_recorded_times_from_the_first_on(tmp_path: Path) -> None:
    assert due(replayed(tmp_path, [100, 101.5, 104])) == [0.0, 1.5, 4.0]


def test_schedule_sorts_recorded_times(tmp_path: Path) -> None:
    assert due(replayed(tmp_path, [104, 100, 101])) == [0.0, 1.0, 4.0]


def test_schedule_replays_faster(tmp_path: Path) -> None:
    assert due(replayed(tmp_path, [100, 101.5, 104], speedup=2.0)) == [0.0, 0.75, 2.0]


def test_schedule_stretches_recorded_times_to_a_rate(tmp_path: Path) -> None:
    spec = replayed(tmp_path, [100, 101.5, 104], request_rate_per_s=4.0)
    assert due(spec) == pytest.approx([0.0, 0.1875, 0.5])


def test_schedule_of_recorded_times_that_are_all_the_same_is_at_once(tmp_path: Path) -> None:
    assert due(replayed(tmp_path, [7, 7, 7], request_rate_per_s=4.0)) == [0.0, 0.0, 0.0]


def test_schedule_of_a_trace_without_times_says_what_to_write(tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_text("prompt_tokens,output_tokens\n8,4\n9,5\n")
    spec = replayed(tmp_path, [], path=path, requests=2)
    with pytest.raises(InputError, match="does not say when") as caught:
        schedule(spec)
    assert "request_rate" in caught.value.hint


def test_schedule_puts_a_turn_without_a_time_after_the_turn_before(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(
        '{"session_id": "a", "timestamp": 1000, "input_length": 8, "output_length": 4}\n'
        '{"session_id": "b", "timestamp": 2000, "input_length": 8, "output_length": 4}\n'
        '{"session_id": "a", "delay": 500, "input_length": 8, "output_length": 4}\n'
    )
    assert due(replayed(tmp_path, [], path=path, requests=3)) == [0.0, 0.5, 1.0]
