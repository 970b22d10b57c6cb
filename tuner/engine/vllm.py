"""Starts a real vLLM server and waits until it serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from tuner import __version__
from tuner.engine.arguments import argv, shell_line
from tuner.engine.base import LaunchObserver
from tuner.engine.flags import FlagTable
from tuner.engine.introspect import server_env
from tuner.engine.log_facts import STAGE_WORDS
from tuner.engine.patience import QUIET_S, Waited, judge, words
from tuner.engine.process import SupervisedProcess, free_port
from tuner.engine.readiness import ServerHttp, Timeouts, WillNotServe
from tuner.engine.settle import Settling
from tuner.engine.vllm_server import Life, VllmServer
from tuner.errors import EnvironmentProblem
from tuner.metrics.device import DeviceMonitor
from tuner.redact import redact_argv, redact_env
from tuner.types import (
    EngineConfig,
    Failure,
    FailureCause,
    JsonValue,
    MemoryFacts,
    Progress,
    ProgressSink,
    ServerSpec,
)

HOST = "127.0.0.1"
LOG_NAME = "server.log"
RECORD_NAME = "launch.json"


@dataclass(frozen=True, slots=True)
class LaunchTiming:
    """Waits of a launch, in seconds.

    Attributes:
        poll_s: between looks at log and process.
        decisive_grace_s: from the log line that ends all hope to ending the server, so that
            it can say the rest and exit by itself.
        quiet_s: the least silence of a log that is called a hang at the end of the wait.
        stop_grace_s: from TERM to KILL.
        http: of the questions to the server.
    """

    poll_s: float = 0.25
    decisive_grace_s: float = 6.0
    quiet_s: float = QUIET_S
    stop_grace_s: float = 5.0
    http: Timeouts = field(default_factory=Timeouts)


class VllmLauncher:
    """Starts vLLM servers as `server` says; implements `tuner.engine.base.Launcher`.

    Args:
        flags: of the vLLM that will run, None if it could not be asked.
        device: the GPUs to watch; by default those that the server's environment shows.
    """

    def __init__(
        self,
        server: ServerSpec,
        flags: FlagTable | None = None,
        *,
        device: DeviceMonitor | None = None,
        timing: LaunchTiming | None = None,
    ) -> None:
        self._server = server
        self._flags = flags
        self._device = device
        self._timing = timing or LaunchTiming()
        self._last_startup_s: float | None = None
        self._settling = Settling()

    def command_line(self, config: EngineConfig, port: int) -> list[str]:
        """The argv that `launch` would start; secrets are not masked.

        Raises:
            InputError: `config` has a flag that this vLLM cannot be given.
        """
        return argv(self._server, config, host=HOST, port=port, flags=self._flags)

    async def launch(
        self, config: EngineConfig, trial_dir: Path, observer: LaunchObserver
    ) -> VllmServer | Failure:
        """See `tuner.engine.base.Launcher.launch`."""
        check_model_folder(self._server.model)
        env = server_env(self._server, config.env)
        device = self._device or DeviceMonitor(env)
        await self._settling.wait(device, observer.on_progress)
        device.reset()
        self._settling.last_port = port = free_port(HOST)
        command = self.command_line(config, port)
        self._write_record(trial_dir / RECORD_NAME, command, config)
        log_path = trial_dir / LOG_NAME
        _set_aside(log_path)
        life = await self._begin(command, env, log_path, device)
        name = served_name(self._server, config)
        server = VllmServer(ServerHttp(f"http://{HOST}:{port}", name, self._timing.http), life)
        try:
            observer.on_spawn(life.process.record)
            outcome = await self._until_ready(server, life, observer.on_progress)
        except BaseException:
            await server.stop()
            raise
        if isinstance(outcome, Failure):
            await server.stop()
            return outcome
        server.serve(outcome)
        self._last_startup_s = outcome.startup_s
        return server

    async def _begin(
        self, command: list[str], env: Mapping[str, str], log_path: Path, device: DeviceMonitor
    ) -> Life:
        process = await SupervisedProcess.spawn(
            command, env=env, cwd=None, log_path=log_path, grace_s=self._timing.stop_grace_s
        )
        return Life(process, log_path, device)

    async def _until_ready(
        self, server: VllmServer, life: Life, on_progress: ProgressSink
    ) -> MemoryFacts | Failure:
        """Watch process, log and HTTP side by side; the first that decides does."""
        serving = asyncio.create_task(server.http.serves())
        dying = asyncio.create_task(life.process.wait())
        try:
            while True:
                await asyncio.wait(
                    {serving, dying},
                    timeout=self._timing.poll_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                life.look()
                life.sample_at_times()
                self._tell(life, on_progress)
                if dying.done():
                    return await life.failure_of_exit(dying.result())
                if serving.done():
                    return await self._ready(serving, server, life)
                if (failure := self._hopeless(life, server.http)) is not None:
                    return failure
        finally:
            for task in (serving, dying):
                task.cancel()
            await asyncio.gather(serving, dying, return_exceptions=True)

    async def _ready(
        self, serving: asyncio.Task[MemoryFacts], server: VllmServer, life: Life
    ) -> MemoryFacts | Failure:
        try:
            listed = serving.result()
        except WillNotServe as refusal:
            return life.failure_because(FailureCause.UNSUPPORTED, str(refusal))
        started_s = await server.http.started_s()
        if started_s is not None and life.is_foreign(started_s):
            line = f"another server, older than this launch, answers at {server.base_url}"
            return life.failure_because(FailureCause.PORT_IN_USE, line)
        facts = replace(life.log.memory, startup_s=life.age_s)
        if listed.max_model_len_tokens is not None:
            facts = replace(facts, max_model_len_tokens=listed.max_model_len_tokens)
        return await server.http.describe(facts)

    def _hopeless(self, life: Life, http: ServerHttp) -> Failure | None:
        """Whether to stop waiting for a server that still runs."""
        if life.decisive_for_s > self._timing.decisive_grace_s:
            return life.failure()
        limit_s = self._server.startup_timeout_s
        if life.age_s < limit_s:
            return None
        log = life.log
        waited = Waited(log.stage, life.age_s, life.quiet_s, life.last_line, http.problem)
        cause = judge(waited, limit_s, self._timing.quiet_s)
        told = life.failure()
        if told is not None and told.cause is not FailureCause.HANG:
            return told
        return life.failure_because(cause, words(waited, limit_s, cause))

    def _tell(self, life: Life, on_progress: ProgressSink) -> None:
        doing = STAGE_WORDS[life.log.stage]
        on_progress(Progress("starting", life.age_s, self._last_startup_s, doing))

    def _write_record(self, path: Path, command: list[str], config: EngineConfig) -> None:
        shown = redact_argv(command)
        env = redact_env({**self._server.env, **config.env})
        record: Mapping[str, JsonValue] = {
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": list(shown),
            "shell": shell_line(shown, env),
            "env": dict(env),
            "folder": str(Path.cwd()),
            "vllm_version": self._flags.version if self._flags else None,
            "tuner_version": __version__,
        }
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _set_aside(log_path: Path) -> None:
    """Keep the log of an earlier attempt under another name: its words are not this one's."""
    if log_path.exists():
        attempts = len(list(log_path.parent.glob(f"{log_path.stem}.*{log_path.suffix}")))
        log_path.rename(log_path.with_suffix(f".{attempts + 1}{log_path.suffix}"))


def served_name(server: ServerSpec, config: EngineConfig) -> str:
    """What requests name as `model`: the first of `served-model-name`, else the model."""
    name = config.args.get("served-model-name")
    first = name[0] if isinstance(name, list) and name else name
    return server.model if first is None or isinstance(first, list) else str(first)


def check_model_folder(model: str) -> None:
    """Refuse a model path that is not there; hub ids are vLLM's matter.

    Raises:
        EnvironmentProblem: no such folder, or it holds no model.
    """
    path = Path(model)
    if not path.exists():
        if model.startswith((".", "/", "~")):
            raise EnvironmentProblem(
                f"the model folder {model} is not there",
                "Paths in `server: model:` are relative to where the tuner is started.",
            )
        return
    if path.is_dir() and not any((path / name).exists() for name in _MODEL_FILES):
        raise EnvironmentProblem(
            f"{model} is not a model: it has no {_MODEL_FILES[0]}",
            "Name the folder that holds the model's config.json, or a hub id.",
        )


_MODEL_FILES = ("config.json", "params.json")
"""Of models in Hugging Face's and in Mistral's form."""
