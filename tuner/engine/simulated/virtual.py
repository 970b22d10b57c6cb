"""Evaluate a configuration under a workload in milliseconds, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from tuner.engine.logs import LogReader
from tuner.engine.simulated import memory_needs as needs
from tuner.engine.simulated.engine import SimulatedEngine
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.memory import MemoryPlan, plan_memory
from tuner.engine.simulated.profiles import DeviceProfile, ModelProfile, Platform
from tuner.engine.simulated.settings import EngineSettings, settings_from
from tuner.engine.simulated.virtual_client import PlannedRequest, VirtualClient
from tuner.engine.simulated.words import LogEntry, lines_of, start_lines
from tuner.load.workload import (
    build_without_server,
    planned_lengths,
    schedule,
    shares_prompts,
)
from tuner.metrics.serving import measurement
from tuner.types import (
    DeviceUse,
    EngineConfig,
    Failure,
    MemoryFacts,
    Outcome,
    SloLimit,
    Stage,
    WorkloadSpec,
)
from tuner.units import GIB

_DIGEST_BITS = 48


def evaluate_virtually(
    config: EngineConfig,
    workload: WorkloadSpec,
    *,
    model: ModelProfile,
    device: DeviceProfile,
    seed: int,
    launch: int,
    noise: bool = True,
    slo: Sequence[SloLimit] = (),
) -> Outcome:
    """What `tuner.evaluate.evaluate` would find, with the simulated engine on virtual time.

    Args:
        config: fixed and searched flags, and environment.
        seed: of the study's noise; with `launch` it gives the noise of this evaluation.
        launch: number of this launch in the study: the same configuration launched again
            measures a little differently.
        slo: what a request must keep to count as goodput.

    Raises:
        InputError: the workload cannot be made.
    """
    settings = settings_from(config.args, config.env, model, device)
    if isinstance(settings, StartFailure):
        return failure_of(settings)
    plan = plan_memory(settings)
    if isinstance(plan, StartFailure):
        return failure_of(plan)
    seeds = (seed, launch, int(config.digest, 16) & ((1 << _DIGEST_BITS) - 1))
    engine = SimulatedEngine(settings, plan, seed=seeds, noise=noise)
    requests, arrivals_s = _load(workload)
    client = VirtualClient(
        engine,
        requests,
        arrivals_s=arrivals_s,
        concurrency=workload.concurrency or 1,
        timeout_s=workload.request_timeout_s,
    )
    records = client.run()
    memory = memory_facts(settings, plan)
    if engine.dead is not None:
        return replace(failure_of(engine.dead), memory=memory)
    return measurement(records, client.counters(), memory, _device_use(settings, plan), slo=slo)


def failure_of(failure: StartFailure) -> Failure:
    """The failure as the log reader finds it in the log of such a server.

    One of a server that has served is told by its settings and plan too: its log begins with
    its start.
    """
    reader = LogReader()
    serving = failure.stage in (Stage.READY, Stage.LOAD)
    if serving and failure.settings is not None and failure.plan is not None:
        _feed(reader, start_lines(failure.settings, failure.plan))
    _feed(reader, lines_of(failure))
    read = reader.failure(failure.exit_code)
    assert read is not None, failure
    return replace(
        read,
        stage=failure.stage if serving else read.stage,
        memory=replace(read.memory, simulated=True),
    )


def _feed(reader: LogReader, entries: list[LogEntry]) -> None:
    reader.feed("".join(entry.text + "\n" for entry in entries))


def memory_facts(settings: EngineSettings, plan: MemoryPlan) -> MemoryFacts:
    """What the log reader finds in the log of such a start."""
    reader = LogReader()
    _feed(reader, start_lines(settings, plan))
    return replace(reader.memory, startup_s=plan.startup_s, simulated=True)


@lru_cache(maxsize=8)
def _load(
    workload: WorkloadSpec,
) -> tuple[tuple[PlannedRequest, ...], tuple[float, ...] | None]:
    """The requests, the same in every evaluation of a study."""
    prompts: list[Sequence[int] | int]
    if shares_prompts(workload):
        prompts = [
            made.prompt
            for made in build_without_server(workload).requests
            if not isinstance(made.prompt, str)
        ]
    else:
        prompts = [sent for sent, _ in planned_lengths(workload)]
    outputs = [asked for _, asked in planned_lengths(workload)]
    requests = tuple(map(PlannedRequest, prompts, outputs))
    return requests, schedule(workload)


def _device_use(settings: EngineSettings, plan: MemoryPlan) -> DeviceUse:
    """Peaks as NVML and the process tree would show them."""
    device, ranks = settings.device, settings.tensor_parallel_size
    if device.platform is Platform.CPU:
        kv_gib = plan.num_blocks * plan.block_size * needs.kv_bytes_per_token(settings) / GIB
        return DeviceUse(host_peak_gib=device.context_gib + plan.weights_gib + kv_gib)
    free_gib = max(0.0, plan.headroom_gib - plan.activation_gib)
    return DeviceUse(
        device_names=(device.name,) * ranks,
        device_total_gib=(device.total_gib,) * ranks,
        device_peak_gib=(device.total_gib - free_gib,) * ranks,
        host_peak_gib=settings.kv_offloading_gib or None,
    )
