"""GPU memory with a stand-in for NVML, host memory with this process."""

from __future__ import annotations

import os
import time

import psutil
import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml, FakeProcess

from tuner.errors import EnvironmentProblem
from tuner.metrics.device import DeviceMonitor, host_memory_gib
from tuner.metrics.energy import EnergyMeter
from tuner.types import DeviceUse


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml(
        [
            FakeGpu("A", "GPU-aaaa-1", total_gib=80),
            FakeGpu("B", "GPU-bbbb-1", total_gib=40),
            FakeGpu("C", "GPU-bbbb-2", total_gib=24),
        ],
        parts=[FakeGpu("A MIG 1g.10gb", "MIG-cccc", total_gib=10)],
    )


# --- which devices ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("A", "B", "C")),
        ("0,1,2", ("A", "B", "C")),
        ("2, 0", ("C", "A")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,7,0", ("B",)),
        ("GPU-bbbb-2,0", ("C", "A")),
        ("GPU-a", ("A",)),
        ("GPU-bbbb", ()),
        ("MIG-cccc", ("A MIG 1g.10gb",)),
        ("MIG-none", ()),
    ],
)
def test_monitor_sees_the_devices_that_cuda_would(
    nvml: FakeNvml, visible: str | None, names: tuple[str, ...]
) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert DeviceMonitor(env, nvml).names == names


def test_monitor_takes_the_own_environment_by_default(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert DeviceMonitor(nvml=nvml).names == ("B",)


def test_monitor_without_a_driver_is_empty(nvml: FakeNvml) -> None:
    nvml.has_driver = False
    monitor = DeviceMonitor({}, nvml)
    monitor.sample()
    assert monitor.memory_used_gib() == ()
    assert monitor.use() == DeviceUse()


def test_monitor_leaves_out_devices_without_memory_of_their_own(nvml: FakeNvml) -> None:
    nvml.is_lost = True
    assert DeviceMonitor({}, nvml).use() == DeviceUse()


def test_monitor_works_with_the_real_nvml_module_whatever_is_here() -> None:
    monitor = DeviceMonitor()
    monitor.sample()
    use = monitor.use()
    assert len(use.device_names) == len(use.device_total_gib) == len(use.device_peak_gib)
    for index in range(len(use.device_names)):
        monitor.holders(index)


# --- memory ----------------------------------------------------------------------------


def test_sample_keeps_the_peaks_of_each_device(nvml: FakeNvml) -> None:
    monitor = DeviceMonitor({"CUDA_VISIBLE_DEVICES": "0,2"}, nvml)
    for first, second in [(1.0, 20.0), (70.5, 3.0), (2.0, 4.0)]:
        nvml.gpus[0].used_gib, nvml.gpus[2].used_gib = first, second
        monitor.sample()
    assert monitor.memory_used_gib() == (2.0, 4.0)
    assert monitor.use() == DeviceUse(("A", "C"), (80.0, 24.0), (70.5, 20.0), None)
    monitor.reset()
    monitor.sample([psutil.Process()])
    use = monitor.use()
    assert use.device_peak_gib == (2.0, 4.0)
    assert use.host_peak_gib is not None


def test_sample_keeps_the_host_peak_when_the_processes_are_gone(nvml: FakeNvml) -> None:
    monitor = DeviceMonitor({}, nvml)
    monitor.sample([psutil.Process()])
    peak = monitor.use().host_peak_gib
    monitor.sample([])
    assert peak is not None
    assert peak > 0
    assert monitor.use().host_peak_gib == peak


def test_sample_of_a_lost_device_is_a_problem_of_the_environment(nvml: FakeNvml) -> None:
    monitor = DeviceMonitor({}, nvml)
    nvml.is_lost = True
    with pytest.raises(EnvironmentProblem, match="GPU is lost"):
        monitor.sample()


def test_holders_names_who_holds_memory_the_largest_first(nvml: FakeNvml) -> None:
    me = psutil.Process()
    nvml.gpus[1].processes = [
        FakeProcess(2**22 + 1, None),
        FakeProcess(os.getpid(), int(9.5 * GIB)),
    ]
    monitor = DeviceMonitor({}, nvml)
    assert [str(holder) for holder in monitor.holders(1)] == [
        f"process {os.getpid()} ({me.name()}, of {me.username()}, 9.5 GiB)",
        f"process {2**22 + 1} (of another container or user)",
    ]
    assert monitor.holders(0) == []


def test_holders_gives_no_name_to_an_id_of_another_namespace(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the driver may tell the host's ids; the same one here is someone else."""
    monkeypatch.setattr("tuner.metrics.device._is_ours_to_number", lambda: False)
    nvml.gpus[0].processes = [FakeProcess(os.getpid(), GIB)]
    [holder] = DeviceMonitor({}, nvml).holders(0)
    assert str(holder) == f"process {os.getpid()} (of another container or user, 1.0 GiB)"


def test_host_memory_is_the_resident_memory_of_a_process() -> None:
    ballast = bytearray(b"x") * (128 * 2**20)
    process = psutil.Process()
    memory_gib = host_memory_gib([process])
    assert len(ballast) == 2**27
    assert memory_gib is not None
    assert 0.125 < memory_gib <= process.memory_info().rss / GIB + 0.01


def test_host_memory_of_nothing_is_none() -> None:
    assert host_memory_gib([]) is None


# --- description -----------------------------------------------------------------------


def test_describe_names_gpus_and_driver(nvml: FakeNvml) -> None:
    assert DeviceMonitor({"CUDA_VISIBLE_DEVICES": "2,0"}, nvml).describe() == {
        "gpu0": "C GPU-bbbb-2",
        "gpu1": "A GPU-aaaa-1",
        "driver": "570.86.15",
    }


def test_describe_without_gpus_names_the_processor(nvml: FakeNvml) -> None:
    nvml.has_driver = False
    description = DeviceMonitor({}, nvml).describe()
    assert set(description) == {"cpu", "cores"}
    assert description["cpu"]
    assert int(description["cores"]) == len(os.sched_getaffinity(0))


# --- energy ----------------------------------------------------------------------------


def test_energy_is_of_all_visible_devices_together(nvml: FakeNvml) -> None:
    nvml.gpus[0].energy_mj, nvml.gpus[2].energy_mj = 1_500, 2**40
    assert DeviceMonitor({"CUDA_VISIBLE_DEVICES": "0"}, nvml).energy_used_j() == 1.5
    both = DeviceMonitor({"CUDA_VISIBLE_DEVICES": "0,2"}, nvml)
    assert both.energy_used_j() == pytest.approx(1.5 + 2**40 / 1000)


def test_energy_is_none_where_a_device_does_not_count(nvml: FakeNvml) -> None:
    nvml.gpus[0].energy_mj = 1_500
    monitor = DeviceMonitor({"CUDA_VISIBLE_DEVICES": "0,1"}, nvml)
    monitor.sample()
    assert monitor.energy_used_j() is None
    assert monitor.energy.between_j(0.0, 0.0) is None
    nvml.has_driver = False
    assert DeviceMonitor({}, nvml).energy_used_j() is None


def test_sample_looks_at_the_energy_and_reset_forgets_it(nvml: FakeNvml) -> None:
    monitor = DeviceMonitor({"CUDA_VISIBLE_DEVICES": "1"}, nvml)
    nvml.gpus[1].energy_mj = 10_000
    monitor.sample()
    start_s = time.perf_counter()
    monitor.sample()
    nvml.gpus[1].energy_mj = 75_000
    monitor.sample()
    end_s = time.perf_counter()
    assert monitor.energy.between_j(start_s, end_s) == 65.0
    monitor.reset()
    assert monitor.energy.between_j(start_s, end_s) is None


class Counting:
    """A meter over made-up looks, one after the other."""

    def __init__(self, *looks: tuple[float, float | None]) -> None:
        self._looks = list(looks)
        self.meter = EnergyMeter(lambda: self._looks[0][1], lambda: self._looks[0][0])
        for _ in looks[:-1]:
            self.meter.sample()
            self._looks.pop(0)


@pytest.mark.parametrize(
    ("start_s", "end_s", "energy_j"),
    [
        (1.0, 4.0, 900.0),
        (1.0, 2.0, 100.0),
        (1.5, 3.0, 50.0 + 400.0),
        (2.25, 2.75, 200.0),
        (2.0, 2.0, 0.0),
        (0.5, 2.0, None),  # before the first look
        (2.0, 4.5, None),  # after the last
    ],
)
def test_meter_reads_between_its_looks(
    start_s: float, end_s: float, energy_j: float | None
) -> None:
    looks = Counting((1.0, 5000.0), (2.0, 5100.0), (3.0, 5500.0), (4.0, 5900.0))
    assert looks.meter.between_j(start_s, end_s) == (
        None if energy_j is None else pytest.approx(energy_j)
    )


def test_meter_does_not_count_over_a_counter_that_was_set_back() -> None:
    looks = Counting((1.0, 5000.0), (2.0, 5100.0), (3.0, 40.0), (4.0, 140.0), (5.0, 240.0))
    assert looks.meter.between_j(1.0, 4.0) is None
    assert looks.meter.between_j(3.5, 4.5) == pytest.approx(100.0)


def test_meter_without_a_counter_tells_nothing() -> None:
    assert Counting((1.0, None), (2.0, None)).meter.between_j(1.0, 2.0) is None
