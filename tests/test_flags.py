"""Flags of a vLLM, and a space file held against them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import study_spec
from flag_tables import MODERN, OLD, flag, table
from hypothesis import given
from hypothesis import strategies as st

from tuner.engine.flag_check import check_flags, line_of
from tuner.engine.flags import FlagKind, FlagTable, value_problem
from tuner.errors import InputError
from tuner.types import Choice, FloatRange, IntRange, JsonValue, Knob, ServerSpec, StudySpec


def spec(
    *knobs: Knob,
    args: dict[str, JsonValue] | None = None,
    env: dict[str, str] | None = None,
    reference: dict[str, JsonValue] | None = None,
    text: str = "",
) -> StudySpec:
    return replace(
        study_spec(),
        server=ServerSpec(("vllm", "serve"), "m", args or {}, env or {}, 60.0),
        search_space=knobs,
        reference=reference or {},
        path=Path("space.yaml"),
        text=text,
    )


# --- the table -------------------------------------------------------------------------


def test_flag_table_survives_json() -> None:
    assert FlagTable.from_json(json.loads(json.dumps(MODERN.to_json()))) == MODERN


@pytest.mark.parametrize("document", [{}, {"version": "1", "flags": 3, "env_names": []}])
def test_flag_table_refuses_other_json(document: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError)):
        FlagTable.from_json(document)


def test_find_takes_names_and_aliases_in_both_spellings() -> None:
    for name in ("tensor-parallel-size", "tensor_parallel_size", "tp"):
        assert MODERN.find(name) is MODERN.flags["tensor-parallel-size"]
    assert MODERN.find("kv-cache") is None


def test_suggest_thinks_of_typing_errors_and_of_short_forms() -> None:
    assert MODERN.suggest("max-num-seq")[0] == "max-num-seqs"
    assert MODERN.suggest("kv-cache-memory")[0] == "kv-cache-memory-bytes"
    assert MODERN.suggest("Enable_Prefix_Cache")[0] == "enable-prefix-caching"
    assert MODERN.suggest("zzz") == []


# --- values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max-num-seqs", 4),
        ("max-num-seqs", 4.0),
        ("max-num-seqs", "4"),
        ("max-num-seqs", None),
        ("max-model-len", "auto"),
        ("max-model-len", -1),
        ("kv-cache-memory-bytes", "64M"),
        ("kv-cache-memory-bytes", "1.5g"),
        ("gpu-memory-utilization", 1),
        ("gpu-memory-utilization", "0.5"),
        ("kv-cache-dtype", "fp8"),
        ("max-lora-rank", 8),
        ("enforce-eager", False),
        ("headless", True),
        ("compilation-config", {"mode": 3}),
        ("compilation-config", '{"mode": 3}'),
        ("compilation-config", 3),
        ("cudagraph-capture-sizes", [1, 2]),
        ("cudagraph-capture-sizes", 1),
        ("lora-modules", [{"name": "a"}, "b=c"]),
        ("hf-token", True),
        ("hf-overrides", "anything"),
    ],
)
def test_value_problem_accepts(name: str, value: JsonValue) -> None:
    assert value_problem(MODERN.flags[name], value) is None


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("max-num-seqs", "abc", 'takes a whole number, not "abc"'),
        ("max-num-seqs", 1.5, "takes a whole number, not 1.5"),
        ("max-num-seqs", True, "takes a whole number, not true"),
        ("max-num-seqs", [1], "takes one value, not [1]"),
        ("max-num-seqs", {}, "takes one value, not {}"),
        ("max-num-seqs", "auto", 'takes a whole number, not "auto"'),
        (
            "kv-cache-memory-bytes",
            "64MiB",
            'takes a whole number with k, m, g or K, M, G: write 64M, not "64MiB"',
        ),
        (
            "kv-cache-memory-bytes",
            "1.5G",
            'takes a whole number, with a unit such as 64K if you like, not "1.5G"',
        ),
        ("gpu-memory-utilization", "90%", 'takes a number, not "90%"'),
        ("gpu-memory-utilization", False, "takes a number, not false"),
        ("kv-cache-dtype", "fp4", 'takes one of auto, fp8, fp8_e4m3, not "fp4"'),
        ("max-lora-rank", 7, "takes one of 1, 8, 16, not 7"),
        ("enforce-eager", "true", "takes true or false: write true without quotes"),
        ("enforce-eager", 1, "takes true or false, not 1"),
        ("compilation-config", "{mode", 'takes JSON (a mapping in YAML), not "{mode"'),
        ("cudagraph-capture-sizes", [1, "x"], 'takes a whole number, not "x"'),
        ("cudagraph-capture-sizes", [], "takes at least one value"),
    ],
)
def test_value_problem_says_what_is_wrong(name: str, value: JsonValue, problem: str) -> None:
    assert value_problem(MODERN.flags[name], value) == problem


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.sampled_from(sorted(MODERN.flags)), JSON)
def test_value_problem_never_raises(name: str, value: JsonValue) -> None:
    value_problem(MODERN.flags[name], value)


# --- a space file ----------------------------------------------------------------------


def test_check_flags_accepts_a_good_space() -> None:
    good = spec(
        IntRange("max-num-seqs", 1, 8),
        FloatRange("gpu-memory-utilization", 0.5, 0.9),
        Choice("kv-cache-dtype", ("auto", "fp8", None)),
        Choice("compilation-config.cudagraph_mode", ("NONE", "PIECEWISE")),
        IntRange("kv-offloading-size", 0, 64),
        Choice("env.VLLM_CPU_KVCACHE_SPACE", (1, 2)),
        args={"tensor-parallel-size": 1, "no-enable-prefix-caching": True},
        env={"HF_HUB_OFFLINE": "1"},
        reference={"max-num-batched-tokens": "4K"},
    )
    assert check_flags(good, MODERN) == []


@pytest.mark.parametrize(
    ("bad", "message", "hint"),
    [
        (
            spec(args={"max-num-seq": 4}),
            "server.args: vLLM 0.32.0 has no flag `max-num-seq`",
            "Did you mean `max-num-seqs`",
        ),
        (
            spec(reference={"disable-log-requests": True}),
            "reference: vLLM 0.32.0 has no flag `disable-log-requests`",
            "`enable-log-requests: false` now",
        ),
        (spec(args={"frobnicate": 1}), "has no flag `frobnicate`", "--help=all"),
        (
            spec(IntRange("max-num-seqs.x", 1, 2)),
            "`max-num-seqs` has no keys",
            "Write `max-num-seqs`",
        ),
        (
            spec(Choice("kv-cache-dtype", ("auto", "fp4"))),
            'search_space: `kv-cache-dtype` takes one of auto, fp8, fp8_e4m3, not "fp4"',
            "",
        ),
        (
            spec(FloatRange("max-num-seqs", 1.5, 4.0)),
            "`max-num-seqs` takes a whole number, not 1.5",
            "",
        ),
        (
            spec(FloatRange("max-num-seqs", 1.0, 4.0, step=0.5)),
            "`max-num-seqs` takes a whole number, not 1.5",
            "",
        ),
        (
            spec(FloatRange("max-num-seqs", 1.0, 4.0)),
            "`max-num-seqs` takes whole numbers",
            "without a point",
        ),
        (spec(IntRange("enforce-eager", 0, 1)), "`enforce-eager` takes true or false", ""),
        (
            spec(IntRange("max-lora-rank", 8, 16)),
            "`max-lora-rank` takes only certain values",
            "as a list",
        ),
        (
            spec(IntRange("tp", 1, 2), args={"tensor-parallel-size": 2}),
            "`tensor-parallel-size` and `tp` set the same flag",
            "Keep one",
        ),
    ],
)
def test_check_flags_refuses(bad: StudySpec, message: str, hint: str) -> None:
    with pytest.raises(InputError) as error:
        check_flags(bad, MODERN)
    assert message in error.value.message
    assert hint in error.value.hint


def test_check_flags_names_file_and_line() -> None:
    text = "server:\n  args:\n    max_num_seq: 4  # typing error\n"
    with pytest.raises(InputError, match=r"^space\.yaml:3: server\.args"):
        check_flags(spec(args={"max-num-seq": 4}, text=text), MODERN)


def test_check_flags_lets_host_memory_go_by_its_other_name() -> None:
    for flags, name in ((OLD, "kv-offloading-size"), (MODERN, "swap-space")):
        assert check_flags(spec(IntRange(name, 0, 64)), flags) == []
    assert check_flags(spec(args={"kv-offloading-backend": "native"}), OLD) == []


def test_check_flags_refuses_host_memory_where_there_is_none() -> None:
    neither = table("0.9", flag("max-num-seqs", FlagKind.INT))
    with pytest.raises(InputError, match="has no flag `kv-offloading-size`, nor `swap-space`"):
        check_flags(spec(IntRange("kv-offloading-size", 0, 64)), neither)


def test_check_flags_warns_of_variables_that_vllm_does_not_know() -> None:
    notices = check_flags(
        spec(
            Choice("env.VLLM_CPU_KVCACHE_SPACES", (1, 2)),
            env={"VLLM_LOGGING_LEVEL": "INFO", "OTHER": "1"},
            reference={"env.VLLM_NONSENSE": 1},
        ),
        MODERN,
    )
    assert notices == [
        "vLLM 0.32.0 does not know the environment variable VLLM_CPU_KVCACHE_SPACES; did you "
        "mean VLLM_CPU_KVCACHE_SPACE?",
        "vLLM 0.32.0 does not know the environment variable VLLM_NONSENSE",
    ]


def test_check_flags_tells_what_is_deprecated() -> None:
    old = replace(flag("max-num-seqs", FlagKind.INT), deprecated=True)
    assert check_flags(spec(args={"max-num-seqs": 4}), table("1.0", old)) == [
        "server.args: vLLM 1.0 calls `max-num-seqs` deprecated"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nmax-num-seqs: 4\n", 2),
        ("a: {max_num_seqs: 4}\n", 1),
        ('"max-num-seqs": 4\n', 1),
        ("x-max-num-seqs: 4\n", None),
        ("# max-num-seqs: 4\nmax-num-seqs: 4\nreference: {max-num-seqs: 2}\n", None),
        ("a: 1\n", None),
    ],
)
def test_line_of(text: str, line: int | None) -> None:
    assert line_of(text, "max-num-seqs") == line
