"""Memory of the GPUs and of the host, seen from outside the server.

GPUs are read through NVML (nvidia-ml-py). Where there is no NVIDIA driver everything here
is empty and works all the same.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import psutil

from tuner.errors import EnvironmentProblem
from tuner.types import DeviceUse, Progress, ProgressSink

_GIB = 2**30


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
    def nvmlDeviceGetComputeRunningProcesses(self, handle: object, /) -> Sequence[NvmlProcess]: ...


def _tell_nobody(_: Progress) -> None:
    """The default of `on_progress`."""


class DeviceMonitor:
    """The GPUs a server may use, their memory now and at its peak.

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
        """Forget the peaks: a new server is started."""
        self._device_peak_gib = tuple(0.0 for _ in self._handles)
        self._host_peak_gib = None

    def sample(self, processes: Iterable[psutil.Process] = ()) -> None:
        """Look at the devices, and at the host memory of `processes`, and keep the peaks."""
        used = self.memory_used_gib()
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

    async def wait_until_free(
        self,
        baseline_gib: Sequence[float],
        *,
        tolerance_gib: float = 0.3,
        timeout_s: float = 60.0,
        poll_s: float = 0.25,
        on_progress: ProgressSink = _tell_nobody,
    ) -> None:
        """Wait until no device uses more than `baseline_gib`: the driver frees memory late.

        Args:
            baseline_gib: `memory_used_gib()` from before the launch.
            tolerance_gib: how much more than that still counts as free.

        Raises:
            EnvironmentProblem: memory is still held after `timeout_s`; names the holders.
        """
        start_s = time.monotonic()
        while True:
            used = self.memory_used_gib()
            held = [now - before for now, before in zip(used, baseline_gib, strict=True)]
            if all(excess <= tolerance_gib for excess in held):
                return
            elapsed_s = time.monotonic() - start_s
            if elapsed_s >= timeout_s:
                raise self._still_held(held, tolerance_gib, timeout_s)
            on_progress(
                Progress(
                    "waiting for device memory",
                    elapsed_s,
                    timeout_s,
                    f"{max(held):.1f} GiB still in use",
                )
            )
            await asyncio.sleep(poll_s)

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

    def _still_held(
        self, held_gib: Sequence[float], tolerance_gib: float, timeout_s: float
    ) -> EnvironmentProblem:
        busy = [index for index, excess in enumerate(held_gib) if excess > tolerance_gib]
        devices = ", ".join(f"{held_gib[index]:.1f} GiB on GPU {index}" for index in busy)
        holders = sorted({text for index in busy for text in self._holders(self._handles[index])})
        who = ", ".join(holders) or "no process that can be seen from here"
        return EnvironmentProblem(
            f"{devices} still in use {timeout_s:.0f} s after the server has ended, by {who}",
            "End these processes, or wait for them, and run again: the study continues.",
        )

    def _holders(self, handle: object) -> list[str]:
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError:
            return []
        return [_describe_holder(process) for process in processes]


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


def _describe_holder(process: NvmlProcess) -> str:
    try:
        name = psutil.Process(process.pid).name()
    except psutil.Error:
        name = "of another container or user"
    if process.usedGpuMemory is None:
        return f"process {process.pid} ({name})"
    return f"process {process.pid} ({name}, {process.usedGpuMemory / _GIB:.1f} GiB)"


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
