"""Memory and energy of the GPUs, and memory of the host, seen from outside the server.

GPUs are read through NVML (nvidia-ml-py). Where there is no NVIDIA driver everything here
is empty and works all the same.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import psutil

from tuner.errors import EnvironmentProblem
from tuner.metrics.energy import EnergyMeter
from tuner.types import DeviceUse

_GIB = 2**30
_MJ_PER_J = 1000
_HOST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the first one, which a container does not have (linux/proc_ns.h)."""


class NvmlMemory(Protocol):
    """Bytes of a device."""

    total: int
    used: int


class NvmlProcess(Protocol):
    """A process with a context on a device; memory in bytes, None where it is not told."""

    pid: int
    usedGpuMemory: int | None


class Nvml(Protocol):
    """The part of the module `pynvml` that is used here."""

    @property
    def NVMLError(self) -> type[Exception]: ...
    def nvmlInit(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> object: ...
    def nvmlDeviceGetName(self, handle: object, /) -> str: ...
    def nvmlDeviceGetUUID(self, handle: object, /) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: object, /) -> NvmlMemory: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object, /) -> int: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: object, /) -> Sequence[NvmlProcess]: ...


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of a device, as far as can be seen from here.

    Attributes:
        pid: as the driver tells it; in a container it may be the host's number.
        name, user: None where the process is out of sight, in another container or namespace.
        memory_gib: None where the driver does not tell it.
    """

    pid: int
    name: str | None = None
    user: str | None = None
    memory_gib: float | None = None

    def __str__(self) -> str:
        words = [self.name or "of another container or user"]
        words += [f"of {self.user}"] if self.user is not None else []
        words += [f"{self.memory_gib:.1f} GiB"] if self.memory_gib is not None else []
        return f"process {self.pid} ({', '.join(words)})"


class DeviceMonitor:
    """The GPUs a server may use: their memory now and at its peak, and the energy they take.

    Attributes:
        energy: of all of them together, read with each `sample`.

    Args:
        env: the server's environment; its CUDA_VISIBLE_DEVICES (indices, UUIDs or their
            beginnings) selects the devices. Indices are NVML's, as vLLM takes them too:
            CUDA's own order may differ where the GPUs do, unless CUDA_DEVICE_ORDER is
            PCI_BUS_ID. None stands for the tuner's own environment.
        nvml: the module `pynvml` or a stand-in for it.
    """

    def __init__(self, env: Mapping[str, str] | None = None, nvml: Nvml | None = None) -> None:
        environment = os.environ if env is None else env
        self._nvml = _pynvml() if nvml is None else nvml
        self._handles: list[object] = []
        self.driver: str | None = None
        try:
            self._nvml.nvmlInit()
            self.driver = self._nvml.nvmlSystemGetDriverVersion()
            self._handles = self._visible(environment.get("CUDA_VISIBLE_DEVICES"))
            self.names = tuple(self._nvml.nvmlDeviceGetName(handle) for handle in self._handles)
            self.uuids = tuple(self._nvml.nvmlDeviceGetUUID(handle) for handle in self._handles)
            memory = [self._nvml.nvmlDeviceGetMemoryInfo(handle) for handle in self._handles]
        except self._nvml.NVMLError:
            # No driver, or devices that share the host's memory and do not tell their own.
            self._handles, self.names, self.uuids, memory = [], (), (), []
        self.memory_total_gib = tuple(info.total / _GIB for info in memory)
        self._device_peak_gib = tuple(0.0 for _ in memory)
        self._host_peak_gib: float | None = None
        self.energy = EnergyMeter(self.energy_used_j)

    def energy_used_j(self) -> float | None:
        """Joules that the devices have taken since the driver was loaded, whoever used them.

        None without a device, and where one does not count: before Volta, and parts of a GPU.
        """
        try:
            taken = [
                self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles
            ]
        except self._nvml.NVMLError:
            return None
        return sum(taken) / _MJ_PER_J if taken else None

    def memory_used_gib(self) -> tuple[float, ...]:
        """Used memory of each device now, whoever uses it.

        Raises:
            EnvironmentProblem: a device does not answer any more.
        """
        try:
            return tuple(
                self._nvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB for handle in self._handles
            )
        except self._nvml.NVMLError as error:
            raise EnvironmentProblem(
                f"the GPU does not answer: {error}",
                "Look at `nvidia-smi` and `dmesg`; it may need a reset.",
            ) from error

    def reset(self) -> None:
        """Forget the peaks and the energy: a new server is started."""
        self._device_peak_gib = tuple(0.0 for _ in self._handles)
        self._host_peak_gib = None
        self.energy.reset()

    def sample(self, processes: Iterable[psutil.Process] = ()) -> None:
        """Look at the devices, and at the host memory of `processes`; keep the peaks."""
        used = self.memory_used_gib()
        self.energy.sample()
        self._device_peak_gib = tuple(map(max, self._device_peak_gib, used))
        host = host_memory_gib(processes)
        if host is not None:
            self._host_peak_gib = max(host, self._host_peak_gib or 0.0)

    def use(self) -> DeviceUse:
        """The peaks of all samples since the last `reset`."""
        return DeviceUse(
            device_names=self.names,
            device_total_gib=self.memory_total_gib,
            device_peak_gib=self._device_peak_gib,
            host_peak_gib=self._host_peak_gib,
        )

    def holders(self, index: int) -> list[Holder]:
        """Who holds memory of the device with this index; empty where the driver hides it."""
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handles[index])
        except self._nvml.NVMLError:
            return []
        return sorted(map(_holder, processes), key=lambda holder: -(holder.memory_gib or 0.0))

    def describe(self) -> dict[str, str]:
        """What makes results comparable: GPUs and driver, or the processor without GPUs."""
        if not self._handles:
            return {"cpu": _cpu_model(), "cores": str(_usable_cores())}
        gpus = {
            f"gpu{index}": f"{name} {uuid}"
            for index, (name, uuid) in enumerate(zip(self.names, self.uuids, strict=True))
        }
        return {**gpus, "driver": self.driver or ""}

    def _visible(self, visible: str | None) -> list[object]:
        """Handles as CUDA selects devices: in the order named, up to the first bad name."""
        indices = range(self._nvml.nvmlDeviceGetCount())
        everything = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
        if visible is None:
            return everything
        chosen: list[object] = []
        for name in visible.split(","):
            handle = self._by_name(name.strip(), everything)
            if handle is None:
                break
            chosen.append(handle)
        return chosen

    def _by_name(self, name: str, everything: Sequence[object]) -> object | None:
        if name.isdecimal():
            return everything[int(name)] if int(name) < len(everything) else None
        if name.startswith("MIG-"):
            try:
                return self._nvml.nvmlDeviceGetHandleByUUID(name)
            except self._nvml.NVMLError:
                return None
        fitting = [
            handle
            for handle in everything
            if name.startswith("GPU-") and self._nvml.nvmlDeviceGetUUID(handle).startswith(name)
        ]
        return fitting[0] if len(fitting) == 1 else None


def host_memory_gib(processes: Iterable[psutil.Process]) -> float | None:
    """Resident memory of these processes together; None if there are none.

    Anonymous memory of all of them, plus the largest resident shared memory of one, for they
    share it with one another. Files are left out: the kernel can drop them. PSS would be
    exact, but reading it walks all page tables, which takes long for a server that holds
    pinned memory of many GiB, while the server waits.
    """
    private, shared = [], []
    for process in processes:
        try:
            memory = _resident(process)
        except (OSError, psutil.Error):
            continue
        private.append(memory[0])
        shared.append(memory[1])
    return (sum(private) + max(shared)) / _GIB if private else None


def _resident(process: psutil.Process) -> tuple[int, int]:
    """Bytes of anonymous and of shared memory."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        return process.memory_info().rss, 0
    fields = dict(
        line.split(":", 1)
        for line in status.read_text(errors="replace").splitlines()
        if ":" in line
    )
    # "RssAnon:   1234 kB"; absent for a zombie.
    anonymous, shared = (
        int(fields.get(key, "0 kB").split()[0]) * 1024 for key in ("RssAnon", "RssShmem")
    )
    return anonymous, shared


def _holder(process: NvmlProcess) -> Holder:
    used = process.usedGpuMemory
    memory_gib = None if used is None else used / _GIB
    if not _is_ours_to_number() and not _has_device_open(process.pid):
        return Holder(process.pid, memory_gib=memory_gib)
    try:
        found = psutil.Process(process.pid)
        return Holder(process.pid, found.name(), found.username(), memory_gib)
    except (psutil.Error, KeyError):
        return Holder(process.pid, memory_gib=memory_gib)


def _is_ours_to_number() -> bool:
    """Whether process ids here are the host's, as the driver counts them."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _HOST_PID_NAMESPACE
    except OSError:
        return True


def _has_device_open(pid: int) -> bool:
    """Whether the process that has this id here uses a GPU: else the id is another's elsewhere."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as maps:
            return any("/dev/nvidia" in line for line in maps)
    except OSError:
        return False


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pynvml() -> Nvml:
    import pynvml

    return cast(Nvml, pynvml)
