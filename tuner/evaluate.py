"""One server life: start, measure, stop. No Optuna, no study, no global state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from tuner.engine.base import Launcher, LaunchObserver, Server
from tuner.load.workload import TokenizeError
from tuner.measuring.kept import keep
from tuner.measuring.session import Asked, Prepare, Run, WrongLength
from tuner.measuring.under_load import measure
from tuner.metrics.scrape import CounterReset, ScrapeError, Stalled
from tuner.metrics.stall import Standstill
from tuner.types import (
    EngineConfig,
    Failure,
    FailureCause,
    Measurement,
    Outcome,
    ProgressSink,
    Stage,
)

DEATH_NOTICE_S = 5.0
"""How long broken requests wait for the news that the server died: on vLLM 0.32 the streams
break up to 1.3 s before the process is gone."""


class Evaluator(Protocol):
    """Gives configurations outcomes; `ServerEvaluator` by running them."""

    def command_line(self, config: EngineConfig) -> list[str]:
        """What is started for `config`, for showing; the port is 0, it is chosen later."""

    async def evaluate(
        self,
        config: EngineConfig,
        trial_dir: Path,
        observer: LaunchObserver,
        incumbent: float | None = None,
    ) -> Outcome:
        """Measure `config` under the study's workload; writes logs and records to `trial_dir`.

        Args:
            incumbent: the low end of the best score so far: what is clearly worse needs no
                exact figure.

        Raises:
            EnvironmentProblem: nothing can be started here, or something cannot be ended, or
                the client cannot drive the load.
            InputError: the workload cannot be made with this model.
        """


class ServerEvaluator:
    """Starts a server with each configuration, measures it as `asked`, ends it.

    Args:
        prepare: gives the requests, the same in every call; it may ask the server's tokenizer.
        notice: is told what the user should know of a measurement, in a sentence.
    """

    def __init__(
        self,
        launcher: Launcher,
        asked: Asked,
        prepare: Prepare,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._launcher = launcher
        self._asked = asked
        self._prepare = prepare
        self._notice = notice

    def command_line(self, config: EngineConfig) -> list[str]:
        """See `Evaluator`."""
        return self._launcher.command_line(config, 0)

    async def evaluate(
        self,
        config: EngineConfig,
        trial_dir: Path,
        observer: LaunchObserver,
        incumbent: float | None = None,
    ) -> Outcome:
        """See `Evaluator`: one server life."""
        started = await self._launcher.launch(config, trial_dir, observer)
        if isinstance(started, Failure):
            return started
        asked = replace(self._asked, incumbent=incumbent)
        life = _Life(started, asked, self._prepare, observer.on_progress)
        try:
            outcome = await _measured_unless_dead(started, life)
        finally:
            await started.stop()
        self._keep(trial_dir, life.runs)
        return outcome

    def _keep(self, trial_dir: Path, runs: Sequence[Run]) -> None:
        """Leave the requests beside the log; the measurement counts without them, too."""
        try:
            keep(trial_dir, runs)
        except OSError as error:
            self._notice(
                f"the requests of this measurement are not kept, its figures are: "
                f"{error.filename or trial_dir} cannot be written: {error.strerror or error}"
            )


async def _measured_unless_dead(server: Server, life: _Life) -> Outcome:
    """Race the measurement against the server's death; requests end before the server does."""
    measuring = asyncio.create_task(life.measured())
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
                told = server.examine()
                return outcome if told is None else _under_load(told)
        return _under_load(await dying)
    finally:
        for task in (measuring, dying):
            task.cancel()
        await asyncio.gather(measuring, dying, return_exceptions=True)


@dataclass(slots=True)
class _Life:
    """A server that serves, and the loads it was put under."""

    server: Server
    asked: Asked
    prepare: Prepare
    on_progress: ProgressSink
    runs: Sequence[Run] = ()

    async def measured(self) -> Outcome:
        """The measurement; one that is void is a failure."""
        try:
            found = await measure(self.server, self.asked, self.prepare, self.on_progress)
        except CounterReset as reset:
            line = f"the engine restarted under the load: {reset}"
            return self._void(FailureCause.CRASH, line)
        except Stalled as stall:
            return self._hang(stall.standstill, str(stall))
        except (ScrapeError, TokenizeError, WrongLength) as problem:
            return self._void(FailureCause.UNKNOWN, str(problem))
        self.runs = found.runs
        return found.measurement

    def _hang(self, standstill: Standstill, line: str) -> Failure:
        last = standstill.last
        numbers = {
            "stalled_s": round(standstill.lasted_s, 1),
            "running": float(last.running),
            "waiting": float(last.waiting),
            "in_flight": float(last.in_flight),
        }
        return replace(self._void(FailureCause.HANG, line), numbers=numbers)

    def _void(self, cause: FailureCause, line: str) -> Failure:
        return Failure(cause=cause, stage=Stage.LOAD, line=line, memory=self.server.memory)


def _is_broken(measurement: Measurement) -> bool:
    return any(level.failed > 0 for level in (measurement, *measurement.levels))


def _under_load(failure: Failure) -> Failure:
    return replace(failure, stage=Stage.LOAD) if failure.stage is Stage.READY else failure
