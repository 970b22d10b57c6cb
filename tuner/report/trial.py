"""`tuner show`: one trial on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from tuner.engine.arguments import shell_line
from tuner.engine.diagnosis import stage_words
from tuner.records import Attempt, TrialRecord
from tuner.report.console import duration, shown_params, shown_value
from tuner.report.diagnosis import shown_numbers
from tuner.report.documents import trial_advice
from tuner.report.effects import effect_rows
from tuner.report.measured import measurement_rows
from tuner.report.plain import plain, plain_line
from tuner.report.simulated import trial_note
from tuner.types import Failure, Measurement, MemoryFacts

_LABEL_WIDTH = 16


def print_trial(console: Console, trial: TrialRecord, trials: Sequence[TrialRecord]) -> None:
    """Parameters, command line, measurement or failure, memory facts, where its log is.

    Args:
        trials: of the study: some settings are seen to have no effect by comparison alone.
    """
    console.print(_title(trial), highlight=False)
    if (note := trial_note(trial)) is not None:
        console.print(note, style="bold yellow", highlight=False, soft_wrap=True)
    for label, value in _rows(trial, trials):
        # Not a table: a command line must come out as one line that can be pasted.
        line = Text(f"{label:<{_LABEL_WIDTH}}", "dim").append(value, "not dim")
        console.print(line, highlight=False, soft_wrap=True)


def _title(trial: TrialRecord) -> Text:
    took = f", {duration(trial.duration_s)}" if trial.duration_s else ""
    score = f", score {trial.score:.2f}" if trial.score is not None else ""
    return Text(f"trial {trial.number}: {trial.state.value}{score}{took}", "bold")


def _rows(trial: TrialRecord, trials: Sequence[TrialRecord]) -> Iterator[tuple[str, str]]:
    yield "parameters", shown_params(trial.params, is_reference=trial.is_reference)
    if trial.effective:
        values = (f"{name}={shown_value(name, value)}" for name, value in trial.effective.items())
        yield "in effect", " ".join(values)
    yield from effect_rows(trial, trials)
    if trial.command:
        yield "command", shell_line(trial.command, trial.config.env if trial.config else None)
    yield from _attempt_rows(trial.number, trial.attempts)
    match trial.outcome:
        case Measurement() as measured:
            yield from measurement_rows(measured)
            yield from _memory_rows(measured.memory)
        case Failure() as failure:
            yield from _failure_rows(failure)
            yield from _advice_rows(trial_advice(trial))
            yield from _memory_rows(failure.memory)
    if trial.constraints:
        yield "constraints", " ".join(f"{k}={v:.3f}" for k, v in trial.constraints.items())
    if trial.directory is not None:
        yield "server log", str(trial.directory / "server.log")
        yield "launch record", str(trial.directory / "launch.json")


def _attempt_rows(own: int, attempts: Sequence[Attempt]) -> Iterator[tuple[str, str]]:
    """The starts that failed before the last one."""
    for number, attempt in enumerate(attempts, 1):
        where = (
            "" if attempt.trial == own else f" (its log is in the folder of no. {attempt.trial})"
        )
        yield (
            f"attempt {number}",
            f"{attempt.cause.value} while {stage_words(attempt.stage)}: "
            f"{plain_line(attempt.line)}; {attempt.then}{where}",
        )


def _failure_rows(failure: Failure) -> Iterator[tuple[str, str]]:
    yield "failure", f"{failure.cause.value} while {stage_words(failure.stage)}"
    yield "line", plain_line(failure.line)
    if failure.numbers:
        yield "numbers", shown_numbers(failure.numbers)
    if failure.exit_code is not None:
        yield "exit code", str(failure.exit_code)
    if failure.excerpt:
        yield "log", plain(failure.excerpt)


def _advice_rows(steps: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, step in enumerate(steps, 1):
        yield "advice" if number == 1 else "", f"{number}. {plain_line(step)}"


def _memory_rows(memory: MemoryFacts) -> Iterator[tuple[str, str]]:
    facts = [
        ("vLLM", memory.vllm_version, ""),
        ("weights", memory.weights_gib, " GiB"),
        ("KV cache", memory.kv_cache_gib, " GiB"),
        ("KV cache tokens", memory.kv_cache_tokens, ""),
        ("max. concurrency", memory.max_concurrency, "x"),
        ("max-model-len", memory.max_model_len_tokens, " tokens"),
        ("CUDA graphs", memory.graph_gib, " GiB"),
        ("start-up", memory.startup_s, " s"),
    ]
    known = [f"{name} {_fact(value)}{unit}" for name, value, unit in facts if value is not None]
    if known:
        yield "server", ", ".join(known)


def _fact(value: str | float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
