"""What `tuner check` shows."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tuner.engine.arguments import shell_line
from tuner.findings import ASSUMED_PROBES, ASSUMED_START_S, ASSUMED_TPOT_S, Findings
from tuner.report.console import duration, shown_value
from tuner.report.load import (
    load_document,
    measure_words,
    slo_words,
    trace_figures,
    workload_words,
)
from tuner.types import Choice, FloatRange, IntRange, JsonValue, Knob, Metric


def print_check(console: Console, findings: Findings) -> None:
    """The parameters, the first launch, size and time, and what may not be meant."""
    spec = findings.spec
    console.print(Text(f"{spec.path}: study {spec.name}, no error"), highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("parameter", "searched", "vLLM's default"):
        table.add_column(heading, overflow="fold")
    for knob in spec.search_space:
        default = findings.defaults.get(knob.name)
        known = (
            ("unset" if default is None else shown_value(knob.name, default))
            if knob.name in findings.defaults
            else "unknown"
        )
        table.add_row(knob.name, Text(_range(knob)), Text(known))
    console.print(table)
    for constraint in spec.constraints:
        _say(console, f"constraint (line {constraint.line}): {constraint.text}")
    _say(console, f"workload: {workload_words(spec.workload, trace_figures(spec.workload))}")
    objective = spec.objective
    under = f" under {slo_words(objective.slo)}" if objective.slo else ""
    _say(console, f"objective: {objective.maximize}{under}")
    _say(console, f"measured: {measure_words(spec.measure, spec.workload.requests)}")
    _say(console, f"points: {_points(findings)}")
    _say(console, f"first launch: {shell_line(findings.command, findings.env)}")
    _say(console, f"time: {_time(findings)}")
    if findings.unchecked:
        _say(console, f"not checked against vLLM: {findings.unchecked}")
    for remark in findings.remarks:
        _say(console, f"note: {remark}")


def check_document(findings: Findings) -> dict[str, JsonValue]:
    """`tuner check --json`."""
    spec = findings.spec
    return {
        "study": spec.name,
        "model": spec.server.model,
        "parameters": [
            {
                "name": knob.name,
                "searched": _range_document(knob),
                "default": findings.defaults.get(knob.name),
            }
            for knob in spec.search_space
        ],
        "constraints": [constraint.text for constraint in spec.constraints],
        **load_document(spec, trace_figures(spec.workload)),
        "objective": spec.objective.maximize.value,
        "points": findings.points,
        "command": list(findings.command),
        "env": dict(findings.env),
        "estimated_trial_s": round(findings.trial_s, 1),
        "estimated_total_s": round(findings.total_s, 1),
        "estimate_is_measured": findings.trial_s_is_measured,
        "checked_against_vllm": not findings.unchecked,
        "unchecked_because": findings.unchecked or None,
        "warnings": list(findings.remarks),
    }


def _say(console: Console, text: str) -> None:
    console.print(Text(text), highlight=False, soft_wrap=True)


def _range(knob: Knob) -> str:
    match knob:
        case Choice(choices=choices):
            return ", ".join(shown_value(knob.name, choice) for choice in choices)
        case IntRange(low=low, high=high, step=step, log=log):
            extra = " (log)" if log else (f" in steps of {step}" if step != 1 else "")
            shown = (shown_value(knob.name, bound) for bound in (low, high))
            return " .. ".join(shown) + extra
        case FloatRange(low=low, high=high, step=step, log=log):
            extra = " (log)" if log else (f" in steps of {step:g}" if step is not None else "")
            return f"{low:g} .. {high:g}{extra}"


def _range_document(knob: Knob) -> JsonValue:
    if isinstance(knob, Choice):
        return {"choices": list(knob.choices)}
    return {"low": knob.low, "high": knob.high, "step": knob.step, "log": knob.log}


def _points(findings: Findings) -> str:
    if findings.points is None:
        return "unlimited (a range is continuous)"
    excluded = ", constraints not applied" if findings.spec.constraints else ""
    return f"{findings.points:,}{excluded}"


def _time(findings: Findings) -> str:
    searches = findings.spec.objective.maximize is Metric.MAX_RATE
    loads = f", {ASSUMED_PROBES} loads a trial" if searches else ""
    basis = (
        "as the study's trials took so far"
        if findings.trial_s_is_measured
        else f"a guess: {ASSUMED_START_S:g} s a start, {ASSUMED_TPOT_S * 1000:g} ms a token{loads}"
    )
    return f"about {duration(findings.total_s)}, {duration(findings.trial_s)} a trial ({basis})"
