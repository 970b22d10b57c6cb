"""What is handed out: one trial's configuration with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.engine.arguments import adapt
from tuner.engine.flags import FlagTable
from tuner.errors import NoResult
from tuner.gain import gain_sentence
from tuner.records import StudyRecord, TrialRecord
from tuner.report.measured import estimate_note
from tuner.report.simulated import trial_note
from tuner.types import JsonValue


@dataclass(frozen=True, slots=True)
class Deployment:
    """The configuration to deploy.

    Attributes:
        flags: as the vLLM that was asked spells them, fixed ones included; without host
            and port, which are the deployment's own.
        notices: what had to be respelled for that vLLM.
    """

    study: StudyRecord
    trial: TrialRecord
    flags: Mapping[str, JsonValue]
    env: Mapping[str, str]
    notices: tuple[str, ...]

    @property
    def model(self) -> str:
        """The model folder or hub id."""
        return self.study.spec.server.model

    def evidence(self) -> list[str]:
        """Why this configuration, as lines of prose for a comment."""
        trial, measured = self.trial, self.trial.measurement
        note = trial_note(trial)
        lines = [note] if note else []
        lines += [
            f"Study {self.study.name}, trial {trial.number}, measured with "
            + ", ".join(f"{part} {number}" for part, number in self.study.versions.items())
        ]
        if measured is not None:
            lines.append(
                f"{measured.output_throughput_tokens_per_s:.1f} output tokens/s, "
                f"{measured.counters.preemptions} preemptions, "
                f"{measured.served} of {measured.offered} requests served, "
                f"score {trial.score or 0.0:.1f} (one measurement)"
            )
        if (estimate := estimate_note(self.study)) is not None:
            lines.append(estimate)
        lines.append(gain_sentence(self.study))
        lines.append("Relative paths are seen from the folder in which the study was run.")
        return lines


def best_deployment(study: StudyRecord, flags: FlagTable | None) -> Deployment:
    """The best configuration of a study, in the spelling of the vLLM of `flags`.

    Raises:
        NoResult: no configuration worked.
    """
    best = study.best
    if best is None or best.config is None:
        raise NoResult(
            f"no configuration of the study {study.name!r} worked",
            f"`tuner status {study.name}` shows what failed, and why",
        )
    adapted = adapt(best.config.args, flags)
    return Deployment(study, best, adapted.args, dict(best.config.env), adapted.notices)
