"""The JSON documents of `--json`: names and units are a promise to scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from tuner.engine.advice import advice
from tuner.records import Attempt, StudyRecord, TrialRecord
from tuner.redact import redact_env
from tuner.report.effects import effect_documents, trial_effect_documents
from tuner.report.measured import ESTIMATES
from tuner.report.plain import plain_line
from tuner.types import EngineConfig, JsonValue, Measurement


def status_document(study: StudyRecord) -> dict[str, JsonValue]:
    """`tuner status --json`.

    `simulated`: some trial ran on the stand-in for vLLM, so that its figures are of no device.
    `gain` is the best score over the reference's as a share (0.24 is 24 % better); `default`
    is the reference trial: vLLM's own default, or what the space file names as `reference`.
    `no_effect` names parameters that changed nothing, why, and in which trials.
    """
    return {
        "study": study.name,
        "state": study.state.value,
        "simulated": study.simulated,
        "objective": study.spec.objective.maximize.value,
        "trials": [trial_summary(trial) for trial in study.trials],
        "finished_trials": study.finished_trials,
        "budget": {
            "trials": study.spec.budget.trials,
            "time_s": study.spec.budget.time_s,
            "time_spent_s": round(study.time_spent_s, 3),
        },
        "best": trial_summary(study.best) if study.best else None,
        "default": trial_summary(study.reference) if study.reference else None,
        "gain": study.gain,
        "no_effect": effect_documents(study),
        "versions": dict(study.versions),
    }


def trial_summary(trial: TrialRecord) -> dict[str, JsonValue]:
    """One trial in one line's worth of JSON."""
    measurement = trial.measurement
    counters = measurement.counters if measurement else None
    return {
        "number": trial.number,
        "state": trial.state.value,
        "reference": trial.is_reference,
        "simulated": trial.simulated,
        "params": dict(trial.params),
        "score": trial.score,
        "score_interval": _interval(measurement),
        "end": measurement.end.value if measurement else None,
        "estimate": measurement.end in ESTIMATES if measurement else None,
        "goodput": measurement.goodput_per_s if measurement else None,
        "output_throughput": measurement.output_throughput_tokens_per_s if measurement else None,
        "preemptions": counters.preemptions if counters else None,
        "failure": trial.failure.cause.value if trial.failure else None,
        "duration_s": trial.duration_s,
    }


def trial_document(trial: TrialRecord, trials: Sequence[TrialRecord]) -> dict[str, JsonValue]:
    """`tuner show --json`: everything that is kept of a trial.

    Args:
        trials: of the study: some settings are seen to have no effect by comparison alone.
    """
    return {
        **trial_summary(trial),
        "constraints": dict(trial.constraints),
        "command": list(trial.command),
        "config": _config(trial.config),
        "effective": dict(trial.effective),
        "no_effect": trial_effect_documents(trial, trials),
        "attempts": [_attempt(attempt) for attempt in trial.attempts],
        "measurement": _plain(trial.measurement),
        "failure_facts": _plain(trial.failure),
        "advice": list(trial_advice(trial)),
        "directory": str(trial.directory) if trial.directory else None,
        "log": str(trial.directory / "server.log") if trial.directory else None,
    }


def trial_advice(trial: TrialRecord) -> tuple[str, ...]:
    """What to change after a trial that failed, in order; empty for any other.

    What vLLM makes of the configuration counts too: its defaults are settings as well.
    """
    if trial.failure is None:
        return ()
    config = trial.config or EngineConfig({})
    known = EngineConfig({**trial.effective, **config.args}, config.env)
    is_known = bool(trial.effective) or trial.config is not None
    return advice(trial.failure, known if is_known else None)


def _attempt(attempt: Attempt) -> JsonValue:
    """A start that failed before the last one; `trial` has its log in its folder."""
    return {
        "cause": attempt.cause.value,
        "stage": attempt.stage.value,
        "line": plain_line(attempt.line),
        "then": attempt.then,
        "trial": attempt.trial,
    }


def _interval(measurement: Measurement | None) -> JsonValue:
    if measurement is None:
        return None
    interval = measurement.rate.interval if measurement.rate else measurement.interval
    return None if interval is None else [interval.low, interval.high]


def _config(config: EngineConfig | None) -> JsonValue:
    if config is None:
        return None
    return {"args": dict(config.args), "env": dict(redact_env(config.env))}


def _plain(value: object) -> JsonValue:
    """A frozen dataclass as JSON."""
    if value is None:
        return None
    return _json(asdict(value))  # type: ignore[call-overload]


def _json(value: object) -> JsonValue:
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)
