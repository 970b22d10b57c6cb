"""What every kind of server under test offers to the layers above.

An implementation is a `Launcher`; `tuner.engine.vllm.VllmLauncher` is the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuner.types import (
    DeviceUse,
    EngineConfig,
    Failure,
    FailureCause,
    JsonValue,
    MemoryFacts,
    ProgressSink,
)


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Enough to find, and only then end, what a killed tuner left running.

    Attributes:
        pid: of the guardian (`tuner.engine.guardian`), also the id of its and the supervisor's
            session.
        pgid: process group (and session) of the server command.
        create_time: of the group's leader, seconds since the epoch as psutil gives it, so
            that a reused process id is recognised.
        supervisor_create_time: likewise of the supervisor.
        boot_id: of the machine's current boot and process-id namespace; ids mean nothing in
            another.
        tmpdir: the server's private temporary folder.
    """

    pid: int
    pgid: int
    create_time: float
    supervisor_create_time: float
    boot_id: str
    tmpdir: str


@dataclass(frozen=True, slots=True)
class LaunchObserver:
    """Whom a launch tells what.

    Attributes:
        on_spawn: called once, as soon as the process exists, before anything is awaited.
        on_progress: see `ProgressSink`.
    """

    on_spawn: Callable[[ProcessRecord], None]
    on_progress: ProgressSink


class Server(Protocol):
    """A server that serves."""

    @property
    def base_url(self) -> str:
        """Such as `http://127.0.0.1:41234`, without a trailing slash."""

    @property
    def model_name(self) -> str:
        """What requests name as `model`."""

    @property
    def memory(self) -> MemoryFacts:
        """What the server said of itself while starting."""

    def device_use(self) -> DeviceUse:
        """Peaks of device and host memory since the launch."""

    def energy_j(self, start_s: float, end_s: float) -> float | None:
        """Joules that the devices took from `start_s` to `end_s`, of the server's life.

        None where they do not tell. Times are those of `time.perf_counter`.
        """

    async def died(self) -> Failure:
        """Return when the server is dead or its engine has died, and say why."""

    def examine(self) -> Failure | None:
        """Look at the log now: the failure it tells of, or None if it looks healthy."""

    async def stop(self) -> None:
        """End it and everything it started; safe to call more than once.

        Raises:
            EnvironmentProblem: something of it cannot be ended.
        """


class Launcher(Protocol):
    """Starts servers of one kind, one at a time."""

    def command_line(self, config: EngineConfig, port: int) -> list[str]:
        """The argv that `launch` would start, for showing; secrets are not redacted."""

    async def launch(
        self, config: EngineConfig, trial_dir: Path, observer: LaunchObserver
    ) -> Server | Failure:
        """Start a server with `config` and wait until it really serves.

        Writes `server.log` and `launch.json` into `trial_dir`. On any exception, also
        cancellation, nothing of the server is left running.

        Raises:
            EnvironmentProblem: the command cannot be started at all.
        """


@dataclass(frozen=True, slots=True)
class ConfigAnswer:
    """What vLLM's own configuration check says of a configuration, without starting it.

    Attributes:
        accepted: also true where vLLM could not be asked.
        error: why not, in vLLM's words.
        resolved: values in effect by hyphenated flag name, defaults included; empty where
            vLLM could not be asked.
        cause: of a refusal.
    """

    accepted: bool
    error: str = ""
    resolved: Mapping[str, JsonValue] = field(default_factory=dict)
    cause: FailureCause = FailureCause.BAD_CONFIG


class ConfigCheck(Protocol):
    """Asks vLLM, in a process of its own, whether it would take a configuration."""

    async def check(self, config: EngineConfig) -> ConfigAnswer:
        """Never raises for what vLLM says, and never blocks for long."""
