"""One server life: start, warm up, measure, stop. No Optuna, no study, no global state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tuner.engine.base import Launcher, LaunchObserver, Server
from tuner.load.client import LoadClient
from tuner.load.driver import drive, warm_up
from tuner.load.workload import TokenizeError, Tokenizer, Workload
from tuner.metrics.scrape import CounterReset, MetricsWatcher, ScrapeError
from tuner.metrics.serving import measurement
from tuner.types import (
    EngineConfig,
    Failure,
    FailureCause,
    Measurement,
    Outcome,
    ProgressSink,
    Stage,
    WorkloadSpec,
)

DEATH_NOTICE_S = 5.0
"""How long broken requests wait for the news that the server died: on vLLM 0.32 the streams
break up to 1.3 s before the process is gone."""

PrepareWorkload = Callable[[Tokenizer], Awaitable[Workload]]


class Evaluator(Protocol):
    """Gives configurations outcomes; `ServerEvaluator` by running them."""

    def command_line(self, config: EngineConfig) -> list[str]:
        """What is started for `config`, for showing; the port is 0, it is chosen later."""

    async def evaluate(
        self, config: EngineConfig, trial_dir: Path, observer: LaunchObserver
    ) -> Outcome:
        """Measure `config` under the study's workload; writes logs into `trial_dir`.

        Raises:
            EnvironmentProblem: nothing can be started here, or something cannot be ended.
            InputError: the workload cannot be made with this model.
        """


class ServerEvaluator:
    """Starts a server with each configuration, measures it under the workload, ends it.

    Args:
        prepare: gives the requests, the same in every call; it may ask the server's tokenizer.
    """

    def __init__(
        self, launcher: Launcher, workload: WorkloadSpec, prepare: PrepareWorkload
    ) -> None:
        self._launcher = launcher
        self._workload = workload
        self._prepare = prepare

    def command_line(self, config: EngineConfig) -> list[str]:
        """See `Evaluator`."""
        return self._launcher.command_line(config, 0)

    async def evaluate(
        self, config: EngineConfig, trial_dir: Path, observer: LaunchObserver
    ) -> Outcome:
        """See `Evaluator`: one server life."""
        started = await self._launcher.launch(config, trial_dir, observer)
        if isinstance(started, Failure):
            return started
        try:
            return await _measure_unless_dead(
                started, self._workload, self._prepare, observer.on_progress
            )
        finally:
            await started.stop()


async def _measure_unless_dead(
    server: Server, spec: WorkloadSpec, prepare: PrepareWorkload, on_progress: ProgressSink
) -> Outcome:
    """Race the measurement against the server's death; requests end before the server does."""
    measuring = asyncio.create_task(_measure(server, spec, prepare, on_progress))
    dying = asyncio.create_task(server.died())
    try:
        await asyncio.wait({measuring, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not dying.done():
            outcome = await measuring
            if isinstance(outcome, Measurement) and not _is_broken(outcome):
                return outcome
            # Broken requests are the server's last words more often than its habit.
            await asyncio.wait({dying}, timeout=DEATH_NOTICE_S)
            if not dying.done():
                return server.examine() or outcome
        return _died_under_load(await dying)
    finally:
        for task in (measuring, dying):
            task.cancel()
        await asyncio.gather(measuring, dying, return_exceptions=True)


async def _measure(
    server: Server, spec: WorkloadSpec, prepare: PrepareWorkload, on_progress: ProgressSink
) -> Outcome:
    async with LoadClient(server.base_url, server.model_name, spec.request_timeout_s) as client:
        try:
            workload = await prepare(client)
            await warm_up(client, workload, _warmup_concurrency(spec), on_progress)
            async with MetricsWatcher(server.base_url) as watcher:
                records = await drive(client, workload, spec, on_progress)
                counters = await watcher.finish()
        except CounterReset as reset:
            return _void(FailureCause.CRASH, f"the engine restarted under the load: {reset}")
        except (ScrapeError, TokenizeError) as problem:
            return _void(FailureCause.UNKNOWN, str(problem))
    return measurement(records, counters, server.memory, server.device_use())


def _warmup_concurrency(spec: WorkloadSpec) -> int:
    return min(spec.concurrency or spec.warmup_requests, spec.warmup_requests) or 1


def _is_broken(measurement: Measurement) -> bool:
    return measurement.failed > 0


def _void(cause: FailureCause, line: str) -> Failure:
    return Failure(cause=cause, stage=Stage.LOAD, line=line)


def _died_under_load(failure: Failure) -> Failure:
    return replace(failure, stage=Stage.LOAD) if failure.stage is Stage.READY else failure
