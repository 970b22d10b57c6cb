"""What `tuner run` refuses before anything is started."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest
from builders import workload

from tuner.commands.run import check_connections
from tuner.errors import EnvironmentProblem


@pytest.fixture(autouse=True)
def _limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 files at most, of which 128 are not for connections."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))

    def nobody(*_: object) -> None:
        raise AssertionError("the connections' pool raises the limit, and nobody else")

    monkeypatch.setattr(resource, "setrlimit", nobody)


def test_check_connections_takes_an_open_loop_of_any_length() -> None:
    check_connections(replace(workload(requests=5000), concurrency=None, request_rate_per_s=4.0))


def test_check_connections_takes_a_closed_loop_up_to_the_limit() -> None:
    check_connections(workload(requests=9000, concurrency=3968))
    check_connections(workload(requests=100, concurrency=9000))


@pytest.mark.parametrize("levels", [(), (8.0, 4000.0)])
def test_check_connections_refuses_a_closed_loop_beyond_the_limit(
    levels: tuple[float, ...],
) -> None:
    load = replace(workload(requests=9000, concurrency=8 if levels else 4000), levels=levels)
    with pytest.raises(EnvironmentProblem, match=r"4000 connections .* allows 3968") as caught:
        check_connections(load)
    assert "ulimit -Hn" in caught.value.hint
