"""`tuner diagnose`: what a log tells, on a page or as JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from tuner.engine.diagnosis import Diagnosis, stage_words
from tuner.report.plain import plain, plain_line
from tuner.types import Blame, FailureCause, JsonValue

_NARROWEST = 24
"""Columns of a terminal below which lines are no longer wrapped for it."""

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
    }


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """The verdict, the decisive line and its numbers, what to change, the lines around it."""
    is_fine = diagnosis.cause is FailureCause.NONE
    console.print(Text(_headline(diagnosis), "bold green" if is_fine else "bold red"))
    if is_fine:
        return
    # Lines of a log are not wrapped: they are pasted into searches and reports.
    console.print(Text(plain_line(diagnosis.line)), highlight=False, soft_wrap=True)
    if diagnosis.numbers:
        console.print(Text(shown_numbers(diagnosis.numbers)), highlight=False)
    if diagnosis.advice:
        console.print(Text("\nWhat to change:", "bold"))
        numbered = Text(_numbered(diagnosis.advice, console.width))
        console.print(numbered, highlight=False, soft_wrap=True)
    if diagnosis.excerpt:
        console.print(Text("\nThe log around it:", "bold"))
        excerpt = Text(plain(diagnosis.excerpt), "dim")
        console.print(excerpt, highlight=False, soft_wrap=True)


def shown_numbers(numbers: Mapping[str, float]) -> str:
    """Such as "needed 24 GiB, available 3.18 GiB"; small sizes in MiB."""
    return ", ".join(_shown_number(name, value) for name, value in numbers.items())


def _headline(diagnosis: Diagnosis) -> str:
    version = f" (vLLM {plain_line(diagnosis.vllm_version)})" if diagnosis.vllm_version else ""
    if diagnosis.cause is FailureCause.NONE:
        return f"{diagnosis.cause.value}{version}: {plain_line(diagnosis.line)}"
    retry = "a retry may help" if diagnosis.retry else "a retry does not help"
    return (
        f"{diagnosis.cause.value} while {stage_words(diagnosis.stage)}{version}: "
        f"{_BLAMED[diagnosis.blame]}, {retry}"
    )


def _numbered(steps: Sequence[str], width: int) -> str:
    """A list whose wrapped lines hang under their text; flags are not cut at their hyphens."""
    items = []
    for number, step in enumerate(steps, 1):
        begin = f"{number:>2}. "
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
