"""What `tuner workload` shows."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tuner.load.traces.statistics import CHARACTERS_PER_TOKEN, Lengths, TraceSummary
from tuner.report.console import duration
from tuner.types import JsonValue


def print_workload(console: Console, summary: TraceSummary) -> None:
    """Counts, lengths, times and what may not be meant, each in a line or two."""
    refused = f"{summary.refused.total:,} rows refused" if summary.refused.total else "none refused"
    _say(console, f"{summary.path}: {summary.format}, {summary.requests:,} requests, {refused}")
    console.print(_lengths_table(summary))
    _say(console, f"arrivals: {_arrivals(summary)}")
    _say(console, f"shared prefixes: {_shared(summary)}")
    _say(console, f"longer than max-model-len {_exceeding(summary)}")
    for reason, count in summary.refused.counts.items():
        lines = ", ".join(map(str, summary.refused.lines[reason]))
        _say(console, f"refused: {count:,} rows: {reason} (first in line {lines})")
    for note in _notes(summary):
        _say(console, f"note: {note}")


def workload_document(summary: TraceSummary) -> dict[str, JsonValue]:
    """`tuner workload --json`."""
    return {
        "file": str(summary.path),
        "format": summary.format.value,
        "requests": summary.requests,
        "refused": summary.refused.total,
        "refused_reasons": {r.value: count for r, count in summary.refused.counts.items()},
        "input_tokens": _lengths_document(summary.input_tokens),
        "output_tokens": _lengths_document(summary.output_tokens),
        "estimated_tokens": summary.estimated_tokens,
        "duration_s": summary.duration_s,
        "request_rate": summary.request_rate_per_s,
        "burstiness": summary.burstiness,
        "shared_prefix_fraction": summary.shared_prefix_fraction,
        "exceeding": [asdict(exceeding) for exceeding in summary.exceeding],
        "untimed": summary.untimed,
        "out_of_order": summary.out_of_order,
    }


def _lengths_document(lengths: Lengths | None) -> JsonValue:
    return None if lengths is None else asdict(lengths)


def _lengths_table(summary: TraceSummary) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tokens")
    for heading in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right")
    for name, lengths in (("input", summary.input_tokens), ("output", summary.output_tokens)):
        if lengths is None:
            table.add_row(name, "not in the file")
            continue
        figures = (lengths.mean, lengths.p50, lengths.p90, lengths.p99, lengths.max)
        table.add_row(name, *(f"{figure:.0f}" for figure in figures))
    return table


def _arrivals(summary: TraceSummary) -> str:
    if summary.duration_s is None:
        return "not in the file"
    if summary.request_rate_per_s is None:
        return "all at once"
    if summary.burstiness is None:
        spread = "evenly spaced"
    else:
        spread = f"burstiness {summary.burstiness:.3g} (1 is Poisson, below is burstier)"
    rate = f"{summary.request_rate_per_s:.3g} requests/s"
    return f"{rate} over {duration(summary.duration_s)}, {spread}"


def _shared(summary: TraceSummary) -> str:
    if summary.shared_prefix_fraction is None:
        return "unknown, the file has only lengths"
    return f"{summary.shared_prefix_fraction:.1%} of the input begins as an earlier request did"


def _exceeding(summary: TraceSummary) -> str:
    """Such as `2048: 2,838 (14.7%), 4096: 0`; after the first context that holds all, nothing."""
    shown = []
    for context in summary.exceeding:
        share = f" ({context.requests / summary.requests:.1%})" if context.requests else ""
        shown.append(f"{context.max_model_len}: {context.requests:,}{share}")
        if not context.requests:
            break
    return ", ".join(shown)


def _notes(summary: TraceSummary) -> list[str]:
    notes = []
    if summary.estimated_tokens:
        notes.append(
            f"lengths of texts are estimates of {CHARACTERS_PER_TOKEN} characters a token; "
            "the served model's tokenizer decides"
        )
    if summary.out_of_order:
        notes.append(
            f"{summary.out_of_order:,} requests come after a later one; a replay sorts them"
        )
    if summary.untimed:
        notes.append(f"{summary.untimed:,} requests have no time of arrival")
    return notes


def _say(console: Console, text: str) -> None:
    console.print(Text(text), highlight=False, soft_wrap=True)
