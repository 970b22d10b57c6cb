"""From a parsed command line and the stand-in's environment to the settings in effect."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.server.command_line import ServeCommand
from tuner.engine.simulated.server.environment import StandIn
from tuner.engine.simulated.server.models import model_profile
from tuner.engine.simulated.settings import EngineSettings, settings_from
from tuner.types import FailureCause, Stage

_NOT_SHOWN = frozenset({"api-key", "hf-token"})
_OF_THE_LAUNCH = frozenset({"host", "port"})


def resolve(
    command: ServeCommand, told: StandIn, env: Mapping[str, str]
) -> EngineSettings | StartFailure:
    """What vLLM's configuration check makes of the command line, or its refusal."""
    model = model_profile(told.model or command.model)
    if model is None:
        return StartFailure(
            FailureCause.MODEL_NOT_FOUND, Stage.LAUNCH, message=_no_model(command.model)
        )
    args = {name: value for name, value in command.args.items() if name not in _NOT_SHOWN}
    return settings_from(args, env, model, told.device, model_path=command.model)


def digest_of(command: ServeCommand) -> int:
    """A number for a configuration, wherever it is launched."""
    args = {n: value for n, value in command.args.items() if n not in _OF_THE_LAUNCH}
    return zlib.crc32(json.dumps([command.model, args], sort_keys=True).encode())


def _no_model(model: str) -> str:
    if model.startswith((".", "/", "~")):
        return (
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            f"'namespace/repo_name': '{model}'. Use `repo_type` argument if needed."
        )
    return (
        f"OSError: {model} is not a local folder and is not a valid model identifier: the stand-in "
        "has no profile of that name, and there is no folder with a config.json"
    )
