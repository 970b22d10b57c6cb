"""A stand-in for NVML over a list of GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field

GIB = 2**30


class FakeError(Exception):
    """Stands for pynvml.NVMLError."""


@dataclass
class FakeMemory:
    total: int
    used: int


@dataclass
class FakeProcess:
    pid: int
    usedGpuMemory: int | None


@dataclass
class FakeGpu:
    name: str
    uuid: str
    total_gib: float = 80.0
    used_gib: float = 0.5
    energy_mj: int | None = None
    processes: list[FakeProcess] = field(default_factory=list)


@dataclass
class FakeNvml:
    """The functions of pynvml that are used, over a list of GPUs and MIG parts."""

    gpus: list[FakeGpu]
    parts: list[FakeGpu] = field(default_factory=list)
    has_driver: bool = True
    is_lost: bool = False
    NVMLError: type[Exception] = FakeError

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise FakeError("Driver Not Loaded")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in [*self.gpus, *self.parts]:
            if gpu.uuid == uuid:
                return gpu
        raise FakeError("Not Found")

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return handle.name

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> FakeMemory:
        if self.is_lost:
            raise FakeError("GPU is lost")
        return FakeMemory(int(handle.total_gib * GIB), int(handle.used_gib * GIB))

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakeGpu) -> int:
        if handle.energy_mj is None:
            raise FakeError("Not Supported")
        return handle.energy_mj

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[FakeProcess]:
        return handle.processes
