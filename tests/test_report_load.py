"""In which words a load, an SLO and the end of a measurement are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import study_spec, workload

from tuner.report.load import load_document, measure_words, slo_words, trace_figures, workload_words
from tuner.types import (
    ArrivalKind,
    LengthBin,
    LengthKind,
    LengthSpec,
    MeasureSpec,
    ObjectiveSpec,
    SharedPrefixSpec,
    SloLimit,
    SloMetric,
    WorkloadKind,
    WorkloadSpec,
)

OPEN: dict[str, Any] = {"concurrency": None, "request_rate_per_s": 2.5}
FILE: dict[str, Any] = {
    "kind": WorkloadKind.AZURE,
    "path": Path("a.csv"),
    "input_tokens": None,
    "output_tokens": None,
}
REPLAY: dict[str, Any] = {**FILE, "concurrency": None, "arrivals": ArrivalKind.TRACE}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "8 requests of 16 input and 8 output tokens, 4 in flight"),
        ({"levels": (4.0, 16.0)}, "4, then 16 in flight"),
        (OPEN, "2.5 a second, at random"),
        ({**OPEN, "burstiness": 0.5}, "2.5 a second, at random (burstiness 0.5)"),
        ({**OPEN, "arrivals": ArrivalKind.CONSTANT}, "2.5 a second, evenly spaced"),
        (
            {**OPEN, "arrivals": ArrivalKind.RAMP, "ramp_to_per_s": 9.0},
            "2.5 a second rising to 9",
        ),
        (REPLAY, "from a.csv, at the recorded times"),
        ({**REPLAY, "speedup": 3.0}, "at the recorded times, 3 times as fast"),
        ({**REPLAY, "request_rate_per_s": 3.0}, "3 a second, spaced as recorded"),
        ({**FILE, "input_scale": 0.25}, "from a.csv, lengths times 0.25 and 1, 4 in flight"),
        ({**FILE, "output_tokens": LengthSpec(9)}, "from a.csv with 9 output tokens"),
        ({"turns": 3}, "in conversations of 3 turns"),
        ({"shared_prefix": SharedPrefixSpec(8, 2)}, "8 of them shared in 2 groups"),
        ({"input_tokens": LengthSpec(16, 4)}, "of about 16 input"),
        ({"input_tokens": LengthSpec(5, 0, 2, 8, LengthKind.UNIFORM)}, "of 2 to 8 input"),
        (
            {"input_tokens": LengthSpec(5, kind=LengthKind.HISTOGRAM, bins=(LengthBin(1, 9, 1),))},
            "of about 5 (histogram) input",
        ),
    ],
)
def test_workload_words_tell_what_is_sent(changes: dict[str, Any], words: str) -> None:
    assert words in workload_words(replace(workload(), **changes))


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (
            MeasureSpec(),
            "until the score is known to ±2% (95% confidence), or all 8 requests are answered, "
            "or it is clearly worse than the best so far",
        ),
        (MeasureSpec(0.0, stop_worse=False), "until all 8 requests are answered"),
        (
            MeasureSpec(0.0, stop_worse=False, time_s=300.0),
            "until all 8 requests are answered, or 5 min 00 s are over",
        ),
    ],
)
def test_measure_words_tell_when_a_measurement_ends(measure: MeasureSpec, words: str) -> None:
    assert measure_words(measure, 8) == words


def test_slo_words_are_those_of_the_space_file() -> None:
    limits = (SloLimit(SloMetric.TTFT, 0.5), SloLimit(SloMetric.ITL, 0.08, 99.9))
    assert slo_words(limits) == "ttft_p99 500 ms, itl_p99.9 80 ms"
    document = load_document(study_spec(objective=ObjectiveSpec(slo=limits)))
    assert document["slo"] == {"ttft_p99": 0.5, "itl_p99.9": 0.08}
    assert document["workload"] == {
        "kind": "synthetic",
        "requests": 8,
        "concurrency": 4,
        "request_rate": None,
        "levels": [],
        "arrivals": None,
    }


# --- a file of recorded requests ---------------------------------------------------------


def recorded(tmp_path: Path, **changes: Any) -> WorkloadSpec:
    """Three requests in 2 s."""
    path = tmp_path / "a.csv"
    rows = ((0, 10, 5), (1, 20, 7), (2, 60, 9))
    lines = [f"2024-05-12 00:00:{at_s:02d}.0Z,{sent},{asked}" for at_s, sent, asked in rows]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    few: dict[str, Any] = {**REPLAY, "path": path, "requests": 3, "warmup_requests": 0}
    return replace(workload(), **(few | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "at the recorded times: 1 a second over 2 s"),
        ({"speedup": 4.0}, "at the recorded times, 4 times as fast: 4 a second over 0 s"),
        ({"request_rate_per_s": 0.01}, "0.01 a second, spaced as recorded: 0.01 a second over 3"),
        ({"requests": 1}, "at the recorded times: all at once over 0 s"),
        ({}, "(mean 30 input and 7 output tokens)"),
        ({"input_scale": 0.5, "output_scale": 2.0}, "(mean 15 input and 14 output tokens)"),
    ],
)
def test_workload_words_tell_what_a_trace_comes_to(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    spec = recorded(tmp_path, **changes)
    assert words in workload_words(spec, trace_figures(spec))


def test_workload_words_of_a_trace_in_a_closed_loop_tell_lengths_only(tmp_path: Path) -> None:
    spec = recorded(tmp_path, concurrency=4)
    assert workload_words(spec, trace_figures(spec)).endswith(
        "(mean 30 input and 7 output tokens), 4 in flight"
    )


def test_workload_words_say_that_lengths_of_texts_are_estimates(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": "eight ch", "output_tokens": 6}\n')
    of_texts = {"kind": WorkloadKind.CUSTOM, "path": path, "requests": 1, "concurrency": 1}
    spec = recorded(tmp_path, **of_texts, arrivals=ArrivalKind.POISSON)
    assert "(mean 2 input and 6 output tokens, estimated from texts)" in workload_words(
        spec, trace_figures(spec)
    )


def test_trace_figures_are_in_the_document(tmp_path: Path) -> None:
    spec = study_spec(workload=recorded(tmp_path, speedup=2.0))
    assert load_document(spec, trace_figures(spec.workload))["trace"] == {
        "input_tokens": 30.0,
        "output_tokens": 7.0,
        "estimated": False,
        "duration_s": 1.0,
        "rate_per_s": 2.0,
    }
    assert trace_figures(workload()) is None
    assert load_document(study_spec())["trace"] is None
