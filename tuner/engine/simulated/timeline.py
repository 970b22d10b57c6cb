"""How long the stages of a start take."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.engine.simulated.memory_needs import weight_bytes
from tuner.engine.simulated.profiles import Platform
from tuner.engine.simulated.settings import EngineSettings

# Measured with vLLM 0.32's CPU build on two cores: 24-34 s, all but a tenth of a second of it
# imports of the three processes, one after the other.
_API_IMPORT_S = 10.0
_ENGINE_IMPORT_S = 7.5
_WORKER_IMPORT_S = 9.5

# Of the order that vLLM's own log gives on GPUs; assumed.
_DISK_GB_PER_S = 2.0
_COMPILE_S_PER_LAYER = 0.6
_PROFILE_S = 2.5
_CAPTURE_S_PER_SIZE = 0.12
_CPU_LOAD_S = 0.1


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of each stage of a start; zero for what is not done.

    Attributes:
        launch_s: until the API server has read its flags.
        engine_s: until the engine process has begun to load the model.
    """

    launch_s: float
    engine_s: float
    load_s: float
    compile_s: float
    profile_s: float
    capture_s: float
    serve_s: float = 0.5

    @property
    def total_s(self) -> float:
        """Launch to ready."""
        before = self.launch_s + self.engine_s + self.load_s
        return before + self.compile_s + self.profile_s + self.capture_s + self.serve_s


def timeline(settings: EngineSettings) -> Timeline:
    """The stages of a start with these settings."""
    if settings.device.platform is Platform.CPU:
        return Timeline(
            launch_s=_API_IMPORT_S,
            engine_s=_ENGINE_IMPORT_S + _WORKER_IMPORT_S,
            load_s=_CPU_LOAD_S,
            compile_s=0.0,
            profile_s=0.05,
            capture_s=0.0,
        )
    eager = settings.enforce_eager
    return Timeline(
        launch_s=_API_IMPORT_S,
        engine_s=_ENGINE_IMPORT_S + (_WORKER_IMPORT_S if settings.tensor_parallel_size > 1 else 0),
        load_s=weight_bytes(settings) / (_DISK_GB_PER_S * 1e9),
        compile_s=0.0 if eager else _COMPILE_S_PER_LAYER * settings.model.layers,
        profile_s=_PROFILE_S,
        capture_s=_CAPTURE_S_PER_SIZE * len(settings.cudagraph_capture_sizes),
    )
