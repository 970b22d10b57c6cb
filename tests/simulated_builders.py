"""Settings, plans and engines of the simulated engine, for tests that care about a few flags."""

from __future__ import annotations

from dataclasses import replace

from tuner.engine.simulated.engine import SimulatedEngine
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.memory import MemoryPlan, plan_memory
from tuner.engine.simulated.profiles import DEVICES, MODELS, DeviceProfile
from tuner.engine.simulated.settings import EngineSettings, settings_from
from tuner.names import canonical
from tuner.types import JsonValue, LengthSpec, WorkloadKind, WorkloadSpec


def flags(**args: JsonValue) -> dict[str, JsonValue]:
    """Flags by their names with underscores."""
    return {canonical(name): value for name, value in args.items()}


def settings(
    device: str | DeviceProfile = "cpu",
    model: str = "tiny",
    env: dict[str, str] | None = None,
    **args: JsonValue,
) -> EngineSettings:
    """The values in effect of flags that vLLM takes."""
    profile = DEVICES[device] if isinstance(device, str) else device
    made = settings_from(flags(**args), env or {}, MODELS[model], profile)
    assert isinstance(made, EngineSettings), made
    return made


def refused(
    device: str = "cpu", model: str = "tiny", env: dict[str, str] | None = None, **args: JsonValue
) -> StartFailure:
    """The refusal of flags that vLLM does not take."""
    made = settings_from(flags(**args), env or {}, MODELS[model], DEVICES[device])
    assert isinstance(made, StartFailure), made
    return made


def plan(made: EngineSettings) -> MemoryPlan:
    """The memory of a start that goes well."""
    planned = plan_memory(made)
    assert isinstance(planned, MemoryPlan), planned
    return planned


def failed_start(made: EngineSettings) -> StartFailure:
    """How a start fails."""
    planned = plan_memory(made)
    assert isinstance(planned, StartFailure), planned
    return planned


def engine(
    blocks: int = 64, *, seed: int = 0, noise: bool = False, **args: JsonValue
) -> SimulatedEngine:
    """A small engine on the CPU profile with the tiny model.

    Args:
        blocks: of 32 tokens, besides the null block.
    """
    given = {"block_size": 32, "max_model_len": min(512, 32 * blocks), "max_num_seqs": 8}
    made = settings(**{**given, **args, "num_gpu_blocks_override": blocks + 1})  # type: ignore[arg-type]
    made = replace(made, kv_cache_memory_bytes=2**24)
    return SimulatedEngine(made, plan(made), seed=seed, noise=noise)


def load(
    requests: int = 32,
    *,
    prompt: LengthSpec | None = None,
    output: LengthSpec | None = None,
    concurrency: int | None = 32,
    rate: float | None = None,
    timeout_s: float = 600.0,
) -> WorkloadSpec:
    """A synthetic load; without arguments the one of `search_spaces/cpu_tiny.yaml`."""
    return WorkloadSpec(
        kind=WorkloadKind.SYNTHETIC,
        path=None,
        input_tokens=prompt or LengthSpec(64),
        output_tokens=output or LengthSpec(256, 77, 32, 440),
        requests=requests,
        concurrency=None if rate is not None else concurrency,
        request_rate_per_s=rate,
        burstiness=1.0,
        warmup_requests=2,
        request_timeout_s=timeout_s,
        seed=0,
    )
