"""`tuner show`: one trial on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from tuner.engine.arguments import shell_line
from tuner.records import TrialRecord
from tuner.report.console import duration, shown_params, shown_value
from tuner.report.documents import trial_advice
from tuner.report.measured import measurement_rows
from tuner.report.plain import plain, plain_line
from tuner.report.simulated import trial_note
from tuner.types import Failure, Measurement, MemoryFacts

_LABEL_WIDTH = 16


def print_trial(console: Console, trial: TrialRecord) -> None:
    """Parameters, command line, measurement or failure, memory facts, where its log is."""
    console.print(_title(trial), highlight=False)
    if (note := trial_note(trial)) is not None:
        console.print(note, style="bold yellow", highlight=False, soft_wrap=True)
    for label, value in _rows(trial):
        # Not a table: a command line must come out as one line that can be pasted.
        line = Text(f"{label:<{_LABEL_WIDTH}}", "dim").append(value, "not dim")
        console.print(line, highlight=False, soft_wrap=True)


def _title(trial: TrialRecord) -> Text:
    took = f", {duration(trial.duration_s)}" if trial.duration_s else ""
    score = f", score {trial.score:.2f}" if trial.score is not None else ""
    return Text(f"trial {trial.number}: {trial.state.value}{score}{took}", "bold")


def _rows(trial: TrialRecord) -> Iterator[tuple[str, str]]:
    yield "parameters", shown_params(trial.params, is_reference=trial.is_reference)
    if trial.effective:
        values = (f"{name}={shown_value(name, value)}" for name, value in trial.effective.items())
        yield "in effect", " ".join(values)
    if trial.command:
        yield "command", shell_line(trial.command, trial.config.env if trial.config else None)
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


def _failure_rows(failure: Failure) -> Iterator[tuple[str, str]]:
    yield "failure", f"{failure.cause.value} while {failure.stage.value}"
    yield "line", plain_line(failure.line)
    if failure.numbers:
        yield "numbers", ", ".join(f"{name}={value:g}" for name, value in failure.numbers.items())
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
