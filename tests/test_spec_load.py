"""`workload:`, `slo:` and `measure:` of a space file: what they mean, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner import spec
from tuner.errors import InputError
from tuner.types import (
    ArrivalKind,
    LengthBin,
    LengthKind,
    LengthSpec,
    MeasureSpec,
    Metric,
    SharedPrefixSpec,
    SloLimit,
    SloMetric,
    StudySpec,
    WorkloadKind,
    WorkloadSpec,
)

LENGTHS = "input_tokens: 64, output_tokens: 16"
SYNTHETIC = f"kind: synthetic, {LENGTHS}, requests: 9"
CLOSED = f"{SYNTHETIC}, concurrency: 4"
TRACE = "kind: trace, path: t.csv, requests: 9"
LIKE = "kind: like-server, url: http://h:8000/metrics, requests: 9"


def text_of(workload: str, more: str = "") -> str:
    """The workload is in line 3, more begins in line 4."""
    return f"server: {{model: m}}\nsearch_space: {{a: [1, 2]}}\nworkload: {{{workload}}}\n{more}"


def study(workload: str = CLOSED, more: str = "") -> StudySpec:
    return spec.parse(text_of(workload, more), Path("some-study.yaml"))


def workload(text: str) -> WorkloadSpec:
    return study(text).workload


# --- what is meant -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "lengths"),
    [
        ("512", LengthSpec(512)),
        ("2K", LengthSpec(2048)),
        ("{mean: 512}", LengthSpec(512)),
        ("{mean: 512, stdev: 128, min: 16, max: 2K}", LengthSpec(512, 128, 16, 2048)),
        ("{distribution: normal, mean: 512}", LengthSpec(512)),
        (
            "{distribution: uniform, min: 10, max: 100}",
            LengthSpec(55, 0, 10, 100, LengthKind.UNIFORM),
        ),
        (
            "{distribution: lognormal, mean: 512, stdev: 400, max: 4096}",
            LengthSpec(512, 400, 1, 4096, LengthKind.LOGNORMAL),
        ),
        (
            "{histogram: {1-100: 3, 101 - 200: 1, 512: 0}, max: 150}",
            LengthSpec(
                0.75 * 50.5 + 0.25 * 150.5,
                0,
                1,
                150,
                LengthKind.HISTOGRAM,
                (LengthBin(1, 100, 3.0), LengthBin(101, 200, 1.0)),
            ),
        ),
        (
            "{histogram: {512: 2, 64: 1}}",
            LengthSpec(
                (64 + 2 * 512) / 3,
                kind=LengthKind.HISTOGRAM,
                bins=(LengthBin(64, 64, 1.0), LengthBin(512, 512, 2.0)),
            ),
        ),
    ],
)
def test_parse_reads_lengths(written: str, lengths: LengthSpec) -> None:
    found = workload(f"{CLOSED}".replace("input_tokens: 64", f"input_tokens: {written}"))
    assert found.input_tokens == lengths


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (CLOSED, {"concurrency": 4, "levels": (), "arrivals": ArrivalKind.POISSON}),
        (f"{SYNTHETIC}, concurrency: [8, 64]", {"concurrency": 8, "levels": (8.0, 64.0)}),
        (f"{SYNTHETIC}, concurrency: [8]", {"concurrency": 8, "levels": ()}),
        (
            f"{SYNTHETIC}, request_rate: [2, 0.5]",
            {"request_rate_per_s": 2.0, "levels": (2.0, 0.5), "concurrency": None},
        ),
        (
            f"{SYNTHETIC}, request_rate: 4, arrivals: constant",
            {"arrivals": ArrivalKind.CONSTANT, "request_rate_per_s": 4.0},
        ),
        (
            f"{SYNTHETIC}, request_rate: 4, arrivals: ramp, ramp-to: 16, burstiness: 0.5",
            {"arrivals": ArrivalKind.RAMP, "ramp_to_per_s": 16.0, "burstiness": 0.5},
        ),
        (TRACE, {"arrivals": ArrivalKind.TRACE, "concurrency": None, "request_rate_per_s": None}),
        (f"{TRACE}, speedup: 2.5", {"arrivals": ArrivalKind.TRACE, "speedup": 2.5}),
        (f"{TRACE}, concurrency: 4", {"arrivals": ArrivalKind.POISSON, "concurrency": 4}),
        (f"{TRACE}, request_rate: 4", {"arrivals": ArrivalKind.POISSON}),
        (
            f"{TRACE}, request_rate: 4, arrivals: trace",
            {"arrivals": ArrivalKind.TRACE, "request_rate_per_s": 4.0},
        ),
        (f"{TRACE}, scale: 0.5", {"input_scale": 0.5, "output_scale": 0.5}),
        (f"{TRACE}, scale: {{input: 0.25}}", {"input_scale": 0.25, "output_scale": 1.0}),
        (
            f"{TRACE}, max_input_tokens: 2K, max-output-tokens: 64, output_tokens: 32",
            {
                "max_input_tokens": 2048,
                "max_output_tokens": 64,
                "output_tokens": LengthSpec(32),
                "input_tokens": None,
            },
        ),
        (f"{CLOSED}, turns: 5", {"turns": 5}),
        (f"{CLOSED}, shared_prefix: {{tokens: 32}}", {"shared_prefix": SharedPrefixSpec(32, 1)}),
        (
            f"{CLOSED}, shared_prefix: {{tokens: 32, groups: 4}}",
            {"shared_prefix": SharedPrefixSpec(32, 4)},
        ),
        (LIKE, {"url": "http://h:8000/metrics", "request_rate_per_s": None, "warmup_requests": 8}),
        (f"{LIKE}, concurrency: 3, scale: 0.1", {"concurrency": 3, "input_scale": 0.1}),
        (f"{SYNTHETIC}, concurrency: [2, 5]", {"warmup_requests": 5}),
    ],
)
def test_parse_reads_a_workload(written: str, expected: dict[str, Any]) -> None:
    found = workload(written)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("kind", [k for k in WorkloadKind if k not in ("synthetic", "like-server")])
def test_parse_reads_every_kind_of_file(kind: WorkloadKind) -> None:
    found = workload(f"kind: {kind}, path: ~nobody-at-all/x.gz, requests: 9, concurrency: 2")
    assert found.kind is kind
    assert found.path == Path("~nobody-at-all/x.gz")


def test_parse_reads_an_slo_from_either_place() -> None:
    written = "slo: {ttft_p99: 500ms, tpot-p90: 50ms, ITL_p99.9: 0.2s, e2e: 10s}\n"
    limits = (
        SloLimit(SloMetric.TTFT, 0.5, 99.0),
        SloLimit(SloMetric.TPOT, 0.05, 90.0),
        SloLimit(SloMetric.ITL, 0.2, 99.9),
        SloLimit(SloMetric.E2E, 10.0, 99.0),
    )
    assert study(more=written).objective.slo == limits
    inside = study(more="objective:\n  maximize: goodput\n  " + written)
    assert inside.objective.slo == limits
    assert inside.objective.maximize is Metric.GOODPUT
    assert study().objective.slo == ()


@pytest.mark.parametrize(
    ("written", "measure"),
    [
        ("", MeasureSpec()),
        ("measure:\n", MeasureSpec()),
        (
            "measure: {precision: 5%, confidence: 90%, stop_worse: false, time: 5m}\n",
            MeasureSpec(0.05, 0.9, stop_worse=False, time_s=300.0),
        ),
        ("measure: {precision: 0}\n", MeasureSpec(0.0)),
        ("measure: {precision: 0.5 %}\n", MeasureSpec(0.005)),
        ("measure: {precision: 0.01, confidence: 0.99}\n", MeasureSpec(0.01, 0.99)),
    ],
)
def test_parse_reads_how_long_is_measured(written: str, measure: MeasureSpec) -> None:
    assert study(more=written).measure == measure


# --- what is refused ---------------------------------------------------------------------

BAD_LENGTHS = {
    "uniform without max": ("{distribution: uniform, min: 4}", "input_tokens.max"),
    "uniform with mean": ("{distribution: uniform, mean: 4, max: 9}", "input_tokens.mean"),
    "uniform as a key": ("{uniform: [1, 9]}", "input_tokens.uniform"),
    "lognormal without stdev": ("{distribution: lognormal, mean: 4}", "input_tokens.stdev"),
    "lognormal without mean": ("{distribution: lognormal, stdev: 4}", "input_tokens.mean"),
    "unknown distribution": ("{distribution: gauss, mean: 4}", "one of normal, uniform"),
    "histogram as a list": ("{histogram: [1, 2]}", "histogram: {1-128: 60"),
    "histogram of nothing": ("{histogram: {}}", "input_tokens.histogram"),
    "histogram with a word": ("{histogram: {few: 1}}", "input_tokens.histogram.few"),
    "histogram from zero": ("{histogram: {0-5: 1}}", "from 1 at least"),
    "histogram that falls": ("{histogram: {9-5: 1}}", "must rise"),
    "histogram with a negative weight": ("{histogram: {1-5: -1}}", "weight"),
    "histogram without weight": ("{histogram: {1-5: 0}}", "no weight above 0"),
    "histogram that overlaps": ("{histogram: {1-5: 1, 5-9: 1}}", "length 5 in two ranges"),
    "histogram with mean": ("{histogram: {1-5: 1}, mean: 4}", "input_tokens.mean"),
    "too long": ("99999999999", "at most"),
}
BAD_WORKLOADS = {
    # name: (workload, words of the message or hint)
    "azure without path": ("kind: azure, requests: 9", "`workload` of kind azure needs a file"),
    "trace with url": (f"{TRACE}, url: http://h/", "`workload.url`"),
    "trace with input": (f"{TRACE}, input_tokens: 5", "`workload.input_tokens`"),
    "trace with turns": (f"{TRACE}, turns: 2", "`workload.turns`"),
    "trace with prefix": (f"{TRACE}, shared_prefix: {{tokens: 5}}", "`workload.shared_prefix`"),
    "synthetic with scale": (f"{CLOSED}, scale: 0.5", "`workload.scale`"),
    "synthetic with limit": (f"{CLOSED}, max_input_tokens: 5", "`workload.max_input_tokens`"),
    "synthetic with trace": (f"{SYNTHETIC}, arrivals: trace", "has no times"),
    "batch without load": ("kind: openai-batch, path: x, requests: 9", "concurrency or"),
    "like-server without url": ("kind: like-server, requests: 9", "http://127.0.0.1:8000/metrics"),
    "like-server with input": (f"{LIKE}, input_tokens: 5", "`workload.input_tokens`"),
    "like-server with trace": (f"{LIKE}, arrivals: trace", "has no times"),
    "url without host": (LIKE.replace("h:8000", ""), "`workload.url`"),
    "url of a file": (LIKE.replace("http://h:8000/metrics", "'file:///x'"), "http:// address"),
    "url with port": (LIKE.replace("h:8000", "h:port"), "http:// address"),
    "url with password": (LIKE.replace("h:8000", "u:p@h"), "name or password"),
    "scale of zero": (f"{TRACE}, scale: 0", "`workload.scale.input`"),
    "scale as a word": (f"{TRACE}, scale: half", "{input: 0.25, output: 0.5}"),
    "scale with a slip": (f"{TRACE}, scale: {{inputs: 1}}", "`input`"),
    "levels of nothing": (f"{SYNTHETIC}, concurrency: []", "`workload.concurrency`"),
    "level twice": (f"{SYNTHETIC}, concurrency: [4, 4]", "a level twice"),
    "level of zero": (f"{SYNTHETIC}, request_rate: [4, 0]", "`workload.request_rate`"),
    "too many levels": (f"{SYNTHETIC}, concurrency: {list(range(1, 30))}", "list of 1 to 20"),
    "level as a list": (f"{SYNTHETIC}, concurrency: [[4]]", "whole number"),
    "arrivals in a closed loop": (f"{CLOSED}, arrivals: constant", "`workload.arrivals`"),
    "replay in a closed loop": (f"{TRACE}, concurrency: 4, arrivals: trace", "workload.arrivals"),
    "speedup in a closed loop": (f"{TRACE}, concurrency: 4, speedup: 2", "`workload.speedup`"),
    "unknown arrivals": (f"{SYNTHETIC}, request_rate: 4, arrivals: poison", "`poisson`"),
    "constant with burstiness": (
        f"{SYNTHETIC}, request_rate: 4, arrivals: constant, burstiness: 2",
        "does not shape arrivals of kind constant",
    ),
    "ramp without end": (f"{SYNTHETIC}, request_rate: 4, arrivals: ramp", "ramp_to: 16"),
    "ramp without begin": (f"{SYNTHETIC}, arrivals: ramp, ramp_to: 4", "concurrency or"),
    "ramp with levels": (
        f"{SYNTHETIC}, request_rate: [4, 5], arrivals: ramp, ramp_to: 9",
        "`workload.request_rate` has several",
    ),
    "end without ramp": (f"{SYNTHETIC}, request_rate: 4, ramp_to: 9", "arrivals: ramp"),
    "speedup without trace": (f"{SYNTHETIC}, request_rate: 4, speedup: 2", "`workload.speedup`"),
    "speedup and rate": (
        f"{TRACE}, arrivals: trace, request_rate: 4, speedup: 2",
        "`workload.speedup`",
    ),
    "prefix without tokens": (f"{CLOSED}, shared_prefix: {{groups: 2}}", "shared_prefix.tokens"),
    "prefix as a number": (f"{CLOSED}, shared_prefix: 32", "{tokens: …, groups: …}"),
    "prefix as long as the input": (
        f"{CLOSED}, shared_prefix: {{tokens: 64}}",
        "`workload.shared_prefix` has 64",
    ),
    "no turns": (f"{CLOSED}, turns: 0", "`workload.turns`"),
}
BAD_MORE = {
    # name: (lines behind the workload, line, words)
    "slo twice": ("slo: {ttft: 1s}\nobjective: {slo: {ttft: 1s}}\n", 4, "written twice"),
    "slo of nothing": ("slo: {}\n", 4, "ttft_p99: 500ms"),
    "slo as a list": ("slo: [ttft]\n", 4, "ttft_p99: 500ms"),
    "slo with a slip": ("slo:\n  ttft: 1s\n  ttfp_p99: 1s\n", 6, "`ttft_p99`"),
    "slo with an odd percentile": ("slo: {ttft_p42: 1s}\n", 4, "p99.9"),
    "slo with a word": ("slo:\n  ttft: 1s\n  e2e: soon\n", 6, "`slo.e2e` must be a duration"),
    "slo of no time": ("slo: {ttft: 0}\n", 4, "longer than nothing"),
    "slo limit twice": ("slo: {ttft: 1s, ttft-p99: 2s}\n", 4, "written twice"),
    "slo without a unit": ("slo:\n  e2e: 2s\n  ttft_p99: 200\n", 6, "200ms or 0.2s"),
    "slo without a unit in quotes": ('slo: {ttft_p99: "0.5"}\n', 4, "500ms or 0.5s"),
    "slo limit in the objective": ("objective:\n  slo: {tpot: x}\n", 5, "objective.slo.tpot"),
    "goodput without slo": ("objective: {maximize: goodput}\n", 4, "needs an SLO"),
    "max_rate without slo": ("objective: {maximize: max_rate}\n", 4, "needs an SLO"),
    "unknown key in measure": ("measure: {precison: 2%}\n", 4, "`precision`"),
    "precision without sign": ("measure: {precision: 2}\n", 4, "`precision: 2%`"),
    "precision as a word": ("measure: {precision: fine}\n", 4, "`precision: 2%`"),
    "negative precision": ("measure: {precision: -2%}\n", 4, "measure.precision"),
    "certain": ("measure: {confidence: 100%}\n", 4, "`confidence: 95%`"),
    "confidence without sign": ("measure: {confidence: 95}\n", 4, "`confidence: 95%`"),
    "hardly confident": ("measure: {confidence: 20%}\n", 4, "50% to 99.9%"),
    "stop_worse as a word": ("measure: {stop_worse: maybe}\n", 4, "true or false"),
    "no measuring time": ("measure: {time: 0}\n", 4, "measure.time"),
}


def refused(text: str, line: int) -> str:
    with pytest.raises(InputError) as caught:
        spec.parse(text, Path("space.yaml"))
    assert caught.value.message.startswith(f"space.yaml:{line}: "), str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", BAD_LENGTHS)
def test_parse_refuses_lengths_and_says_what_to_write(name: str) -> None:
    written, words = BAD_LENGTHS[name]
    text = text_of(CLOSED.replace("input_tokens: 64", f"input_tokens: {written}"))
    assert words in refused(text, 3)


@pytest.mark.parametrize("name", BAD_WORKLOADS)
def test_parse_refuses_a_workload_and_says_what_to_write(name: str) -> None:
    written, words = BAD_WORKLOADS[name]
    assert words in refused(text_of(written), 3)


@pytest.mark.parametrize("name", BAD_MORE)
def test_parse_refuses_promises_and_measures_and_says_what_to_write(name: str) -> None:
    written, line, words = BAD_MORE[name]
    assert words in refused(text_of(CLOSED, written), line)


def test_parse_refuses_max_rate_with_levels() -> None:
    more = "objective: {maximize: max_rate}\nslo: {ttft: 1s}\n"
    text = text_of(f"{SYNTHETIC}, concurrency: [2, 4]", more)
    assert "max_rate looks for one itself" in refused(text, 3)
    assert study(CLOSED, more).objective.maximize is Metric.MAX_RATE


def test_load_needs_the_file_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text_of(TRACE.replace("t.csv", str(tmp_path / "t.csv"))))
    with pytest.raises(InputError, match=r"space\.yaml:3: .*there is no file .*t\.csv"):
        spec.load(path)


# --- remarks -----------------------------------------------------------------------------

SLO = "slo: {ttft_p99: 500ms}\n"


@pytest.mark.parametrize(
    ("written", "more", "words"),
    [
        (f"{SYNTHETIC}, request_rate: 4", "", "`request_rate: 4` offers its rate and no more"),
        (TRACE, "", "the open loop offers its rate and no more"),
        (f"{SYNTHETIC}, concurrency: [2, 30]", "", "concurrency 30 is never reached"),
        (CLOSED, SLO, "the `slo` is only told"),
    ],
)
def test_warnings_tell_what_a_load_does_not_show(written: str, more: str, words: str) -> None:
    (remark,) = spec.warnings(study(written, more))
    assert words in remark


QUICK = "server: {model: m, env: {SIMULATED_SPEED: 8}}\n"


@pytest.mark.parametrize(
    ("workload", "more", "words"),
    [
        (f"{SYNTHETIC}, request_rate: 4", "objective: {maximize: goodput}\n", "arrivals and the"),
        (CLOSED, "objective: {maximize: goodput}\n", "but the `slo` is in real time"),
    ],
)
def test_warnings_tell_that_nobody_speeds_up_the_clients_time(
    workload: str, more: str, words: str
) -> None:
    text = text_of(workload, more + SLO).replace("server: {model: m}\n", QUICK)
    (remark,) = spec.warnings(spec.parse(text, Path("s.yaml")))
    assert "`SIMULATED_SPEED: 8` the server is 8 times faster" in remark
    assert words in remark


def test_warnings_say_nothing_of_a_quick_stand_in_without_times() -> None:
    text = text_of(CLOSED, "").replace("server: {model: m}\n", QUICK)
    assert spec.warnings(spec.parse(text, Path("s.yaml"))) == []


@pytest.mark.parametrize("metric", ["goodput", "max_rate"])
def test_warnings_are_none_for_an_open_loop_under_an_slo(metric: str) -> None:
    more = f"objective: {{maximize: {metric}}}\n{SLO}"
    assert spec.warnings(study(f"{SYNTHETIC}, request_rate: 4", more)) == []


# --- any text ----------------------------------------------------------------------------

_WORDS = """
    kind path url input_tokens output_tokens shared_prefix turns scale concurrency arrivals
    request_rate burstiness ramp_to speedup mean stdev min max distribution histogram tokens
    groups input output ttft_p99 slo measure precision confidence maximize
"""
_KEYS = st.sampled_from(_WORDS.split())
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-1, 70)
    | st.floats(0, 9)
    | st.sampled_from(
        ["trace", "azure", "ramp", "poisson", "2%", "5s", "uniform", "goodput", "1-9", "http://h"]
    )
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_KEYS, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["1-9", "10", "x"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(_KEYS, _TREES, max_size=3),
    st.dictionaries(st.sampled_from(["slo", "measure", "objective"]), _TREES, max_size=2),
)
def test_parse_of_any_values_raises_input_errors_only(
    changes: dict[str, Any], more: dict[str, Any]
) -> None:
    sections = yaml.safe_load(text_of(CLOSED)) | more
    sections["workload"] |= changes
    message = ""
    try:
        spec.parse(yaml.safe_dump(sections), Path("some-study.yaml"))
    except InputError as error:
        message = error.message
    assert not message or re.match(r"some-study\.yaml:\d+: ", message)
