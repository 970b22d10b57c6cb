"""The messages of a study that cannot go on: what is wrong, and what to do about it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tuner.engine.advice import advice
from tuner.errors import EnvironmentProblem, NoResult
from tuner.records import StudyRecord, TrialRecord
from tuner.redact import redact_text
from tuner.types import Failure, FailureCause, Measurement, Outcome, StudySpec, Verdict

NOTHING_SERVED = "nothing_served"
"""In place of a cause: it started, and no request was served."""

_GO_ON = "run the same command again: the study goes on where it stopped"
_FULL_BELOW_BYTES = 256 * 2**20
"""vLLM writes files of this size into its compile cache."""


def environment_problem(failure: Failure, folder: Path | None = None) -> EnvironmentProblem:
    """A failure that no configuration can mend.

    Args:
        folder: where the trial writes.
    """
    where = f"its log: {failure.log_path}; " if failure.log_path is not None else ""
    line = redact_text(failure.line)
    if failure.cause is FailureCause.DISK_FULL and (full := ", ".join(_full_disks(folder))):
        line = f"{line}; no room left in {full}"
    steps = [step.rstrip(".") for step in advice(failure)[:2]]
    what = "; ".join([*steps, f"then {_GO_ON}"]) if steps else f"mend it and {_GO_ON}"
    return EnvironmentProblem(
        f"the server cannot run here ({failure.cause}): {line}", f"{where}{what}"
    )


def hopeless(broken: Sequence[TrialRecord], study: StudyRecord) -> NoResult:
    """A study whose starts all fail.

    Args:
        broken: the trials in a row that failed, the last one last.
    """
    never = study.best is None
    since = "and none was measured before" if never else f"the best is still no. {_best(study)}"
    return NoResult(
        f"{len(broken)} trials in a row failed, {since}: {_causes(broken)}{_said(broken)}",
        f"{_what_to_do(broken, study.spec)}; then {_GO_ON}",
    )


def nothing_worked(study: StudyRecord) -> NoResult:
    """A study that came to its end without a configuration that may win."""
    failed = [trial for trial in study.trials if trial.state.finished]
    told = f": {_causes(failed)}{_said(failed)}" if failed else ""
    return NoResult(
        f"no configuration of the study {study.name!r} worked{told}",
        f"{_what_to_do(failed, study.spec)}; `tuner status {study.name}` lists the trials",
    )


def unsaved(
    problem: EnvironmentProblem, number: int, outcome: Outcome, verdict: Verdict
) -> EnvironmentProblem:
    """A finished trial whose record could not be written: its figures, lest they are lost."""
    if isinstance(outcome, Measurement):
        figures = (
            f"score {verdict.score:.1f}, {outcome.output_throughput_tokens_per_s:.1f} output "
            f"tokens/s, {outcome.counters.preemptions} preemptions, {outcome.served} of "
            f"{outcome.offered} requests served"
        )
    else:
        figures = f"{outcome.cause} while {outcome.stage}: {redact_text(outcome.line)}"
    return EnvironmentProblem(
        f"trial {number} is over, but its record could not be written: {problem.message}\n"
        f"  trial {number}: {figures}",
        f"{problem.hint}; trial {number} is taken from its outcome.json, or run once more",
    )


def _best(study: StudyRecord) -> int | None:
    return study.best.number if study.best is not None else None


def _cause(trial: TrialRecord) -> str:
    return trial.failure.cause.value if trial.failure is not None else NOTHING_SERVED


def _causes(trials: Sequence[TrialRecord]) -> str:
    counted = Counter(_cause(trial) for trial in trials)
    return ", ".join(f"{count} x {cause}" for cause, count in counted.most_common())


def _said(trials: Sequence[TrialRecord]) -> str:
    """The line that most of them ended with, numbers apart."""
    lines = [redact_text(t.failure.line) for t in trials if t.failure is not None]
    if not lines:
        return ""
    shape, count = Counter(_shape(line) for line in lines).most_common(1)[0]
    line = next(line for line in reversed(lines) if _shape(line) == shape)
    often = f"{count} of them say" if count > 1 else "one says"
    return f"\n  {often}: {line.strip()}"


def _shape(line: str) -> str:
    return re.sub(r"\d+(?:\.\d+)?", "#", line)


def _what_to_do(trials: Sequence[TrialRecord], spec: StudySpec) -> str:
    """The first advice for the most frequent cause, and which log to read."""
    failed = [trial for trial in trials if trial.failure is not None]
    if not failed:
        return "see that the requests fit the model: `tuner check` compares their lengths"
    cause, _ = Counter(_cause(trial) for trial in failed).most_common(1)[0]
    trial = next(t for t in reversed(failed) if _cause(t) == cause)
    assert trial.failure is not None
    first = next(iter(advice(trial.failure, trial.config)), "")
    log = trial.failure.log_path or (trial.directory and trial.directory / "server.log")
    read = f"read {log}" if log else f"read the log of trial {trial.number}"
    parts = [
        part for part in (first.rstrip("."), read, f"change {spec.path} or the machine") if part
    ]
    return "; ".join(parts)


def _full_disks(folder: Path | None) -> Iterator[str]:
    """Which of the places that a server writes to have no room, such as `/tmp (12 MiB free)`."""
    home = Path.home()
    places = [
        folder or Path.cwd(),
        Path(tempfile.gettempdir()),
        Path("/dev/shm"),
        Path(os.environ.get("HF_HOME", home / ".cache/huggingface")),
        Path(os.environ.get("VLLM_CACHE_ROOT", home / ".cache/vllm")),
        home,
    ]
    seen = set()
    for place in places:
        try:
            device, free = place.stat().st_dev, shutil.disk_usage(place).free
        except OSError:
            continue
        if device not in seen and free < _FULL_BELOW_BYTES:
            yield f"{place} ({free // 2**20} MiB free)"
        seen.add(device)
