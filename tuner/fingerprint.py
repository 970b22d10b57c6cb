"""What a study's results depend on, and what changed since they were measured.

Budget, sampler, seed, the time-out of a start, constraints and the bounds of numeric ranges
may change between two runs of a study: they decide what is tried next, not what a result
means; and how long is measured decides how sure one is of it. Everything else would mix results
that cannot be compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path

from tuner.redact import redact_env, redact_settings
from tuner.types import (
    Choice,
    FloatRange,
    IntRange,
    JsonValue,
    Knob,
    LengthSpec,
    ObjectiveSpec,
    StudySpec,
    WorkloadSpec,
)

_HASHED_MODEL_FILES = 64 * 1024
"""Of each file of a model folder, its size and this many leading bytes count."""


# Fields that older studies do not know of.
_NEW_IN_WORKLOAD = frozenset(
    {
        "levels",
        "arrivals",
        "ramp_to_per_s",
        "speedup",
        "input_scale",
        "output_scale",
        "max_input_tokens",
        "max_output_tokens",
        "shared_prefix",
        "turns",
        "url",
    }
)
_NEW_IN_LENGTHS = frozenset({"kind", "bins"})


def fingerprint(
    spec: StudySpec, *, vllm_version: str | None, device: Mapping[str, str]
) -> dict[str, JsonValue]:
    """The facts that results depend on, readable and comparable."""
    return {
        "model": spec.server.model,
        "model files": _model_digest(spec.server.model),
        "server command": list(spec.server.command),
        "server.args": redact_settings(spec.server.args),
        "server.env": dict(redact_env(spec.server.env)),
        "search_space": {knob.name: _shape(knob) for knob in spec.search_space},
        "reference": redact_settings(spec.reference),
        "workload": _workload(spec.workload),
        "objective": _objective(spec.objective),
        "vLLM version": vllm_version,
        "device": dict(device),
    }


def differences(old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]) -> list[str]:
    """What differs, one line each, in the words of a space file.

    A fact that one side does not know (no vLLM to ask) is not a difference.
    """
    return [
        line
        for name in sorted(set(old) | set(new))
        for line in _difference(name, old.get(name), new.get(name))
    ]


def _difference(name: str, old: JsonValue, new: JsonValue) -> list[str]:
    if old == new or old is None or new is None:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            f"{name}.{key}: {_shown(old.get(key, '(unset)'))} -> {_shown(new.get(key, '(unset)'))}"
            for key in sorted(set(old) | set(new))
            if old.get(key) != new.get(key)
        ]
    return [f"{name}: {_shown(old)} -> {_shown(new)}"]


def _shown(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shape(knob: Knob) -> JsonValue:
    """Of a knob, what may not change, because Optuna's database could not hold both: the
    values of a choice, the kind of a range and its scale."""
    match knob:
        case Choice(choices=choices):
            return {"choices": list(choices)}
        case IntRange(log=log):
            return "integers by ratio" if log else "integers"
        case FloatRange(log=log):
            return "numbers by ratio" if log else "numbers"


def _workload(workload: WorkloadSpec) -> dict[str, JsonValue]:
    facts = _facts(workload, _NEW_IN_WORKLOAD)
    for name in ("input_tokens", "output_tokens"):
        lengths: LengthSpec | None = getattr(workload, name)
        if lengths is not None:
            facts[name] = _facts(lengths, _NEW_IN_LENGTHS)
    if workload.path is not None and (digest := _file_digest(workload.path)) is not None:
        facts["path"] = digest  # the same file under another name is the same workload
    return facts


def _objective(objective: ObjectiveSpec) -> dict[str, JsonValue]:
    """The SLO limit by limit, so that a difference names the one that changed."""
    facts = _facts(objective, frozenset())
    del facts["slo"]
    limits = {
        f"slo.{limit.metric}_p{limit.percentile:g}": f"{limit.limit_s:g} s"
        for limit in objective.slo
    }
    return {**facts, **limits}


def _facts(
    spec: WorkloadSpec | LengthSpec | ObjectiveSpec, new: Collection[str]
) -> dict[str, JsonValue]:
    """All fields; the `new` ones only where they are not what they always were."""
    facts: dict[str, JsonValue] = json.loads(json.dumps(asdict(spec), default=str))
    for field in fields(spec):
        if field.name in new and getattr(spec, field.name) == field.default:
            del facts[field.name]
    return facts


def _model_digest(model: str) -> str | None:
    """A digest of a model folder; None for a hub id, which its name identifies here."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_MODEL_FILES))
    return digest.hexdigest()[:16]


def _file_digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return None
