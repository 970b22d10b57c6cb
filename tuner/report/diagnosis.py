"""`tuner diagnose`: what a log tells, on a page or as JSON."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from tuner.engine.diagnosis import Diagnosis, stage_words
from tuner.report.plain import plain, plain_line
from tuner.types import Blame, FailureCause, JsonValue

_NARROWEST = 24
"""Columns of a terminal below which lines are no longer wrapped for it."""

_EXCERPT_BEFORE = 7
_EXCERPT_AFTER = 2
"""Lines of the log around the decisive one: with more of them the advice scrolls away."""

_LONGEST_SHOWN = 400

_BLAMED = {
    Blame.CONFIGURATION: "the configuration is to blame",
    Blame.ENVIRONMENT: "the environment is to blame",
    Blame.UNKNOWN: "whose fault it is, the log does not tell",
}


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, JsonValue]:
    """`tuner diagnose --json`; sizes in `numbers` are GiB where the name ends with `_gib`."""
    version = diagnosis.vllm_version
    return {
        "cause": diagnosis.cause.value,
        "stage": diagnosis.stage.value,
        "blame": diagnosis.blame.value,
        "retry": diagnosis.retry,
        "line": plain_line(diagnosis.line),
        "numbers": dict(diagnosis.numbers),
        "advice": [plain_line(step) for step in diagnosis.advice],
        "vllm_version": None if version is None else plain_line(version),
        "excerpt": plain(diagnosis.excerpt),
        "starts": diagnosis.starts,
        "earlier": [cause.value for cause in diagnosis.earlier],
    }


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """The verdict, the decisive line and its numbers, what to change, the lines around it.

    What goes into a file or a pipe is not wrapped.
    """
    is_fine = diagnosis.cause is FailureCause.NONE
    headline = Text(_headline(diagnosis), "bold green" if is_fine else "bold red")
    console.print(headline, soft_wrap=not console.is_terminal)
    if is_fine:
        return
    # Lines of a log are not wrapped: they are pasted into searches and reports.
    console.print(Text(plain_line(diagnosis.line)), highlight=False, soft_wrap=True)
    if diagnosis.numbers:
        _print_plain(console, shown_numbers(diagnosis.numbers))
    if diagnosis.exit_note:
        _print_plain(console, plain_line(diagnosis.exit_note))
    if diagnosis.advice:
        is_change = diagnosis.blame is Blame.CONFIGURATION
        console.print(Text(f"\nWhat to {'change' if is_change else 'do'}:", "bold"))
        width = console.width if console.is_terminal else None
        console.print(Text(_numbered(diagnosis.advice, width)), highlight=False, soft_wrap=True)
    if diagnosis.excerpt:
        shown, of = _around(plain(diagnosis.excerpt).splitlines(), plain_line(diagnosis.line))
        more = f" ({len(shown)} of {of} lines, --json has all)" if len(shown) < of else ""
        _print_plain(console, "")
        console.print(Text(f"The log around it{more}:", "bold"), soft_wrap=True)
        console.print(Text("\n".join(shown), "dim"), highlight=False, soft_wrap=True)


def _print_plain(console: Console, text: str) -> None:
    console.print(Text(text), highlight=False, soft_wrap=not console.is_terminal)


def _around(lines: Sequence[str], decisive: str) -> tuple[list[str], int]:
    """Few lines with the decisive one among them, the last where it is not, and of how many."""
    begin = decisive[:60]
    at = [n for n, line in enumerate(lines) if begin and begin in " ".join(line.split())]
    centre = at[-1] if at else len(lines) - 1 - _EXCERPT_AFTER
    first = max(0, min(centre - _EXCERPT_BEFORE, len(lines) - _EXCERPT_BEFORE - _EXCERPT_AFTER - 1))
    shown = lines[first : first + _EXCERPT_BEFORE + _EXCERPT_AFTER + 1]
    cut = [f"{line[:_LONGEST_SHOWN]} …" if len(line) > _LONGEST_SHOWN else line for line in shown]
    return cut, len(lines)


def shown_numbers(numbers: Mapping[str, float]) -> str:
    """Such as "needed 24 GiB, available 3.18 GiB"; small sizes in MiB."""
    return ", ".join(_shown_number(name, value) for name, value in numbers.items())


def _headline(diagnosis: Diagnosis) -> str:
    verdict = _verdict(diagnosis)
    if diagnosis.starts == 1:
        return verdict
    counted = Counter(cause.value for cause in diagnosis.earlier)
    before = ", ".join(f"{cause} x{n}" if n > 1 else cause for cause, n in counted.items())
    return f"{diagnosis.starts} starts in this log; the last one: {verdict}; before: {before}"


def _verdict(diagnosis: Diagnosis) -> str:
    version = f" (vLLM {plain_line(diagnosis.vllm_version)})" if diagnosis.vllm_version else ""
    if diagnosis.cause is FailureCause.NONE:
        return f"{diagnosis.cause.value}{version}: {plain_line(diagnosis.line)}"
    if not diagnosis.phase_known:
        return (
            "out of device memory, phase unknown: this is only a part of a log; give the whole log"
        )
    retry = "a retry may help" if diagnosis.retry else "a retry does not help"
    while_ = f" while {stage_words(diagnosis.stage)}" if diagnosis.stage_known else ""
    return f"{diagnosis.cause.value}{while_}{version}: {_BLAMED[diagnosis.blame]}, {retry}"


def _numbered(steps: Sequence[str], width: int | None) -> str:
    """A list whose wrapped lines hang under their text; flags are not cut at their hyphens."""
    items = []
    for number, step in enumerate(steps, 1):
        begin = f"{number:>2}. "
        if width is None:
            items.append(begin + plain_line(step))
            continue
        wrapped = textwrap.fill(
            plain_line(step),
            max(width, _NARROWEST),
            initial_indent=begin,
            subsequent_indent=" " * len(begin),
            break_on_hyphens=False,
        )
        items.append(wrapped)
    return "\n".join(items)


def _shown_number(name: str, value: float) -> str:
    words, unit = re.fullmatch(r"(.*?)(_gib|_tokens|)", name.lower()).groups()  # type: ignore[union-attr]
    words = words.replace("_", " ")
    if unit == "_gib":
        # vLLM writes GiB with two decimals, and MiB where that says nothing.
        is_fine = 0 < abs(value) < 0.1 and round(value, 2) != value
        return f"{words} {value * 1024:.4g} MiB" if is_fine else f"{words} {value:.5g} GiB"
    shown = f"{value:.0f}" if value.is_integer() else f"{value:g}"
    return f"{words} {shown}{' tokens' if unit else ''}"
