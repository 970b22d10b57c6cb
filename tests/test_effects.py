"""Parameters that changed nothing, and those of which that cannot be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import builders
import pytest
from rich.console import Console

from tuner.effects import no_effects
from tuner.records import StudyRecord, StudyState, TrialRecord, TrialState
from tuner.report.effects import effect_rows, effect_sentences, print_effects
from tuner.types import EngineConfig, JsonValue, MemoryFacts

Args = Mapping[str, JsonValue]
MIB = 2**20


def trial(
    args: Args,
    *,
    number: int = 0,
    env: Mapping[str, str] | None = None,
    effective: Args | None = None,
    tokens: int | None = None,
    gib: float | None = None,
    length: int | None = None,
) -> TrialRecord:
    memory = MemoryFacts(kv_cache_tokens=tokens, kv_cache_gib=gib, max_model_len_tokens=length)
    return TrialRecord(
        number=number,
        state=TrialState.MEASURED,
        params=dict(args),
        config=EngineConfig(dict(args), dict(env or {})),
        is_reference=False,
        score=1.0,
        constraints={},
        outcome=builders.measurement(memory=memory),
        directory=None,
        effective=dict(effective or {}),
    )


def texts(found: TrialRecord, *others: TrialRecord) -> list[str]:
    return [effect.text for effect in no_effects(found, [found, *others])]


# --- another value than was asked for ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked", "resolved", "told"),
    [
        ("async-scheduling", True, False, "async-scheduling=true has no effect: vLLM takes false"),
        ("enable-chunked-prefill", False, True, "vLLM takes true instead"),
        ("block-size", 16, 128, "block-size=16 has no effect: vLLM takes 128 instead"),
        ("max-num-batched-tokens", "8K", 2048, "=8K has no effect: vLLM takes 2048 instead"),
        ("kv-offloading-size", 4, None, "vLLM takes nothing instead"),
        ("cudagraph-capture-sizes", [1, 2, 4], [], "vLLM takes [] instead"),
        ("dtype", "half", "bfloat16", "vLLM takes bfloat16 instead"),
    ],
)
def test_value_that_vllm_replaces_has_no_effect(
    name: str, asked: JsonValue, resolved: JsonValue, told: str
) -> None:
    (text,) = texts(trial({name: asked}, effective={name: resolved}))
    assert told in text


@pytest.mark.parametrize(
    ("name", "asked", "resolved"),
    [
        ("max-num-seqs", 64, 64),
        ("max-num-batched-tokens", "8K", 8192),
        ("max-num-batched-tokens", "8k", 8000),
        ("kv-cache-memory-bytes", "64MiB", 64 * MIB),
        ("gpu-memory-utilization", 0.9, 0.9),
        ("gpu-memory-utilization", "0.9", 0.9),
        ("enforce-eager", True, True),
        ("kv-offloading-size", 0, None),  # both are off
        ("kv-cache-dtype", "fp8", "fp8_e4m3"),
        ("dtype", "half", "float16"),
        # Left to vLLM: whatever it takes was meant.
        ("kv-cache-dtype", "auto", "fp8"),
        ("max-model-len", -1, 3968),
        ("max-model-len", "auto", 3968),
        ("max-num-seqs", None, 128),
        # Sorted and cut by vLLM: not to be told from what was meant.
        ("cudagraph-capture-sizes", [8, 1, 9999], [1, 8]),
        ("compilation-config", {"mode": 3}, {"mode": 3, "backend": "inductor"}),
        ("compilation-config", {"mode": 3}, None),
    ],
)
def test_value_that_vllm_takes_as_it_was_meant_is_not_told(
    name: str, asked: JsonValue, resolved: JsonValue
) -> None:
    assert texts(trial({name: asked}, effective={name: resolved})) == []


def test_value_that_nobody_could_ask_about_is_not_told() -> None:
    assert texts(trial({"max-num-seqs": 64, "some-flag": 1})) == []


def test_context_that_was_fitted_to_the_kv_cache_is_told() -> None:
    fitted = trial({"max-model-len": 8192}, effective={"max-model-len": 8192}, length=3968)
    assert texts(fitted) == ["max-model-len=8192 has no effect: the server serves 3968 tokens"]
    assert texts(trial({"max-model-len": "8k"}, length=8000)) == []
    assert texts(trial({"max-model-len": -1}, length=3968)) == []
    assert texts(trial({}, length=3968)) == []


# --- who sizes the KV cache ----------------------------------------------------------------


def test_utilization_beside_bytes_does_not_size_the_kv_cache() -> None:
    both = trial({"gpu-memory-utilization": 0.8, "kv-cache-memory-bytes": 2**30}, gib=1.0)
    assert texts(both) == [
        "gpu-memory-utilization=0.8 does not size the KV cache: kv-cache-memory-bytes does"
    ]
    assert texts(trial({"gpu-memory-utilization": 0.8}, gib=1.0)) == []
    left_out = {"gpu-memory-utilization": 0.8, "kv-cache-memory-bytes": None}
    assert texts(trial(left_out, gib=1.0)) == []


def test_number_of_blocks_goes_before_both() -> None:
    args = {
        "gpu-memory-utilization": 0.8,
        "kv-cache-memory-bytes": 2**30,
        "num-gpu-blocks-override": 512,
    }
    assert texts(trial(args, gib=1.0)) == [
        f"kv-cache-memory-bytes={2**30} does not size the KV cache: num-gpu-blocks-override does",
        "gpu-memory-utilization=0.8 does not size the KV cache: num-gpu-blocks-override does",
    ]


def test_space_of_the_cpu_build_goes_before_bytes() -> None:
    """Seen on vLLM 0.32's CPU build: 64 MiB were asked, the variable gave 1 GiB."""
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    assert texts(trial({"kv-cache-memory-bytes": "64M"}, env=env, gib=1.0)) == [
        "kv-cache-memory-bytes=64M does not size the KV cache: env.VLLM_CPU_KVCACHE_SPACE does"
    ]
    assert texts(trial({"gpu-memory-utilization": 0.5}, env=env, gib=1.0)) == [
        "gpu-memory-utilization=0.5 does not size the KV cache: env.VLLM_CPU_KVCACHE_SPACE does"
    ]


def test_space_of_the_cpu_build_means_nothing_on_a_gpu() -> None:
    env = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    assert texts(trial({"gpu-memory-utilization": 0.9}, env=env, gib=11.25)) == [
        "env.VLLM_CPU_KVCACHE_SPACE=4 has no effect: the KV cache has 11.25 GiB"
    ]
    assert texts(trial({"tensor-parallel-size": 2}, env=env, gib=2.0)) == []  # perhaps its share
    assert texts(trial({}, env={"VLLM_CPU_KVCACHE_SPACE": "0"}, gib=2.0)) == []
    assert texts(trial({}, env={"VLLM_CPU_KVCACHE_SPACE": "much"}, gib=2.0)) == []


@pytest.mark.parametrize(
    ("asked", "gib", "is_told"),
    [
        (16 * MIB, 0.02, False),  # vLLM rounds to two decimals
        (4 * MIB, 0.0, False),
        (2**30, 1.0, False),
        (2**30, 0.97, False),  # whole blocks
        (2**30, 2.0, True),
        ("64M", 1.0, True),
        (2**30, None, False),
    ],
)
def test_bytes_that_the_server_does_not_show_are_told(
    asked: JsonValue, gib: float | None, is_told: bool
) -> None:
    found = texts(trial({"kv-cache-memory-bytes": asked}, gib=gib))
    assert bool(found) is is_told
    if is_told:
        assert "GiB) has no effect: the KV cache has" in found[0]


# --- the type of the KV cache --------------------------------------------------------------

SIZED: Args = {"kv-cache-memory-bytes": 2**30, "block-size": 32}
WIDE = trial({**SIZED, "max-num-seqs": 8}, number=3, tokens=4096, gib=1.0)


def test_narrow_kv_cache_that_holds_no_more_is_told() -> None:
    """vLLM 0.7's V1 took --kv-cache-dtype fp8 and ignored it."""
    narrow = trial({**SIZED, "kv-cache-dtype": "fp8"}, number=4, tokens=4096, gib=1.0)
    assert texts(narrow, WIDE) == [
        "kv-cache-dtype=fp8 has no effect: the KV cache holds 4096 tokens in 1.00 GiB, as with "
        "auto (trial 3)"
    ]
    assert texts(WIDE, narrow) == []


@pytest.mark.parametrize(
    "narrow",
    [
        trial({**SIZED, "kv-cache-dtype": "fp8"}, tokens=8192, gib=1.0),  # it works
        trial({"block-size": 32, "kv-cache-dtype": "fp8"}, tokens=4096, gib=0.5),  # in half of it
        trial({**SIZED, "kv-cache-dtype": "fp8"}, tokens=4096),
        trial({**SIZED, "kv-cache-dtype": "fp8", "block-size": 64}, tokens=4096, gib=1.0),
        trial({**SIZED, "kv-cache-dtype": "fp8"}, env={"A": "1"}, tokens=4096, gib=1.0),
        trial({**SIZED, "kv-cache-dtype": "bfloat16"}, tokens=4096, gib=1.0),
        trial({**SIZED, "kv-cache-dtype": "turbo9"}, tokens=4096, gib=1.0),  # who knows
    ],
)
def test_narrow_kv_cache_is_not_told_without_proof(narrow: TrialRecord) -> None:
    assert texts(narrow, WIDE) == []


def test_checkpoint_that_prescribes_fp8_is_no_proof_against_it() -> None:
    prescribed = replace(WIDE, effective={"kv-cache-dtype": "fp8"})
    narrow = trial({**SIZED, "kv-cache-dtype": "fp8"}, tokens=4096, gib=1.0)
    assert texts(narrow, prescribed) == []


def test_trial_that_has_not_run_is_judged_by_its_configuration_alone() -> None:
    waiting = replace(
        trial(
            {"gpu-memory-utilization": 0.8, "kv-cache-memory-bytes": 1, "async-scheduling": True},
            effective={"async-scheduling": False},
        ),
        outcome=None,
        state=TrialState.WAITING,
    )
    assert [effect.parameter for effect in no_effects(waiting, [])] == [
        "async-scheduling",
        "gpu-memory-utilization",
    ]
    assert no_effects(replace(waiting, config=None), []) == []


# --- shown ---------------------------------------------------------------------------------


def study(*trials: TrialRecord) -> StudyRecord:
    return StudyRecord("s", builders.study_spec(), StudyState.FINISHED, trials, {})


def overridden(number: int) -> TrialRecord:
    return trial(
        {"async-scheduling": True, "max-num-seqs": number},
        number=number,
        effective={"async-scheduling": False, "max-num-seqs": number},
    )


def test_status_says_each_reason_once_with_its_trials() -> None:
    fine = trial({"max-num-seqs": 4}, number=9)
    reason = "vLLM takes a value of its own instead"
    assert effect_sentences(study(fine)) == []
    assert effect_sentences(study(overridden(1), fine)) == [
        f"async-scheduling had no effect in trial 1: {reason}"
    ]
    assert effect_sentences(study(*(overridden(n) for n in range(7)), fine)) == [
        f"async-scheduling had no effect in trials 0, 1, 2, 3, 4 and 2 more: {reason}"
    ]
    assert effect_sentences(study(overridden(1), overridden(2))) == [
        f"async-scheduling had no effect in any trial: {reason}"
    ]


def test_show_has_a_row_for_each_parameter() -> None:
    assert list(effect_rows(overridden(1), [])) == [
        ("no effect", "async-scheduling=true has no effect: vLLM takes false instead")
    ]


def test_print_effects_prints_brackets_as_they_are() -> None:
    console = Console(width=80, record=True)
    print_effects(console, study(overridden(1)))
    assert console.export_text().startswith("note: async-scheduling had no effect in trial 1: ")
