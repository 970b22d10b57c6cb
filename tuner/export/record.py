"""The whole record of the best configuration as JSON."""

from __future__ import annotations

import json

from tuner.export.deployment import Deployment
from tuner.redact import redact_env
from tuner.report.documents import trial_document
from tuner.types import JsonValue


def json_record(deployment: Deployment) -> str:
    """The text of one JSON object: configuration, score, measurement, versions, device."""
    study = deployment.study
    document: dict[str, JsonValue] = {
        "study": study.name,
        "model": deployment.model,
        "flags": dict(deployment.flags),
        "env": dict(redact_env(deployment.env)),
        "is_reference": deployment.trial.is_reference,
        "gain": study.gain,
        "objective": {
            "maximize": study.spec.objective.maximize.value,
            "preemption_weight": study.spec.objective.preemption_weight,
        },
        "versions": dict(study.versions),
        "trial": trial_document(deployment.trial, study.trials),
        "reference": trial_document(study.reference, study.trials) if study.reference else None,
        "space_file": study.spec.text,
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
