"""Space files: what a good one means, and what is said about a bad one."""

from __future__ import annotations

import errno
import os
import re
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner import spec
from tuner.errors import ExitCode, InputError
from tuner.types import (
    BudgetSpec,
    Choice,
    Constraint,
    FloatRange,
    IntRange,
    JsonValue,
    LengthSpec,
    Metric,
    ObjectiveSpec,
    SamplerKind,
    SearchSpec,
    ServerSpec,
    StudySpec,
    WorkloadKind,
)

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""


GOOD = """\
study: cpu-tiny
server:
  command: [vllm, serve]
  model: ./models/tiny
  args: {tensor-parallel-size: 1}
  env: {VLLM_LOGGING_LEVEL: INFO}
  startup_timeout: 20m
search_space:
  gpu-memory-utilization: {low: 0.70, high: 0.95, step: 0.01}
  max-num-seqs: {low: 16, high: 1024, log: true}
  max-model-len: [4096, 8192, 16384]
  kv-offloading-size: {low: 0, high: 64, step: 4}
  kv-cache-dtype: [auto, fp8]
  env.VLLM_CPU_KVCACHE_SPACE: [1, 2, 4]
constraints:
  - max-num-seqs * 16 <= max-model-len
  - kv-cache-dtype != 'fp8' or max-model-len <= 8192
reference: {max-num-seqs: 256}
workload:
  kind: synthetic
  input_tokens: {mean: 512, stdev: 128, min: 16, max: 2048}
  output_tokens: 128
  requests: 500
  concurrency: 64
objective: {maximize: request_throughput, preemption_weight: 0.5}
budget: {trials: 30, time: 4h}
search: {sampler: gp, seed: 7}
"""

SMALL = """\
server: {model: m}
search_space: {max-num-seqs: [1, 2]}
workload: {kind: synthetic, input_tokens: 8, output_tokens: 8, requests: 9, concurrency: 4}
"""


def parse(text: str) -> StudySpec:
    return spec.parse(text, Path("some-study.yaml"))


def with_space(*lines: str, args: str = "{}", more: str = "") -> str:
    """`SMALL` with other lines as its search space; the first one is line 3."""
    space = "\n".join(f"  {line}" for line in lines)
    return (
        f"server: {{model: m, args: {args}}}\nsearch_space:\n{space}\n"
        "workload: {kind: synthetic, input_tokens: 8, output_tokens: 8, requests: 9, "
        f"concurrency: 4}}\n{more}"
    )


def with_workload(workload: str) -> str:
    """`SMALL` with another workload, in line 3."""
    return f"server: {{model: m}}\nsearch_space: {{a: [1, 2]}}\nworkload: {{{workload}}}\n"


SYNTHETIC = "kind: synthetic, input_tokens: 8, output_tokens: 8, requests: 9"


# --- good files ------------------------------------------------------------------------


def test_parse_reads_every_section() -> None:
    study = parse(GOOD)
    assert study.name == "cpu-tiny"
    assert study.server == ServerSpec(
        command=("vllm", "serve"),
        model="./models/tiny",
        args={"tensor-parallel-size": 1},
        env={"VLLM_LOGGING_LEVEL": "INFO"},
        startup_timeout_s=1200.0,
    )
    assert study.search_space == (
        FloatRange("gpu-memory-utilization", 0.70, 0.95, 0.01),
        IntRange("max-num-seqs", 16, 1024, log=True),
        Choice("max-model-len", (4096, 8192, 16384)),
        IntRange("kv-offloading-size", 0, 64, 4),
        Choice("kv-cache-dtype", ("auto", "fp8")),
        Choice("env.VLLM_CPU_KVCACHE_SPACE", (1, 2, 4)),
    )
    assert study.constraints == (
        Constraint("max-num-seqs * 16 <= max-model-len", 16),
        Constraint("kv-cache-dtype != 'fp8' or max-model-len <= 8192", 17),
    )
    assert study.reference == {"max-num-seqs": 256}
    assert study.workload.input_tokens == LengthSpec(512, 128, 16, 2048)
    assert study.workload.output_tokens == LengthSpec(128)
    assert study.workload.requests == 500
    assert study.workload.concurrency == 64
    assert study.workload.request_rate_per_s is None
    assert study.objective == ObjectiveSpec(Metric.REQUEST_THROUGHPUT, 0.5)
    assert study.budget == BudgetSpec(30, 14400.0)
    assert study.search == SearchSpec(SamplerKind.GP, 7)
    assert study.path == Path("some-study.yaml")
    assert study.text == GOOD


def test_parse_fills_in_defaults() -> None:
    study = parse(SMALL)
    assert study.name == "some-study"
    assert study.server == ServerSpec(("vllm", "serve"), "m", {}, {}, 900.0)
    assert study.constraints == ()
    assert study.reference == {}
    assert study.workload.kind is WorkloadKind.SYNTHETIC
    assert study.workload.warmup_requests == 4
    assert study.workload.request_timeout_s == 600.0
    assert study.workload.burstiness == 1.0
    assert study.workload.seed == 0
    assert study.objective == ObjectiveSpec(Metric.OUTPUT_THROUGHPUT, 1.0)
    assert study.budget == BudgetSpec(30, None)
    assert study.search == SearchSpec(SamplerKind.AUTO, 0)


@pytest.mark.parametrize(
    ("load", "warmup"),
    [
        ("concurrency: 1", 2),
        ("concurrency: 5", 5),
        ("concurrency: 64", 8),
        ("request_rate: 0.5", 8),
        ("concurrency: 64, warmup: 0", 0),
    ],
)
def test_parse_warms_up_with_a_few_requests(load: str, warmup: int) -> None:
    study = parse(with_workload(f"{SYNTHETIC}, {load}"))
    assert study.workload.warmup_requests == warmup


def test_parse_reads_an_open_loop() -> None:
    study = parse(with_workload(f"{SYNTHETIC}, request_rate: 2.5, burstiness: 0.5"))
    assert study.workload.request_rate_per_s == 2.5
    assert study.workload.burstiness == 0.5
    assert study.workload.concurrency is None


def test_parse_takes_the_time_after_which_silence_under_load_is_a_hang() -> None:
    assert parse(GOOD).server.hang_timeout_s == 120.0
    given = GOOD.replace("startup_timeout: 20m", "startup_timeout: 20m\n  hang_timeout: 5m")
    assert parse(given).server.hang_timeout_s == 300.0
    empty = GOOD.replace("startup_timeout: 20m", "startup_timeout: 20m\n  hang_timeout:")
    assert parse(empty).server.hang_timeout_s == 120.0


def test_parse_takes_hyphens_and_underscores_as_the_same() -> None:
    hyphens = parse(GOOD.replace("startup_timeout", "startup-timeout"))
    assert hyphens.server.startup_timeout_s == 1200.0
    underscores = parse(GOOD.replace("max-num-seqs", "max_num_seqs").replace("search_", "search-"))
    assert underscores.search_space == parse(GOOD).search_space
    assert underscores.reference == {"max-num-seqs": 256}
    dashes = parse(GOOD.replace("  max-num-seqs:", "  --max-num-seqs:"))
    assert dashes.search_space == parse(GOOD).search_space


def test_parse_keeps_environment_names_and_dotted_keys_as_written() -> None:
    study = parse(
        with_space(
            "env.My_Var: [1, 2]",
            "compilation_config.cudagraph_mode: [NONE, FULL]",
            "speculative-config: [null, {method: ngram, num_speculative_tokens: 3}]",
            "cudagraph-capture-sizes: [[1, 2, 4], [8]]",
        )
    )
    assert study.search_space == (
        Choice("env.My_Var", (1, 2)),
        Choice("compilation-config.cudagraph_mode", ("NONE", "FULL")),
        Choice("speculative-config", (None, {"method": "ngram", "num_speculative_tokens": 3})),
        Choice("cudagraph-capture-sizes", ([1, 2, 4], [8])),
    )


def test_parse_turns_negated_switches_round() -> None:
    args = "{no-enable-prefix-caching: true, no_enforce_eager: false, no-such: 5}"
    study = parse(with_space("no-async-scheduling: [true, null]", args=args))
    assert study.server.args == {
        "enable-prefix-caching": False,
        "enforce-eager": True,
        "no-such": 5,
    }
    assert study.search_space == (Choice("async-scheduling", (False, None)),)


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("max-model-len: [4K, 8192, 16k, auto]", (4096, 8192, 16000, "auto")),
        ("kv-cache-memory-bytes: [64M, 1GiB, 5]", (64 * 2**20, 2**30, 5)),
        ("kv-offloading-size: [0, 64GiB, 512MiB]", (0, 64, 0.5)),
        ("swap-space: {choices: [4GiB, 8]}", (4, 8)),
        ("cpu-offload-gb: [1GiB]", (1,)),
        ("env.VLLM_CPU_KVCACHE_SPACE: [4GiB, 8]", (4, 8)),
        ("env.OTHER: [4GiB, 8]", ("4GiB", 8)),
        ("kv-cache-dtype: [auto, fp8]", ("auto", "fp8")),
        ("watermark: [1e-3, .5, 1_000]", (0.001, 0.5, 1000)),
        ("enforce-eager: [yes, off]", (True, False)),
        (
            "some-text: ['true', '8', 4:00, 2024-01-01, 010]",
            ("true", "8", "4:00", "2024-01-01", "010"),
        ),
    ],
)
def test_parse_reads_choices(line: str, choices: tuple[JsonValue, ...]) -> None:
    (knob,) = parse(with_space(line)).search_space
    assert isinstance(knob, Choice)
    assert knob.choices == choices
    assert [type(choice) for choice in knob.choices] == [type(choice) for choice in choices]


@pytest.mark.parametrize(
    ("line", "knob"),
    [
        ("a: {low: 1, high: 8}", IntRange("a", 1, 8)),
        ("a: {low: 1, high: 8, log: false, step: null}", IntRange("a", 1, 8)),
        ("a: {low: 1, high: 8.0}", FloatRange("a", 1.0, 8.0)),
        ("a: {low: 0, high: 1, step: 0.25}", FloatRange("a", 0.0, 1.0, 0.25)),
        ("a: {low: 1e-3, high: 1, log: true}", FloatRange("a", 0.001, 1.0, log=True)),
        ("a: {low: 2K, high: 8K, step: 1K}", IntRange("a", 2048, 8192, 1024)),
        ("kv-cache-memory-bytes: {low: 8MiB, high: 1GiB, log: true}",
         IntRange("kv-cache-memory-bytes", 8 * 2**20, 2**30, log=True)),
        ("kv-offloading-size: {low: 0, high: 64GiB, step: 4GiB}",
         IntRange("kv-offloading-size", 0, 64, 4)),
        ("env.VLLM_CPU_KVCACHE_SPACE: {low: 1, high: 4GiB}",
         IntRange("env.VLLM_CPU_KVCACHE_SPACE", 1, 4)),
        ("a: {low: 0, high: 10, step: 4}", IntRange("a", 0, 8, 4)),
        ("a: {low: 0.1, high: 0.95, step: 0.2}", FloatRange("a", 0.1, 0.9, 0.2)),
    ],
)  # fmt: skip
def test_parse_reads_ranges(line: str, knob: IntRange | FloatRange) -> None:
    assert parse(with_space(line)).search_space == (knob,)


def test_parse_reads_fixed_values_and_environment() -> None:
    study = parse(
        "server:\n  model: m\n"
        "  command: [numactl, -N, 0, vllm, serve]\n"
        "  args: {max-model-len: 8K, kv_offloading_size: 64GiB, dtype: null, json: {a: 1}}\n"
        "  env: {A: 1, B: true, C: off, D: 8.10, E: '', VLLM_CPU_KVCACHE_SPACE: 4GiB, F: 8K}\n"
        + SMALL.partition("\n")[2]
    )
    assert study.server.command == ("numactl", "-N", "0", "vllm", "serve")
    assert study.server.args == {
        "max-model-len": 8192,
        "kv-offloading-size": 64,
        "json": {"a": 1},
    }
    assert study.server.env == {
        "A": "1",
        "B": "1",
        "C": "0",
        "D": "8.10",
        "E": "",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "F": "8K",
    }


def test_parse_reads_a_sharegpt_workload() -> None:
    study = parse(with_workload("kind: sharegpt, path: ./data.json, requests: 5, concurrency: 2"))
    assert study.workload.kind is WorkloadKind.SHAREGPT
    assert study.workload.path == Path("data.json")
    assert study.workload.input_tokens is None
    assert study.workload.output_tokens is None


def test_parse_expands_the_home_folder_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse(SMALL.replace("model: m", "model: ~/m")).server.model == "/home/someone/m"
    assert parse(SMALL.replace("model: m", "model: ./m")).server.model == "./m"
    assert parse(SMALL.replace("model: m", "model: org/m")).server.model == "org/m"


def test_parse_reads_a_reference_beyond_the_search_space() -> None:
    more = "reference: {max_num_seqs: 256, block-size: 32, env.X: 1, dtype: null}\n"
    study = parse(with_space("max-num-seqs: [1, 2]", more=more))
    assert study.reference == {"max-num-seqs": 256, "block-size": 32, "env.X": 1, "dtype": None}


def test_parse_takes_empty_optional_sections_as_absent() -> None:
    more = "constraints:\nreference:\nobjective:\nsearch:\nstudy:\n"
    study = parse(with_space("a: [1, 2]", more=more))
    assert study.constraints == ()
    assert study.reference == {}
    assert study.search == SearchSpec()
    assert study.name == "some-study"


def test_parse_accepts_constraints_on_fixed_values() -> None:
    text = with_space("a: [1, 2, 9]", args="{b: 4}", more="constraints: [a <= b]\n")
    assert parse(text).constraints == (Constraint("a <= b", 5),)


def test_parse_names_the_study_after_the_file() -> None:
    assert spec.parse(SMALL, Path("x/my space (1).v2.yaml")).name == "my-space-1-.v2"
    assert parse("study: 2024\n" + SMALL).name == "2024"


# --- bad files -------------------------------------------------------------------------

BAD = {
    # name: (text, line, words of the message or hint)
    "empty": ("", 1, "empty"),
    "only comments": ("# nothing\n", 1, "empty"),
    "a list": ("- a\n- b\n", 1, "a list"),
    "a word": ("hello", 1, "'hello'"),
    "broken yaml": ("server: {model: m\nsearch_space: x", 2, "not valid YAML"),
    "tab": ("server:\n\tmodel: m\n", 2, "no tabs"),
    "two colons": ("server: a: b\n", 1, "not valid YAML"),
    "two documents": (SMALL + "---\n" + SMALL, 4, "another document"),
    "control character": ("server: \x07\n", 1, "character"),
    "python object": ("server: !!python/object/apply:os.system [ls]\n", 1, "tag"),
    "unknown tag": ("server:\n  model: !env HOME\n", 2, "tag"),
    "deep brackets": ("[" * 100_000, 1, "levels"),
    "deep dashes": ("- " * 50_000, 1, "levels"),
    "recursive alias": ("a: &a [*a]\n", 1, "aliases"),
    "undefined alias": ("server: {model: *m}\n", 1, "undefined alias"),
    "alias bomb": (
        "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)),
        1,
        "aliases",
    ),
    "merge key": ("server: {<<: {model: m}}\n", 1, "merge"),
    "key that is a list": ("? [a, b]\n: c\n", 1, "key"),
    "long key": ("k" * 500 + ": 1\n", 1, "too long"),
    "too large": ("# " + "x" * 300_000, 1, "larger"),
    "long number": ("budget: {trials: " + "9" * 5000 + "}\n", 1, "too large"),
    "infinite": (with_space("a: {low: 1, high: .inf}"), 3, "finite"),
    "nan": (with_space("a: [1, .nan]"), 3, "finite"),
    "overflowing": (with_space("a: {low: 1, high: 1e999}"), 3, "finite"),
    "unknown section": (SMALL + "serach: {seed: 1}\n", 4, "`search`"),
    "unknown key in server": ("server: {model: m, modle: n}\n", 1, "`model`"),
    "unknown key in workload": (SMALL.replace("requests", "request"), 3, "`requests`"),
    "unknown key in lengths": (
        SMALL.replace("input_tokens: 8", "input_tokens: {mean: 8, std: 1}"),
        3,
        "`stdev`",
    ),
    "unknown key in objective": (SMALL + "objective: {minimize: x}\n", 4, "`maximize`"),
    "unknown key in budget": (SMALL + "budget:\n  trails: 3\n", 5, "`trials`"),
    "unknown key in search": (SMALL + "search: {sampel: x}\n", 4, "`sampler`"),
    "unknown key in a range": (with_space("a: {low: 1, hihg: 2}"), 3, "`high`"),
    "duplicate section": (SMALL + "server: {model: n}\n", 4, "first in line 1"),
    "duplicate flag": (with_space("a: [1, 2]", "a: [3, 4]"), 4, "first in line 3"),
    "duplicate spelling": (
        with_space("max-num-seqs: [1, 2]", "max_num_seqs: [3, 4]"),
        4,
        "first in line 3",
    ),
    "duplicate dashes": (with_space("a: [1, 2]", "--a: [3, 4]"), 4, "first in line 3"),
    "duplicate negation": (
        with_space("x: [1, 2]", args="{no-a: true, a: true}"),
        1,
        "`a` is written twice",
    ),
    "duplicate section spelling": (SMALL + "search-space: {a: [1, 2]}\n", 4, "twice"),
    "no server": (SMALL.partition("\n")[2], 1, "`server` is missing"),
    "empty server": (SMALL.replace(" {model: m}", ""), 1, "`server` is missing"),
    "server is a word": (SMALL.replace("{model: m}", "vllm"), 1, "mapping"),
    "no model": (SMALL.replace("{model: m}", "{command: [vllm]}"), 1, "`server.model` is missing"),
    "empty model": (SMALL.replace("model: m", "model: ''"), 1, "`server.model`"),
    "model is a number": (SMALL.replace("model: m", "model: 7"), 1, "`server.model`"),
    "command is a text": (
        SMALL.replace("{model: m", "{model: m, command: vllm serve"),
        1,
        "[vllm, serve]",
    ),
    "command is empty": (SMALL.replace("{model: m", "{model: m, command: []"), 1, "command"),
    "command holds a list": (SMALL.replace("{model: m", "{model: m, command: [[a]]"), 1, "words"),
    "startup without unit": (
        SMALL.replace("{model: m", "{model: m, startup_timeout: soon"),
        1,
        "15m",
    ),
    "hang of nothing": (SMALL.replace("{model: m", "{model: m, hang_timeout: 0"), 1, "15m"),
    "startup of nothing": (SMALL.replace("{model: m", "{model: m, startup_timeout: 0s"), 1, "15m"),
    "args is a list": (SMALL.replace("{model: m", "{model: m, args: [a]"), 1, "`server.args`"),
    "args with a bad name": (with_space("a: [1]", args="{max num seqs: 4}"), 1, "flag"),
    "args with a short flag": (with_space("a: [1]", args="{-tp: 4}"), 1, "flag"),
    "args with env": (with_space("a: [1]", args="{env.X: 4}"), 1, "server.env"),
    "args with a bad size": (with_space("a: [1]", args="{max-model-len: 0.3K}"), 1, "307.2"),
    "port": (with_space("a: [1]", args="{port: 8000}"), 1, "`port`"),
    "host": (with_space("a: [1]", args="{host: 0.0.0.0}"), 1, "`host`"),
    "api key": (with_space("a: [1]", args="{api_key: secret}"), 1, "`api-key`"),
    "model as a flag": (with_space("a: [1]", args="{model: m}"), 1, "server.model"),
    "ssl": (with_space("a: [1]", args="{ssl-keyfile: k}"), 1, "`ssl-keyfile`"),
    "headless": (with_space("a: [1]", args="{headless: true}"), 1, "`headless`"),
    "config": (with_space("a: [1]", args="{config: c.yaml}"), 1, "`config`"),
    "searched port": (with_space("port: [8000, 8001]"), 3, "`port`"),
    "reference with a port": (SMALL + "reference: {port: 1}\n", 4, "`port`"),
    "env of the tuner": (
        SMALL.replace("{model: m", "{model: m, env: {TMPDIR: /x}"),
        1,
        "TMPDIR",
    ),
    "env with a bad name": (SMALL.replace("{model: m", "{model: m, env: {A-B: 1}"), 1, "A-B"),
    "env with a list": (SMALL.replace("{model: m", "{model: m, env: {A: [1]}"), 1, "env.A"),
    "env with nothing": (SMALL.replace("{model: m", "{model: m, env: {A: }"), 1, "`A`"),
    "no search space": (SMALL.replace("search_space: {max-num-seqs: [1, 2]}\n", ""), 1, "missing"),
    "empty search space": (SMALL.replace("{max-num-seqs: [1, 2]}", "{}"), 2, "nothing to search"),
    "blank search space": (SMALL.replace(" {max-num-seqs: [1, 2]}", ""), 2, "nothing to search"),
    "search space is a list": (SMALL.replace("{max-num-seqs: [1, 2]}", "[a]"), 2, "mapping"),
    "one value": (with_space("a: 256"), 3, "server.args"),
    "one env value": (with_space("env.A: 256"), 3, "server.env"),
    "no range": (with_space("a:"), 3, "no range"),
    "empty range": (with_space("a: {}"), 3, "no range"),
    "no low": (with_space("a: {high: 2}"), 3, "no `low`"),
    "no high": (with_space("a:", "  low: 2"), 3, "no `high`"),
    "low above high": (with_space("a: {low: 4, high: 2}"), 3, "{low: 2, high: 4}"),
    "low above high below": (with_space("a:", "  high: 2", "  low: 4"), 5, "above its high"),
    "low is high": (with_space("a: {low: 4, high: 4}"), 3, "server.args"),
    "log from zero": (with_space("a: {low: 0, high: 4, log: true}"), 3, "logarithmic"),
    "log from below": (with_space("a: {low: -1.5, high: 4, log: true}"), 3, "logarithmic"),
    "log with step": (with_space("a: {low: 1, high: 4, log: true, step: 1}"), 3, "both step and"),
    "log is a word": (with_space("a: {low: 1, high: 4, log: maybe}"), 3, "true or false"),
    "step of zero": (with_space("a: {low: 1, high: 4, step: 0}"), 3, "above 0"),
    "negative step": (with_space("a: {low: 1, high: 4, step: -1}"), 3, "above 0"),
    "tiny step": (with_space("a: {low: 0, high: 1, step: 1e-12}"), 3, "at least"),
    "large step": (with_space("a: {low: 1, high: 4, step: 5}"), 3, "larger than its range"),
    "low is a word": (with_space("a: {low: few, high: 4}"), 3, "'few'"),
    "high is true": (with_space("a: {low: 1, high: true}"), 3, "number"),
    "step is a list": (with_space("a: {low: 1, high: 4, step: [1]}"), 3, "number"),
    "high beyond floats": (with_space("a: {low: 1, high: 99999999999999999}"), 3, "smaller"),
    "no choices": (with_space("a: []"), 3, "no choices"),
    "choices is a word": (with_space("a: {choices: x}"), 3, "list"),
    "choices and range": (with_space("a: {choices: [1], low: 1}"), 3, "both"),
    "choice twice": (with_space("a: [1, 2, 1]"), 3, "twice"),
    "choice twice in units": (with_space("a:", "- 8192", "- 8K"), 5, "8192 twice"),
    "choice twice as float": (with_space("a: [1, 1.0]"), 3, "twice"),
    "env choice is a list": (with_space("env.A: [[1], 2]"), 3, "env.A"),
    "bad flag": (with_space("max num: [1]"), 3, "flag"),
    "bad env": (with_space("env.A-B: [1]"), 3, "environment"),
    "fixed and searched": (with_space("a: [1]", args="{a: 1}"), 3, "server.args"),
    "fixed and searched env": (
        "server: {model: m, env: {A: 1}}\nsearch_space: {env.A: [1, 2]}\n"
        + SMALL.split("\n", 2)[2],
        2,
        "server.env",
    ),
    "constraints is a text": (SMALL + "constraints: a <= b\n", 4, "list"),
    "constraint is a mapping": (SMALL + "constraints:\n  - a: b\n", 5, "expression"),
    "constraint is a number": (SMALL + "constraints: [1]\n", 4, "expression"),
    "constraint on an unknown name": (
        SMALL + "constraints:\n  - max-num-seqs < 4\n  - max-num-seq < 4\n",
        6,
        "`max-num-seqs`",
    ),
    "constraint with a slip": (SMALL + "constraints: [max-num-seqs = 4]\n", 4, "`==`"),
    "constraint with a call": (
        SMALL + "constraints: ['__import__(\"os\")']\n",
        4,
        "unknown name",
    ),
    "constraint too deep": (
        SMALL + f"constraints: ['{'(' * 400}max-num-seqs{')' * 400}']\n",
        4,
        "levels",
    ),
    "constraint never holds": (SMALL + "constraints: [max-num-seqs > 2]\n", 4, "no point"),
    "constraints exclude each other": (
        SMALL + "constraints:\n- max-num-seqs > 1\n- max-num-seqs < 2\n",
        5,
        "together",
    ),
    "reference is a list": (SMALL + "reference: [1]\n", 4, "`reference`"),
    "reference with a bad name": (SMALL + "reference: {a b: 1}\n", 4, "flag"),
    "no workload": ("".join(SMALL.splitlines(True)[:2]), 1, "`workload` is missing"),
    "workload without kind": (with_workload("requests: 5, concurrency: 2"), 3, "workload.kind"),
    "unknown kind": (with_workload("kind: shargpt, requests: 5, concurrency: 2"), 3, "`sharegpt`"),
    "synthetic without input": (
        with_workload("kind: synthetic, output_tokens: 8, requests: 5, concurrency: 2"),
        3,
        "input_tokens",
    ),
    "synthetic without output": (
        with_workload("kind: synthetic, input_tokens: 8, requests: 5, concurrency: 2"),
        3,
        "output_tokens",
    ),
    "synthetic with path": (with_workload(f"{SYNTHETIC}, path: x, concurrency: 2"), 3, "path"),
    "sharegpt without path": (
        with_workload("kind: sharegpt, requests: 5, concurrency: 2"),
        3,
        "path",
    ),
    "sharegpt with input": (
        with_workload("kind: sharegpt, path: x, input_tokens: 5, requests: 5, concurrency: 2"),
        3,
        "input_tokens",
    ),
    "both loops": (with_workload(f"{SYNTHETIC}, concurrency: 2, request_rate: 1"), 3, "both"),
    "no loop": (with_workload(SYNTHETIC), 3, "concurrency or request_rate"),
    "burstiness in a closed loop": (
        with_workload(f"{SYNTHETIC}, concurrency: 2, burstiness: 2"),
        3,
        "burstiness",
    ),
    "no requests": (with_workload(f"{SYNTHETIC}, concurrency: 2".replace("9", "0")), 3, "requests"),
    "half a request": (
        with_workload(f"{SYNTHETIC}, concurrency: 2".replace("9", "1.5")),
        3,
        "whole number",
    ),
    "concurrency of zero": (with_workload(f"{SYNTHETIC}, concurrency: 0"), 3, "concurrency"),
    "negative rate": (with_workload(f"{SYNTHETIC}, request_rate: -1"), 3, "request_rate"),
    "negative warmup": (with_workload(f"{SYNTHETIC}, concurrency: 2, warmup: -1"), 3, "warmup"),
    "no time for a request": (
        with_workload(f"{SYNTHETIC}, concurrency: 2, request_timeout: 0"),
        3,
        "request_timeout",
    ),
    "lengths of zero": (
        with_workload(
            f"{SYNTHETIC}, concurrency: 2".replace("output_tokens: 8", "output_tokens: 0")
        ),
        3,
        "output_tokens",
    ),
    "lengths without mean": (
        SMALL.replace("input_tokens: 8", "input_tokens: {stdev: 8}"),
        3,
        "`workload.input_tokens.mean` is missing",
    ),
    "lengths as a list": (SMALL.replace("input_tokens: 8", "input_tokens: [8]"), 3, "a list"),
    "max below min": (
        SMALL.replace("input_tokens: 8", "input_tokens: {mean: 8, min: 9, max: 7}"),
        3,
        "input_tokens.max",
    ),
    "mean above max": (
        SMALL.replace("input_tokens: 8", "input_tokens: {mean: 8, max: 7}"),
        3,
        "input_tokens.mean",
    ),
    "negative stdev": (
        SMALL.replace("input_tokens: 8", "input_tokens: {mean: 8, stdev: -1}"),
        3,
        "stdev",
    ),
    "unknown metric": (
        SMALL + "objective: {maximize: output_troughput}\n",
        4,
        "`output_throughput`",
    ),
    "negative preemption weight": (
        SMALL + "objective:\n  preemption_weight: -1\n",
        5,
        "preemption_weight",
    ),
    "budget of nothing": (SMALL + "budget: {}\n", 4, "trials: 30"),
    "blank budget": (SMALL + "budget:\n", 4, "trials: 30"),
    "budget of null": (SMALL + "budget: {trials: null}\n", 4, "trials: 30"),
    "no trials": (SMALL + "budget: {trials: 0}\n", 4, "budget.trials"),
    "negative trials": (SMALL + "budget: {trials: -3}\n", 4, "budget.trials"),
    "trials as a word": (SMALL + "budget: {trials: many}\n", 4, "'many'"),
    "no time": (SMALL + "budget: {time: 0s}\n", 4, "budget.time"),
    "time of the day": (SMALL + "budget: {time: 4:00}\n", 4, "'4:00'"),
    "unknown sampler": (SMALL + "search: {sampler: ptpe}\n", 4, "`tpe`"),
    "negative seed": (SMALL + "search: {seed: -1}\n", 4, "search.seed"),
    "seed as a boolean": (SMALL + "search: {seed: true}\n", 4, "search.seed"),
    "large seed": (SMALL + "search: {seed: 4294967296}\n", 4, "at most"),
    "study with a slash": ("study: a/b\n" + SMALL, 1, "`study`"),
    "study with dots": ("study: ..\n" + SMALL, 1, "`study`"),
    "study that is hidden": ("study: .a\n" + SMALL, 1, "`study`"),
    "study of nothing": ("study: ''\n" + SMALL, 1, "`study`"),
    "study as a list": ("study: [a]\n" + SMALL, 1, "`study`"),
    "study like an option": ("study: -a\n" + SMALL, 1, "`study`"),
}


@pytest.mark.parametrize("name", BAD)
def test_load_names_file_line_and_remedy(name: str, tmp_path: Path) -> None:
    text, line, words = BAD[name]
    path = tmp_path / "space.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        spec.load(path)
    assert caught.value.exit_code == ExitCode.INPUT
    assert re.match(rf"{re.escape(str(path))}:(\d+): ", caught.value.message)
    assert caught.value.message.startswith(f"{path}:{line}: "), str(caught.value)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_load_reports_the_first_problem_of_the_file() -> None:
    text = (
        "server:\n  model: m\n  startup_timeout: x\nsearch_space: {a: [1]}\nbudget: {trials: 0}\n"
    )
    with pytest.raises(InputError, match=r"startup_timeout"):
        parse(text + with_workload(SYNTHETIC).splitlines()[2])


def test_load_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        spec.load(tmp_path / "nothing.yaml")


def test_load_refuses_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder"):
        spec.load(tmp_path)


def test_load_refuses_what_is_no_regular_file() -> None:
    with pytest.raises(InputError, match="regular"):
        spec.load(Path(os.devnull))


def test_load_refuses_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(SMALL)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root, who runs tests in containers, reads all
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        spec.load(path)


@pytest.mark.parametrize("content", [b"a: 1\nb: \xff\xfe", b"server:\n  model: caf\xe9\n"])
def test_load_refuses_what_is_not_utf8(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"space\.yaml:2: not a text in UTF-8"):
        spec.load(path)


def test_load_refuses_a_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_bytes(bytes(range(128)) * 10)
    with pytest.raises(InputError, match=r"space\.yaml:1: "):
        spec.load(path)


def test_load_refuses_a_large_file_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    with path.open("wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(InputError, match="larger"):
        spec.load(path)


def test_load_takes_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert spec.load(path).server.model == "m"


def test_load_needs_the_sharegpt_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "space.yaml"
    path.write_text(with_workload("kind: sharegpt, path: d.json, requests: 5, concurrency: 2"))
    with pytest.raises(InputError, match=r"space\.yaml:3: .*d\.json"):
        spec.load(path)
    (tmp_path / "d.json").write_text("[]")
    assert spec.load(path).workload.path == Path("d.json")


# --- remarks ---------------------------------------------------------------------------


def test_warnings_are_none_for_a_plain_file() -> None:
    assert spec.warnings(parse(SMALL)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (with_space("gpu-memory-utilization: {low: 0.5, high: 0.99}"), "0.99"),
        (with_space("gpu_memory_utilization: [0.9, 1.0]"), "1.0"),
        (with_space("a: {low: 0, high: 10, step: 4}"), "line 3: `a` ends at 8"),
        (with_space("max-num-seqs: {low: 2, high: 64}"), "only 4 requests"),
        (with_workload(f"{SYNTHETIC}, concurrency: 20"), "never reached"),
        (SMALL + "reference: {max-num-seqs: 7}\n", "`max-num-seqs: 7`"),
        (SMALL + "reference: {max-model-len: 8192}\n", "`max-model-len`, which no trial"),
        (SMALL + "reference: {env.A: 8}\n", "put `A` into `server.env`"),
        (
            SMALL + "reference: {max-num-seqs: 2}\nconstraints: [max-num-seqs < 2]\n",
            "`max-num-seqs < 2`",
        ),
    ],
)
def test_warnings_tell_what_is_odd(text: str, words: str) -> None:
    (remark,) = spec.warnings(parse(text))
    assert words in remark


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        (with_space("gpu-memory-utilization: {low: 80, high: 96}"), 3, "Write 0.80 to 0.96."),
        (with_space("gpu_memory_utilization: {low: 0.8, high: 96}"), 3, "Write 0.80 to 0.96."),
        (with_space("gpu-memory-utilization: [0.8, 90]"), 3, "Write 0.90."),
        (SMALL + "reference: {gpu-memory-utilization: 90}\n", None, "Write 0.90."),
        (SMALL + "reference: {device-memory-utilization: 900}\n", None, "at most 1."),
    ],
)
def test_parse_refuses_a_percentage_where_a_share_is_asked_for(
    text: str, line: int | None, hint: str
) -> None:
    with pytest.raises(InputError) as refused:
        parse(text)
    assert "is a share, at most 1, not" in refused.value.message
    assert f":{line or text.count(chr(10))}:" in refused.value.message
    assert hint in (refused.value.hint or "")


# --- any text --------------------------------------------------------------------------

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_WORDS = """
    study server search_space constraints reference workload objective budget search model args
    env command low high step log choices kind mean min max requests concurrency trials time
    sampler seed max-num-seqs env.X synthetic input_tokens output_tokens
"""
_KEYS = st.sampled_from(_WORDS.split()) | st.text(string.ascii_lowercase, max_size=3)
_TREES = st.recursive(
    _SCALARS | _KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


def outcome(text: str) -> None:
    """Parse: a spec, or an `InputError` that points into the file."""
    message = ""
    try:
        assert parse(text).search_space
    except InputError as error:
        message = error.message
    assert not message or re.match(r"some-study\.yaml:\d+: ", message)


@RELAXED
@given(st.text(max_size=200))
def test_parse_of_any_text_raises_input_errors_only(text: str) -> None:
    outcome(text)


@RELAXED
@given(st.text(alphabet="ab:-[]{}&*!?|>'\"#%@,. \n\t0123", max_size=60))
def test_parse_of_yaml_like_text_raises_input_errors_only(text: str) -> None:
    outcome(text)
    outcome(SMALL + text)


@RELAXED
@given(_TREES, st.sampled_from(["server", "search_space", "workload", "budget", "constraints"]))
def test_parse_of_any_values_raises_input_errors_only(tree: JsonValue, section: str) -> None:
    sections = yaml.safe_load(SMALL)
    sections[section] = tree
    outcome(yaml.safe_dump(sections))
    outcome(yaml.safe_dump(tree))
    sections = yaml.safe_load(SMALL)
    sections["search_space"] = {"a": tree}
    outcome(yaml.safe_dump(sections))


@RELAXED
@given(st.integers(0, len(GOOD) - 1), st.text(max_size=3))
def test_parse_of_a_damaged_file_raises_input_errors_only(position: int, patch: str) -> None:
    outcome(GOOD[:position] + patch + GOOD[position + 1 :])
    outcome(GOOD[:position])
