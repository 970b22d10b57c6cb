"""When bytes arrived, whoever was late to read them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tuner.load import arrivals as arrivals_module
from tuner.load.arrivals import Arrivals


class Taken:
    """A reader that keeps what it is given."""

    def __init__(self) -> None:
        self.parts: list[tuple[bytes, float]] = []
        self.problem: OSError | None = None

    def take(self, data: bytes, arrival_s: float) -> None:
        self.parts.append((data, arrival_s))

    def broke(self, problem: OSError) -> None:
        self.problem = problem


async def until(condition: object, limit_s: float = 5.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@contextmanager
def watching() -> Iterator[tuple[Arrivals, Taken, socket.socket]]:
    """Arrivals at one end of a TCP connection, and its other end."""
    arrivals, taken = Arrivals(), Taken()
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    near.setblocking(False)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    arrivals.watch(near, taken)
    try:
        with near, far:
            yield arrivals, taken, far
    finally:
        arrivals.close()


async def test_arrivals_hands_over_what_came_and_then_the_end() -> None:
    with watching() as (_, taken, far):
        far.send(b"one")
        await until(lambda: taken.parts)
        far.send(b"two")
        await until(lambda: len(taken.parts) == 2)
        far.close()
        await until(lambda: len(taken.parts) > 2)
    assert [data for data, _ in taken.parts[:3]] == [b"one", b"two", b""]


async def test_arrivals_tells_when_bytes_came_and_not_when_they_were_read() -> None:
    with watching() as (_, taken, far):
        far.send(b"first")  # the kernel's clock starts with a packet or two
        await until(lambda: taken.parts)
        before_s = time.perf_counter()
        far.send(b"token")
        after_s = time.perf_counter()
        time.sleep(0.05)  # noqa: ASYNC251 - the event loop is busy elsewhere
        await until(lambda: len(taken.parts) == 2)
    _, arrival_s = taken.parts[1]
    assert before_s - 0.001 < arrival_s < after_s + 0.03


async def test_arrivals_takes_the_time_of_reading_where_the_kernel_tells_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrivals_module, "_SO_TIMESTAMPNS", 9999)  # no such option
    with watching() as (_, taken, far):
        far.send(b"token")
        time.sleep(0.05)  # noqa: ASYNC251 - the event loop is busy elsewhere
        read_s = time.perf_counter()
        await until(lambda: taken.parts)
    assert taken.parts[0][1] >= read_s


async def test_arrivals_does_not_trust_stamps_across_a_set_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shift_s = 0.0
    wall = time.time
    monkeypatch.setattr(arrivals_module.time, "time", lambda: wall() + shift_s)
    with watching() as (_, taken, far):
        far.send(b"first")
        await until(lambda: taken.parts)
        shift_s = 3600.0
        sent_s = time.perf_counter()
        far.send(b"token")
        await until(lambda: len(taken.parts) == 2)
    assert sent_s <= taken.parts[1][1] <= time.perf_counter()


async def test_arrivals_loses_nothing_in_its_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals_module, "SHORTEST_PAUSE_S", 0.0)
    monkeypatch.setattr(arrivals_module, "PAUSE_PART", 10.0)
    with watching() as (_, taken, far):
        for number in range(200):
            far.send(b"%04d" % number)
            await asyncio.sleep(0.0005)
        await until(lambda: sum(len(data) for data, _ in taken.parts) == 800)
    assert b"".join(data for data, _ in taken.parts) == b"".join(b"%04d" % n for n in range(200))
    assert len(taken.parts) < 190  # there were pauses
    times_s = [arrival_s for _, arrival_s in taken.parts]
    assert times_s == sorted(times_s)


async def test_arrivals_reads_no_more_of_what_is_forgotten() -> None:
    arrivals, taken = Arrivals(), Taken()
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        arrivals.watch(near, taken)
        far.send(b"one")
        await until(lambda: taken.parts)
        arrivals.forget(near)
        arrivals.forget(near)  # no matter
        far.send(b"two")
        await asyncio.sleep(0.05)
    arrivals.close()
    assert [data for data, _ in taken.parts] == [b"one"]


async def test_arrivals_tells_of_a_reset() -> None:
    with watching() as (_, taken, far):
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        far.close()
        await until(lambda: taken.problem)
    assert isinstance(taken.problem, ConnectionResetError)
