"""The benchmark of the load generator: its server, its judgement, and the client in short."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from bench.load_clients import OURS, Client, Run, Timed
from bench.load_measure import Level, judge, measure, outside
from bench.load_server import Record

LEVEL = Level(streams=32, requests=64, tokens=40, step_s=0.02)

PLAIN = """
import asyncio, json, sys

async def main(port, streams, requests):
    queue = iter(range(requests))

    async def work():
        for number in queue:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({"prompt": f"request {number} "}).encode()
            writer.write(b"POST / HTTP/1.1\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
            while not (await reader.read(1 << 16)).endswith(b"\\r\\n0\\r\\n\\r\\n"):
                pass
            writer.close()

    await asyncio.gather(*(work() for _ in range(streams)))

asyncio.run(main(*map(int, sys.argv[1:])))
"""
"""A client that only reads."""


def _plain_command(run: Run) -> list[str]:
    port = run.url.rpartition(":")[2]
    return [sys.executable, "-c", PLAIN, port, str(run.streams), str(len(run.prompts))]


def _nothing(_: Run) -> Iterator[Timed]:
    return iter(())


def test_client_costs_no_more_than_reading() -> None:
    """Processor time only, of the best of three: what the clock says of a client beside other
    tests is in the benchmark."""
    plain = Client("plain", "asyncio", _plain_command, _nothing)
    costs = []
    for _ in range(3):
        reading, ours = measure(plain, LEVEL), measure(OURS, LEVEL)
        assert ours.answers == LEVEL.requests
        assert ours.ttft_error_s.shape == (LEVEL.requests,)
        assert ours.gap_error_s.shape == (LEVEL.requests * (LEVEL.tokens - 1),)
        assert ours.cpu_us_per_token > 0
        assert ours.server_us_per_token > 0
        costs.append(ours.cpu_us_per_token / reading.cpu_us_per_token)
        if costs[-1] < 2:
            break
    assert min(costs) < 2, costs


def test_client_follows_a_server_that_never_waits() -> None:
    found = measure(OURS, Level(streams=8, requests=32, tokens=500, step_s=0.0))
    assert found.answers == 32
    assert found.gap_error_s.shape == (32 * 499,)


# --- judgement -------------------------------------------------------------------------


def record(before_s: list[float], width_s: float) -> Record:
    """One request, received at 1 s."""
    before = np.array(before_s)
    return Record(
        numbers=np.array([7]),
        received_s=np.array([1.0]),
        writer=np.zeros(len(before_s), dtype=np.int64),
        before_s=before,
        after_s=before + width_s,
        cpu_s=3e-5,
    )


SAMPLES = [(0.0, 0.0), (1.0, 1.0), (2.0, 1.5), (3.0, 9.0)]


def test_judge_measures_errors_beyond_what_the_server_knows() -> None:
    told = Timed(7, 0.25, np.array([0.4, 0.15]))
    found = judge(record([1.2, 1.5, 1.7], 0.01), [told], SAMPLES, each_token=True)
    assert found.ttft_error_s == pytest.approx([0.04])  # written 0.2 to 0.21 s after
    assert found.gap_error_s == pytest.approx([0.09, 0.04])
    assert found.server_us_per_token == pytest.approx(10.0)


def test_judge_compares_a_mean_gap_with_the_mean() -> None:
    told = Timed(7, 0.2, np.array([0.3]))
    found = judge(record([1.2, 1.5, 1.7], 0.0), [told], SAMPLES, each_token=False)
    assert found.ttft_error_s == pytest.approx([0.0])
    assert found.gap_error_s == pytest.approx([0.05])


def test_judge_counts_the_processor_from_first_request_to_last_token() -> None:
    found = judge(record([1.2, 1.5, 2.0], 0.0), [], SAMPLES, each_token=True)
    assert found.cpu_us_per_token == pytest.approx(0.5 / 3 * 1e6)
    assert found.tokens_per_s == pytest.approx(3.0)


def test_outside_is_nothing_within() -> None:
    low, high = np.array([1.0, 1.0, 1.0]), np.array([2.0, 2.0, 2.0])
    assert outside(np.array([1.5, 0.5, 4.0]), low, high).tolist() == [0.0, 0.5, 2.0]
