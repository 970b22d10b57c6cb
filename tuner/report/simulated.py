"""What every report says of figures that were measured on the stand-in for vLLM."""

from __future__ import annotations

import re

from tuner.records import StudyRecord, TrialRecord

_NOTE = "SIMULATED: measured on a stand-in for vLLM; no figure is of a real device"


def study_note(study: StudyRecord) -> str | None:
    """A sentence for a study; None where all of it is real."""
    return _note(study.versions.get("vLLM")) if study.simulated else None


def trial_note(trial: TrialRecord) -> str | None:
    """The same for one trial."""
    if trial.outcome is None or not trial.simulated:
        return None
    return _note(trial.outcome.memory.vllm_version)


def _note(version: str | None) -> str:
    """With the speed at which the stand-in's time passed; its version tells."""
    speed = re.search(r"\+simulated\.x(.+)$", version or "")
    return f"{_NOTE}, and its time passed {speed[1]} times as fast." if speed else f"{_NOTE}."
