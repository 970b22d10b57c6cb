"""How a trial is written into Optuna's user attributes and read back.

Attributes without a prefix are for people who look at the database with optuna-dashboard;
those that start with `tuner:` hold the whole record as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import optuna
from pydantic import TypeAdapter

from tuner.records import Attempt, TrialRecord, TrialState
from tuner.redact import (
    redact_env,
    redact_json,
    redact_settings,
    redact_text,
    redact_yaml,
    secrets_of,
)
from tuner.types import (
    ENV_PREFIX,
    Choice,
    EngineConfig,
    Failure,
    JsonValue,
    Measurement,
    Outcome,
    StudySpec,
)

STATE = "state"
REFERENCE = "reference"
COMMAND = "command"
DIRECTORY = "directory"
DURATION = "duration_s"
ENCODED = "tuner:encoded_params"
PARAMS = "tuner:params"
CONFIG = "tuner:config"
EFFECTIVE = "tuner:effective"
PROCESS = "tuner:process"
MEASUREMENT = "tuner:measurement"
FAILURE = "tuner:failure"
ATTEMPTS = "tuner:attempts"

T = TypeVar("T")


def to_json(value: object) -> Any:
    """Plain JSON of a frozen dataclass of `tuner.types` or `tuner.engine.base`."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_json(data: Any, kind: type[T]) -> T:
    """The inverse of `to_json`."""
    value: T = _adapter(kind).validate_python(data)
    return value


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type) -> TypeAdapter[Any]:
    """Kept, because building one takes longer than using it."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def config_json(config: EngineConfig) -> dict[str, JsonValue]:
    """A configuration as JSON, secrets masked; `trial_record` reads it back."""
    return {"args": redact_settings(config.args), "env": dict(redact_env(config.env))}


def outcome_json(outcome: Outcome) -> Any:
    """An outcome as JSON, secrets masked: it quotes the log and the server's answers."""
    return redact_json(to_json(outcome))


def attempts_json(attempts: Sequence[Attempt]) -> list[Any]:
    """Failed starts as JSON, secrets masked."""
    return [redact_json(to_json(attempt)) for attempt in attempts]


def stored_attempts(attributes: Mapping[str, Any]) -> tuple[Attempt, ...]:
    """What `attempts_json` made, where it was stored."""
    return from_json(attributes.get(ATTEMPTS, ()), tuple[Attempt, ...])


def outcome_attributes(outcome: Outcome) -> dict[str, JsonValue]:
    """Everything an outcome writes into its trial."""
    if isinstance(outcome, Failure):
        return {
            "failure": outcome.cause.value,
            "failure_stage": outcome.stage.value,
            "failure_line": redact_text(outcome.line),
            FAILURE: outcome_json(outcome),
        }
    figures: dict[str, JsonValue] = {
        "output_throughput": round(outcome.output_throughput_tokens_per_s, 3),
        "request_throughput": round(outcome.request_throughput_per_s, 4),
        "preemptions": outcome.counters.preemptions,
        "served": outcome.served,
        "offered": outcome.offered,
        "kv_cache_tokens": outcome.memory.kv_cache_tokens,
        MEASUREMENT: outcome_json(outcome),
    }
    for name, latency in (("ttft", outcome.ttft_s), ("tpot", outcome.tpot_s)):
        if latency is not None:
            figures[f"{name}_p99_ms"] = round(latency.p99 * 1000, 2)
    return figures


class MalformedRecord(Exception):
    """An attribute holds what no tuner wrote."""


def trial_record(frozen: optuna.trial.FrozenTrial, directory: Path) -> TrialRecord:
    """A trial as plain data; `directory` is where it writes.

    Raises:
        MalformedRecord: its attributes cannot be read.
    """
    try:
        return _record(frozen, directory)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MalformedRecord(f"trial {frozen.number}: {type(error).__name__}") from error


def _record(frozen: optuna.trial.FrozenTrial, directory: Path) -> TrialRecord:
    attributes = frozen.user_attrs
    config = attributes.get(CONFIG)
    params: Mapping[str, JsonValue] = attributes.get(PARAMS, {})
    state = _state(frozen)
    # One that was cut off while its outcome was written has not come to an end.
    told = state.finished or state is TrialState.ABORTED
    return TrialRecord(
        number=frozen.number,
        state=state,
        params=params,
        config=EngineConfig(config["args"], config["env"]) if config is not None else None,
        is_reference=bool(attributes.get(REFERENCE)),
        score=frozen.value,
        constraints=frozen.constraints,
        outcome=stored_outcome(attributes) if told else None,
        directory=directory if DIRECTORY in attributes else None,
        effective=attributes.get(EFFECTIVE, {}),
        command=tuple(attributes.get(COMMAND, ())),
        duration_s=attributes.get(DURATION),
        attempts=stored_attempts(attributes),
    )


def stored_outcome(attributes: Mapping[str, Any]) -> Outcome | None:
    """What `outcome_attributes` wrote, if it came to that."""
    if FAILURE in attributes:
        return from_json(attributes[FAILURE], Failure)
    if MEASUREMENT in attributes:
        return from_json(attributes[MEASUREMENT], Measurement)
    return None


def _state(frozen: optuna.trial.FrozenTrial) -> TrialState:
    match frozen.state:
        case optuna.trial.TrialState.WAITING:
            return TrialState.WAITING
        case optuna.trial.TrialState.RUNNING:
            return TrialState.RUNNING
        case optuna.trial.TrialState.COMPLETE:
            feasible = all(value <= 0 for value in frozen.constraints.values())
            return TrialState.MEASURED if feasible else TrialState.INFEASIBLE
        case _:
            stored = frozen.user_attrs.get(STATE, TrialState.INTERRUPTED.value)
            return TrialState(stored)


def masked_text(spec: StudySpec) -> str:
    """The space file with its secrets masked; what is left is still a space file."""
    settings = [spec.server.args, spec.reference]
    settings += [{f"{ENV_PREFIX}{name}": value} for name, value in spec.server.env.items()]
    settings += [
        {knob.name: choice}
        for knob in spec.search_space
        if isinstance(knob, Choice)
        for choice in knob.choices
    ]
    secrets = [secret for setting in settings for secret in secrets_of(setting)]
    return redact_yaml(spec.text, secrets)
