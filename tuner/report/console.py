"""A running study on a terminal, and as plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from rich.text import Text

from tuner.engine.diagnosis import stage_words
from tuner.gain import gain_sentence
from tuner.records import StudyRecord, TrialRecord, TrialState
from tuner.redact import redact_text
from tuner.report.effects import print_effects
from tuner.report.measured import ESTIMATES, estimate_note, promise_note
from tuner.report.plain import plain_line
from tuner.report.simulated import study_note
from tuner.stopping import Ending, remaining_s
from tuner.types import (
    BudgetSpec,
    Failure,
    JsonValue,
    Measurement,
    Percentiles,
    Progress,
    Suggestion,
)

_OUTCOME_WIDTH = 72
_FAILURE_WIDTH = 110


class ConsoleListener:
    """Prints one line a trial, and keeps a live line of what is going on now.

    Use as a context manager, so that the live line is gone when anything else is printed.
    """

    def __init__(self, console: Console, budget: BudgetSpec | None = None) -> None:
        self._console = console
        self._budget = budget or BudgetSpec(None, None)
        self._status: Status | None = None
        self._trial = ""
        self._ends_s: float | None = None
        self._said = ""
        self._usual_s: dict[str, float] = {}  # how long each activity took in the last trial
        self._last: Progress | None = None

    def __enter__(self) -> ConsoleListener:
        if self._console.is_terminal:
            self._status = self._console.status("preparing", spinner="dots")
            self._status.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def notice(self, text: str) -> None:
        """A line that is not about a trial."""
        self._console.print(
            f"[dim]{escape(redact_text(text))}[/dim]", highlight=False, soft_wrap=True
        )

    def trial_started(self, suggestion: Suggestion, study: StudyRecord) -> None:
        """Names the trial; without a terminal, prints it."""
        total = f"/{self._budget.trials}" if self._budget.trials is not None else ""
        self._trial = f"trial {study.finished_trials + 1}{total} (no. {suggestion.number})"
        left_s = remaining_s(study, self._budget)
        self._ends_s = None if left_s is None else time.monotonic() + left_s
        self._said = ""
        if self._status is None:
            what = shown_params(suggestion.params, is_reference=suggestion.is_reference)
            self._print(f"{self._trial}: {what}{self._left()}")

    def progress(self, progress: Progress) -> None:
        """Refreshes the live line; without a terminal, says each activity once."""
        if self._last is not None and progress.activity != self._last.activity:
            self._usual_s[self._last.activity] = self._last.elapsed_s
        self._last = progress
        if self._status is None:
            self._say_once(progress)
            return
        elapsed = duration(progress.elapsed_s)
        total_s = progress.total_s or self._usual_s.get(progress.activity)
        if total_s is not None:
            elapsed = f"{elapsed} of ~{duration(total_s)}"
        detail = f", {progress.detail}" if progress.detail else ""
        prefix = f"{self._trial}: " if self._trial else ""
        line = f"{prefix}{progress.activity} {elapsed}{detail}{self._left()}"
        self._status.update(Text(line, no_wrap=True, overflow="ellipsis"))

    def _left(self) -> str:
        """Such as ", ~12 min 05 s left"; nothing where it is not known, or is over."""
        left_s = 0.0 if self._ends_s is None else self._ends_s - time.monotonic()
        return f", ~{duration(left_s)} left" if left_s >= 1 else ""

    def _say_once(self, progress: Progress) -> None:
        """Each activity, and of a start each stage; a counter of requests would fill a log."""
        stage = (
            f": {progress.detail}" if progress.activity == "starting" and progress.detail else ""
        )
        said = progress.activity + stage
        if said != self._said:
            self._said = said
            self._print(f"  {said} ...")

    def trial_finished(self, trial: TrialRecord, study: StudyRecord) -> None:
        """The line that stays."""
        is_best = study.best is not None and study.best.number == trial.number
        self._console.print(_trial_line(trial, is_best=is_best), highlight=False, soft_wrap=True)

    def _print(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)


def outcome_line(trial: TrialRecord) -> str:
    """A trial's outcome in one line: figures, or the failure's name and line."""
    match trial.outcome:
        case Measurement() as measured:
            failed = measured.offered - measured.served
            parts = [
                f"score {_shown_score(trial)}{_mark(measured)}",
                f"{measured.output_throughput_tokens_per_s:.1f} tok/s",
                f"{measured.counters.preemptions} preempted",
                *_goodput(measured),
                f"TTFT p99 {_ms(measured.ttft_s)}",
                f"TPOT p99 {_ms(measured.tpot_s)}",
            ]
            if failed:
                parts.append(f"{failed} of {measured.offered} requests not served")
            return ", ".join(parts)
        case Failure() as failure:
            return _shortened(
                f"{failure.cause.value} while {stage_words(failure.stage)}: {failure.line}"
            )
        case None:
            return trial.state.value


def _shown_score(trial: TrialRecord) -> str:
    """Such as `612.4 ±1.8%`; of a load `12.5 (11 to 14)`."""
    shown = f"{trial.score or 0.0:.1f}"
    measured = trial.measurement
    if measured is None:
        return shown
    if (rate := measured.rate) is not None:
        client = ", a bound of the load, not of the server" if rate.limited_by else ""
        return f"{shown} ({rate.interval.low:.4g} to {rate.interval.high:.4g}{client})"
    return f"{shown} ±{measured.interval.half_width:.1%}" if measured.interval else shown


def _goodput(measured: Measurement) -> list[str]:
    goodput = measured.goodput_per_s
    return [] if goodput is None else [f"goodput {goodput:.2f}/s"]


def _mark(measured: Measurement) -> str:
    return " (estimate)" if measured.end in ESTIMATES else ""


def _shortened(text: str) -> str:
    one_line = plain_line(text)
    return one_line if len(one_line) <= _FAILURE_WIDTH else one_line[: _FAILURE_WIDTH - 1] + "…"


def _ms(latency: Percentiles | None) -> str:
    return "-" if latency is None else f"{latency.p99 * 1000:.0f} ms"


def shown_params(params: Mapping[str, JsonValue], *, is_reference: bool = False) -> str:
    """Parameters as one line."""
    values = " ".join(f"{name}={shown_value(name, value)}" for name, value in params.items())
    if not is_reference:
        return values
    return f"reference: {values}" if values else "reference: vLLM's defaults"


def shown_value(name: str, value: JsonValue) -> str:
    """The value of a parameter as a person writes it in YAML; bytes as `16MiB`."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and name.endswith("-bytes"):
        return _shown_bytes(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _shown_bytes(value: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return str(value)


def duration(seconds: float) -> str:
    """Such as `42 s`, `3 min 10 s`, `2 h 05 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def print_summary(console: Console, study: StudyRecord, ending: Ending | None) -> None:
    """The end of a run: why it ended, the best, the gain, and which settings did nothing."""
    if ending is not None:
        console.print(f"\n{ending.value}: {_counts(study)}", highlight=False, soft_wrap=True)
    if study.best is None:
        console.print("no configuration worked so far", style="red", highlight=False)
    else:
        console.print(comparison_table(study))
        console.print(gain_sentence(study), highlight=False, soft_wrap=True)
    if (estimate := estimate_note(study)) is not None:
        console.print(estimate, highlight=False, soft_wrap=True)
    if (broken := promise_note(study)) is not None:
        console.print(broken, style="yellow", highlight=False, soft_wrap=True)
    print_effects(console, study)
    if (note := study_note(study)) is not None:
        console.print(note, style="bold yellow", highlight=False, soft_wrap=True)


def print_status(console: Console, study: StudyRecord) -> None:
    """`tuner status`: one line a trial, then where the study stands."""
    budget = study.spec.budget
    total = f" of {budget.trials}" if budget.trials is not None else ""
    console.print(
        f"{study.name}: {study.state.value}, {study.finished_trials}{total} trials, "
        f"{_counts(study)}",
        highlight=False,
    )
    best = study.best
    for trial in study.trials:
        is_best = best is not None and trial.number == best.number
        console.print(_trial_line(trial, is_best=is_best), highlight=False, soft_wrap=True)
    print_summary(console, study, None)


def _trial_line(trial: TrialRecord, *, is_best: bool) -> Text:
    style = "red" if trial.failure else ("bold green" if is_best else "")
    what = shown_params(trial.params, is_reference=trial.is_reference)
    marker = "*" if is_best else " "
    return Text(
        f"{marker}{trial.number:>4}  {outcome_line(trial):<{_OUTCOME_WIDTH}}  {what}", style
    )


def comparison_table(study: StudyRecord) -> Table:
    """Reference and best side by side."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    columns = [("reference", study.reference), ("best", study.best)]
    for name, trial in columns:
        table.add_column(name + (f" (no. {trial.number})" if trial else ""), justify="right")
    trials = [trial for _, trial in columns]
    table.add_row("score", *(_score_of(trial) for trial in trials))
    for label, figure in _FIGURES:
        measured = (trial.measurement if trial else None for trial in trials)
        cells = [figure(m) if m else "-" for m in measured]
        if label not in _WHERE_KNOWN or any(cell != "-" for cell in cells):
            table.add_row(label, *cells)
    for knob in study.spec.search_space:
        table.add_row(
            knob.name, *(_value_of(trial, knob.name) if trial else "-" for trial in trials)
        )
    return table


def _counts(study: StudyRecord) -> str:
    measured = sum(t.state is TrialState.MEASURED for t in study.trials)
    failed = sum(t.state is TrialState.INFEASIBLE for t in study.trials)
    spent = duration(study.time_spent_s)
    return f"{measured} measured, {failed} could not serve, {spent} in trials"


def _score_of(trial: TrialRecord | None) -> str:
    if trial is None:
        return "-"
    return trial.failure.cause.value if trial.failure else _shown_score(trial)


def _value_of(trial: TrialRecord, name: str) -> str:
    if name in trial.params:
        return shown_value(name, trial.params[name])
    effective = trial.effective.get(name)
    return "default" if effective is None else f"{shown_value(name, effective)} (default)"


_FIGURES: list[tuple[str, Callable[[Measurement], str]]] = [
    ("output tokens/s", lambda m: f"{m.output_throughput_tokens_per_s:.1f}"),
    ("goodput, requests/s", lambda m: "-" if m.goodput_per_s is None else f"{m.goodput_per_s:.2f}"),
    ("in the SLO", lambda m: "-" if m.slo_kept is None else f"{m.slo_kept:.0%}"),
    ("preemptions", lambda m: str(m.counters.preemptions)),
    ("TTFT p99", lambda m: _ms(m.ttft_s)),
    ("TPOT p99", lambda m: _ms(m.tpot_s)),
    ("requests served", lambda m: f"{m.served} of {m.offered}"),
    ("KV cache tokens", lambda m: str(m.memory.kv_cache_tokens or "-")),
    ("KV cache peak", lambda m: f"{m.counters.kv_cache_usage_peak:.0%}"),
]

_WHERE_KNOWN = frozenset({"goodput, requests/s", "in the SLO"})
"""Rows that are left out where there is nothing to say."""
