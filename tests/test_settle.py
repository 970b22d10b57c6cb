"""The wait before a start, on a virtual clock, with stand-ins for GPUs and host."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml, FakeProcess

from tuner.engine.settle import (
    GIVE_UP_S,
    POLL_S,
    PORT_LIMIT_S,
    Settling,
    shared_tolerance_gib,
)
from tuner.errors import EnvironmentProblem
from tuner.metrics.device import DeviceMonitor
from tuner.metrics.host import ThisHost
from tuner.types import Progress


@dataclass
class FakeHost:
    shared: tuple[float, float] | None = (0.0, 32.0)
    memory: tuple[float, float] = (8.0, 64.0)
    listening: set[int] = field(default_factory=set)

    def shared_memory_gib(self) -> tuple[float, float] | None:
        return self.shared

    def memory_gib(self) -> tuple[float, float]:
        return self.memory

    def listens(self, port: int) -> bool:
        return port in self.listening

    def shared_memory_holders(self) -> list[str]:
        return ["/dev/shm/old.mmap (9.0 GiB, mapped by no process)"]

    def memory_holders(self) -> list[str]:
        return ["process 9 (chrome, of ann, 20.0 GiB)", "process 7 (tar, of bob, 1.0 GiB)"]


class Bench:
    """A machine whose state changes at given times; nothing of it takes real time."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.now_s = 1000.0
        self.gpus = list(gpus)
        self.nvml = FakeNvml(self.gpus, has_driver=bool(gpus))
        self.device = DeviceMonitor({}, self.nvml)
        self.host = FakeHost()
        self.told: list[Progress] = []
        self.settling = Settling(self.host, clock=lambda: self.now_s, sleep=self._sleep)
        self._events: list[tuple[float, Callable[[], None]]] = []

    def after(self, delay_s: float, change: Callable[[], None]) -> None:
        self._events.append((self.now_s + delay_s, change))

    async def wait(self) -> float:
        """Returns how long it took."""
        self.told.clear()
        start_s = self.now_s
        await self.settling.wait(self.device, self.told.append)
        return self.now_s - start_s

    async def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for event in list(self._events):
            if self.now_s >= event[0]:
                event[1]()
                self._events.remove(event)


def use(gpu: FakeGpu, gib: float) -> Callable[[], None]:
    def change() -> None:
        gpu.used_gib = gib

    return change


@pytest.fixture
def gpus() -> list[FakeGpu]:
    return [FakeGpu("H100", "GPU-a", used_gib=0.5), FakeGpu("H100", "GPU-b", used_gib=30.0)]


# --- device memory ---------------------------------------------------------------------


async def test_first_wait_takes_two_readings_that_agree_as_what_others_use(
    gpus: list[FakeGpu],
) -> None:
    bench = Bench(*gpus)
    assert await bench.wait() == POLL_S
    assert await bench.wait() == POLL_S
    assert bench.told == []


async def test_first_wait_outlasts_memory_that_is_still_being_freed(gpus: list[FakeGpu]) -> None:
    bench = Bench(*gpus)
    gpus[0].used_gib = 40.0
    for second in range(4):
        for part in range(4):
            bench.after(second + part / 4, use(gpus[0], 40.0 - 10 * second - 2 * part))
    bench.after(4, use(gpus[0], 0.5))
    assert 4 <= await bench.wait() <= 4 + 2 * POLL_S
    gpus[0].used_gib = 1.0
    with pytest.raises(EnvironmentProblem, match=r"GPU 0 still holds 0\.5 GiB"):
        await bench.wait()


async def test_first_wait_does_not_wait_for_ever_for_others_at_work(gpus: list[FakeGpu]) -> None:
    bench = Bench(*gpus)
    for step in range(1000):
        bench.after(step * POLL_S, use(gpus[1], 30.0 + step % 2))
    assert await bench.wait() == 15.0


async def test_wait_says_what_for_until_it_is_free_and_steady(gpus: list[FakeGpu]) -> None:
    bench = Bench(*gpus)
    await bench.wait()
    gpus[0].used_gib = 3.7
    gpus[0].processes = [FakeProcess(os.getpid(), 3 * GIB), FakeProcess(2**22 + 1, GIB)]
    bench.after(3.0, use(gpus[0], 0.7))  # within the tolerance
    assert await bench.wait() == 3.0 + POLL_S
    assert {progress.activity for progress in bench.told} == {"waiting for device memory"}
    assert [progress.total_s for progress in bench.told] == [GIVE_UP_S] * 12
    assert bench.told[0].detail == (
        f"GPU 0 still holds 3.2 GiB (process {os.getpid()} ({psutil.Process().name()}, "
        f"of {psutil.Process().username()}, 3.0 GiB) and others)"
    )
    assert [progress.elapsed_s for progress in bench.told[:3]] == [0.0, POLL_S, 2 * POLL_S]


async def test_wait_gives_up_and_names_who_holds_the_memory(gpus: list[FakeGpu]) -> None:
    bench = Bench(*gpus)
    await bench.wait()
    gpus[1].used_gib = 40.0
    gpus[1].processes = [FakeProcess(2**22 + 1, 10 * GIB)]
    with pytest.raises(EnvironmentProblem) as caught:
        await bench.wait()
    assert caught.value.message == (
        "GPU 1 still holds 10.0 GiB, 60 s after the last server has ended, in use by "
        f"process {2**22 + 1} (of another container or user, 10.0 GiB)"
    )
    assert "the study continues" in caught.value.hint
    assert "nvidia-smi" in caught.value.hint


async def test_wait_that_gives_up_says_when_nobody_is_seen(gpus: list[FakeGpu]) -> None:
    bench = Bench(*gpus)
    await bench.wait()
    gpus[0].used_gib = 1.0
    with pytest.raises(EnvironmentProblem, match="no process that can be seen from here"):
        await bench.wait()


async def test_wait_ignores_less_memory_in_use_than_at_first(gpus: list[FakeGpu]) -> None:
    bench = Bench(*gpus)
    await bench.wait()
    gpus[1].used_gib = 0.0
    assert await bench.wait() == POLL_S
    gpus[1].used_gib = 30.2
    assert await bench.wait() == POLL_S


async def test_wait_of_a_lost_device_is_a_problem_of_the_environment(gpus: list[FakeGpu]) -> None:
    bench = Bench(*gpus)
    await bench.wait()
    bench.nvml.is_lost = True
    with pytest.raises(EnvironmentProblem, match="GPU is lost"):
        await bench.wait()


async def test_wait_knows_each_choice_of_devices_by_itself(gpus: list[FakeGpu]) -> None:
    bench = Bench(*gpus)
    await bench.wait()
    gpus[1].used_gib = 60.0
    bench.device = DeviceMonitor({"CUDA_VISIBLE_DEVICES": "0"}, bench.nvml)
    assert await bench.wait() == POLL_S
    assert await bench.wait() == POLL_S


# --- shared and host memory ------------------------------------------------------------


async def test_wait_without_gpus_takes_no_time_where_nothing_is_missing() -> None:
    bench = Bench()
    assert [await bench.wait() for _ in range(3)] == [0.0, 0.0, 0.0]


async def test_wait_for_shared_memory() -> None:
    bench = Bench()
    await bench.wait()
    bench.host.shared = (9.0, 32.0)
    bench.after(2.0, lambda: setattr(bench.host, "shared", (0.5, 32.0)))
    assert await bench.wait() == 2.0
    assert bench.told[0].activity == "waiting for shared memory"
    assert bench.told[0].detail == (
        "/dev/shm still holds 9.0 GiB more than at first "
        "(/dev/shm/old.mmap (9.0 GiB, mapped by no process))"
    )


async def test_wait_gives_up_on_shared_memory_and_names_the_files(gpus: list[FakeGpu]) -> None:
    bench = Bench(*gpus)
    await bench.wait()
    bench.host.shared = (9.0, 32.0)
    with pytest.raises(EnvironmentProblem, match=r"in use by /dev/shm/old\.mmap \(9\.0 GiB"):
        await bench.wait()


async def test_wait_for_host_memory_without_gpus() -> None:
    bench = Bench()
    await bench.wait()
    bench.host.memory = (30.0, 64.0)
    with pytest.raises(EnvironmentProblem, match=r"22\.0 GiB more than .*chrome, of ann"):
        await bench.wait()
    assert bench.told[0].activity == "waiting for host memory"
    bench.host.memory = (20.0, 64.0)  # others may come to use a quarter of it
    assert await bench.wait() == 0.0


async def test_wait_with_gpus_does_not_look_at_host_memory(gpus: list[FakeGpu]) -> None:
    bench = Bench(*gpus)
    await bench.wait()
    bench.host.memory = (60.0, 64.0)
    assert await bench.wait() == POLL_S


async def test_wait_works_without_shared_memory() -> None:
    bench = Bench()
    bench.host.shared = None
    assert [await bench.wait() for _ in range(2)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("total_gib", "tolerance_gib"), [(64 / 1024, 0.016), (2.0, 0.1), (16.0, 0.8), (500.0, 1.0)]
)
def test_tolerance_of_shared_memory_goes_with_its_size(
    total_gib: float, tolerance_gib: float
) -> None:
    assert shared_tolerance_gib(total_gib) == pytest.approx(tolerance_gib)


# --- the port --------------------------------------------------------------------------


async def test_wait_for_the_last_port() -> None:
    bench = Bench()
    await bench.wait()
    bench.settling.last_port = 4711
    bench.host.listening = {4711}
    bench.after(1.0, bench.host.listening.clear)
    assert await bench.wait() == 1.0
    assert bench.told[0].activity == "waiting for the port"
    assert bench.told[0].detail == "somebody still listens at port 4711"


async def test_wait_for_the_last_port_is_short_for_the_next_server_has_another() -> None:
    bench = Bench()
    await bench.wait()
    bench.settling.last_port = 4711
    bench.host.listening = {4711}
    assert await bench.wait() == PORT_LIMIT_S


async def test_memory_behind_a_taken_port_is_still_waited_for(gpus: list[FakeGpu]) -> None:
    """As of a server that runs in a container of its own."""
    bench = Bench(*gpus)
    await bench.wait()
    bench.settling.last_port = 4711
    bench.host.listening = {4711}
    gpus[0].used_gib = 70.0
    bench.after(30.0, use(gpus[0], 0.5))
    assert await bench.wait() == 30.0 + POLL_S


# --- this machine ----------------------------------------------------------------------


@pytest.fixture
def shared_file() -> Iterator[Path]:
    path = Path(f"/dev/shm/psm_test_settle_{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="has no /dev/shm")
def test_this_host_sees_shared_memory_and_who_has_it(shared_file: Path) -> None:
    host = ThisHost()
    before = host.shared_memory_gib()
    assert before is not None
    with shared_file.open("w+b") as file:
        file.write(b"x" * (16 << 20))
        file.flush()
        with mmap.mmap(file.fileno(), 16 << 20):
            after = host.shared_memory_gib()
            named = [text for text in host.shared_memory_holders() if str(shared_file) in text]
    assert after is not None
    assert after[1] == before[1]
    assert after[0] - before[0] > 0.01
    assert all(f"process {os.getpid()} (" in text for text in named)


def test_this_host_sees_memory_and_who_has_it() -> None:
    used_gib, total_gib = ThisHost().memory_gib()
    assert 0 < used_gib < total_gib
    holders = ThisHost().memory_holders()
    assert 1 <= len(holders) <= 3
    assert all(text.startswith("process ") and text.endswith(" GiB)") for text in holders)


def test_this_host_sees_who_listens() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not ThisHost().listens(port)
        server.listen()
        assert ThisHost().listens(port)
    assert not ThisHost().listens(port)
