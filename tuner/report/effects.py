"""Settings that changed nothing, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from tuner.effects import no_effects
from tuner.records import StudyRecord, TrialRecord
from tuner.report.plain import plain_line
from tuner.types import JsonValue

_NAMED_TRIALS = 5


def effect_rows(trial: TrialRecord, trials: Sequence[TrialRecord]) -> Iterator[tuple[str, str]]:
    """For `tuner show`: a label and a sentence for each parameter without effect.

    Args:
        trials: of the study.
    """
    for effect in no_effects(trial, trials):
        yield "no effect", plain_line(effect.text)


def effect_sentences(study: StudyRecord) -> list[str]:
    """For `tuner status`: one sentence for each parameter and reason, with its trials."""
    return [
        f"{parameter} had no effect in {_trials(where, study.finished_trials)}: {why}"
        for (parameter, why), where in _by_reason(study).items()
    ]


def effect_documents(study: StudyRecord) -> list[JsonValue]:
    """The same for scripts."""
    return [
        {"parameter": parameter, "why": why, "trials": list(where)}
        for (parameter, why), where in _by_reason(study).items()
    ]


def trial_effect_documents(trial: TrialRecord, trials: Sequence[TrialRecord]) -> list[JsonValue]:
    """`effect_rows` for scripts."""
    return [
        {"parameter": effect.parameter, "why": effect.why, "text": plain_line(effect.text)}
        for effect in no_effects(trial, trials)
    ]


def print_effects(console: Console, study: StudyRecord) -> None:
    """The same, printed; nothing where all parameters had an effect."""
    for sentence in effect_sentences(study):
        console.print(
            f"note: {sentence}", style="dim", highlight=False, markup=False, soft_wrap=True
        )


def _by_reason(study: StudyRecord) -> dict[tuple[str, str], list[int]]:
    """The numbers of the finished trials in which a parameter had no effect for one reason."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for trial in study.trials:
        if trial.state.finished:
            for effect in no_effects(trial, study.trials):
                numbers.setdefault(effect.key, []).append(trial.number)
    return numbers


def _trials(numbers: Sequence[int], finished: int) -> str:
    if len(numbers) == finished and finished > 1:
        return "any trial"
    named = ", ".join(str(number) for number in numbers[:_NAMED_TRIALS])
    more = len(numbers) - _NAMED_TRIALS
    noun = "trial" if len(numbers) == 1 else "trials"
    return f"{noun} {named}" + (f" and {more} more" if more > 0 else "")
