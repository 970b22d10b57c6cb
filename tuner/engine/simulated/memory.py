"""What needs memory on the device, what is left for the KV cache, and where it runs out."""

from __future__ import annotations

from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.memory_cpu import plan_on_cpu
from tuner.engine.simulated.memory_cuda import plan_on_cuda
from tuner.engine.simulated.memory_plan import MemoryPlan
from tuner.engine.simulated.profiles import Platform
from tuner.engine.simulated.settings import EngineSettings

__all__ = ["MemoryPlan", "plan_memory"]


def plan_memory(settings: EngineSettings) -> MemoryPlan | StartFailure:
    """Go through a start as vLLM does, and stop where memory does not suffice.

    A failure knows its settings and the sizes that were known by then, so that its log can be
    written (`words.lines_of`).
    """
    on_cpu = settings.device.platform is Platform.CPU
    return plan_on_cpu(settings) if on_cpu else plan_on_cuda(settings)
