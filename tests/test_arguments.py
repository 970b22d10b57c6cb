"""The command line that a configuration becomes."""

from __future__ import annotations

import shlex
import sys

import pytest
from flag_tables import MODERN, OLD, flag, table

from tuner.engine.arguments import (
    adapt,
    argv,
    command_with_model,
    flag_words,
    merge_dotted,
    shell_line,
)
from tuner.engine.flags import FlagKind, FlagTable
from tuner.errors import InputError
from tuner.types import EngineConfig, JsonValue, ServerSpec


def server(*command: str, model: str = "org/model") -> ServerSpec:
    return ServerSpec(command or ("vllm", "serve"), model, {}, {}, 60.0)


def words(args: dict[str, JsonValue], flags: FlagTable | None = None) -> list[str]:
    """The words between the model and `--host`."""
    command = argv(server(), EngineConfig(args), host="127.0.0.1", port=8123, flags=flags)
    assert command[:3] == ["vllm", "serve", "org/model"]
    assert command[-4:] == ["--host", "127.0.0.1", "--port", "8123"]
    return command[3:-4]


# --- values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, []),
        ({"max-num-seqs": 256}, ["--max-num-seqs", "256"]),
        ({"max-num-seqs": None}, []),
        ({"gpu-memory-utilization": 0.7 + 15 * 0.01}, ["--gpu-memory-utilization", "0.85"]),
        ({"kv-cache-dtype": "fp8"}, ["--kv-cache-dtype", "fp8"]),
        ({"enforce-eager": True}, ["--enforce-eager"]),
        ({"enable-prefix-caching": False}, ["--no-enable-prefix-caching"]),
        ({"max-model-len": -1}, ["--max-model-len=-1"]),
        ({"cudagraph-capture-sizes": [1, 2, 4]}, ["--cudagraph-capture-sizes", "1", "2", "4"]),
        ({"compilation-config": {"mode": 3}}, ["--compilation-config", '{"mode": 3}']),
        ({"lists": [[1], [2]]}, ["--lists", "[[1], [2]]"]),
    ],
)
def test_argv_without_a_flag_table_writes(args: dict[str, JsonValue], expected: list[str]) -> None:
    assert words(args) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"max-num-seqs": 16.0}, ["--max-num-seqs", "16"]),
        ({"headless": True}, ["--headless"]),
        ({"headless": False}, []),
        ({"hf-token": True}, ["--hf-token"]),
        ({"hf-token": "abc"}, ["--hf-token", "abc"]),
        ({"middleware": ["a", "b"]}, ["--middleware", "a", "--middleware", "b"]),
        ({"allowed-origins": ["*"]}, ["--allowed-origins", '["*"]']),
        ({"cudagraph-capture-sizes": []}, []),
        (
            {"lora-modules": [{"name": "a", "path": "p"}]},
            ["--lora-modules", '{"name": "a", "path": "p"}'],
        ),
        ({"tp": 2, "kv_cache_dtype": "fp8"}, ["--tensor-parallel-size", "2"]),
        ({"no-enable-prefix-caching": True}, ["--no-enable-prefix-caching"]),
        ({"no-enable-prefix-caching": False}, ["--enable-prefix-caching"]),
    ],
)
def test_argv_with_a_flag_table_writes(args: dict[str, JsonValue], expected: list[str]) -> None:
    assert words(args, MODERN)[: len(expected)] == expected


def test_argv_keeps_the_access_log_out_where_vllm_can() -> None:
    assert words({}, MODERN) == ["--disable-uvicorn-access-log"]
    assert words({"disable-uvicorn-access-log": False}, MODERN) == [
        "--no-disable-uvicorn-access-log"
    ]
    assert words({}, OLD) == []


def test_argv_refuses_one_flag_by_two_names() -> None:
    with pytest.raises(InputError, match=r"`tp` and `tensor-parallel-size` set the same flag"):
        words({"tp": 2, "tensor-parallel-size": 4}, MODERN)


def test_flag_words_of_true_for_a_json_flag_is_a_value() -> None:
    assert flag_words("x", True, flag("x", FlagKind.JSON)) == ["--x", "true"]


# --- dotted keys -----------------------------------------------------------------------


def test_merge_dotted_makes_one_object() -> None:
    args: dict[str, JsonValue] = {
        "max-num-seqs": 4,
        "compilation-config.cudagraph_mode": "PIECEWISE",
        "compilation-config.pass_config.fuse": True,
        "compilation-config": {"mode": 3, "cudagraph_mode": "NONE", "pass_config": {"a": 1}},
    }
    assert merge_dotted(args) == {
        "max-num-seqs": 4,
        "compilation-config": {
            "mode": 3,
            "cudagraph_mode": "PIECEWISE",
            "pass_config": {"a": 1, "fuse": True},
        },
    }


def test_merge_dotted_reads_json_text_and_leaves_defaults_out() -> None:
    args: dict[str, JsonValue] = {"cc": '{"mode": 3}', "cc.a": 1, "cc.b": None, "other.x": None}
    assert merge_dotted(args) == {"cc": {"mode": 3, "a": 1}}


@pytest.mark.parametrize("value", [3, "text", [1]])
def test_merge_dotted_refuses_what_is_no_object(value: JsonValue) -> None:
    with pytest.raises(InputError, match=r"`cc` is set to .* and by `cc\.…` too"):
        merge_dotted({"cc": value, "cc.a": 1})


def test_argv_merges_a_dotted_alias() -> None:
    args: dict[str, JsonValue] = {"cc.cudagraph_mode": "NONE", "compilation-config.mode": 3}
    assert words(args, MODERN)[:2] == [
        "--compilation-config",
        '{"cudagraph_mode": "NONE", "mode": 3}',
    ]


# --- host memory -----------------------------------------------------------------------


def test_adapt_leaves_offloading_out_when_it_is_off() -> None:
    args: dict[str, JsonValue] = {"kv-offloading-size": 0, "kv-offloading-backend": "native"}
    for flags in (None, MODERN):
        assert adapt(args, flags).args == {}


def test_adapt_keeps_offloading_and_backend_when_it_is_on() -> None:
    args: dict[str, JsonValue] = {"kv-offloading-size": 8, "kv-offloading-backend": "native"}
    assert adapt(args, MODERN).args == args
    assert adapt(args, MODERN).notices == ()


def test_adapt_gives_old_vllm_swap_space_for_each_gpu() -> None:
    args: dict[str, JsonValue] = {
        "kv-offloading-size": 16,
        "kv-offloading-backend": "native",
        "tensor-parallel-size": 4,
    }
    adapted = adapt(args, OLD)
    assert adapted.args == {"tensor-parallel-size": 4, "swap-space": 4.0}
    assert len(adapted.notices) == 1
    assert "no `kv-offloading-size`" in adapted.notices[0]


def test_adapt_turns_old_vllm_swap_space_off_explicitly() -> None:
    assert adapt({"kv-offloading-size": 0}, OLD).args == {"swap-space": 0.0}


def test_adapt_gives_new_vllm_the_total() -> None:
    adapted = adapt({"swap-space": 4, "tensor-parallel-size": 2}, MODERN)
    assert adapted.args == {"tensor-parallel-size": 2, "kv-offloading-size": 8.0}
    assert "`--kv-offloading-size` (GiB in total" in adapted.notices[0]


def test_adapt_refuses_host_memory_where_there_is_no_flag() -> None:
    neither = table("0.9", flag("max-num-seqs", FlagKind.INT))
    with pytest.raises(InputError, match=r"has neither `kv-offloading-size` nor `swap-space`"):
        adapt({"kv-offloading-size": 4}, neither)
    assert adapt({"kv-offloading-size": 0}, neither).args == {}


def test_adapt_refuses_both_sizes() -> None:
    with pytest.raises(InputError, match="set the same memory"):
        adapt({"kv-offloading-size": 4, "swap-space": 4}, MODERN)


# --- the command -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("vllm", "serve"), ["vllm", "serve", "org/model"]),
        (("vllm", "serve", "--seed", "1"), ["vllm", "serve", "org/model", "--seed", "1"]),
        (("numactl", "-N0", "vllm", "serve"), ["numactl", "-N0", "vllm", "serve", "org/model"]),
        (("{python}", "fake.py", "serve"), [sys.executable, "fake.py", "serve", "org/model"]),
        (
            ("python", "-m", "vllm.entrypoints.openai.api_server"),
            ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model"],
        ),
        (("docker", "run", "image"), ["docker", "run", "image", "org/model"]),
        (("run", "--on={model}", "x"), ["run", "--on=org/model", "x"]),
    ],
)
def test_command_with_model_puts_the_model(command: tuple[str, ...], expected: list[str]) -> None:
    assert command_with_model(server(*command)) == expected


def test_shell_line_can_be_read_back_by_a_shell() -> None:
    command = ["vllm", "serve", "a b", "--x", '{"k": "it\'s"}']
    line = shell_line(command, {"A": "1 2"})
    assert shlex.split(line) == ["A=1 2", *command]
