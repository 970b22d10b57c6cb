"""The stand-in's command line, its environment, its models, and its answers to the tuner."""

from __future__ import annotations

import json

import pytest
import yaml

from tuner.engine.config_check import ConfigChecker
from tuner.engine.flags import FlagKind, FlagTable
from tuner.engine.introspect import flag_table
from tuner.engine.simulated.server.answers import is_stand_in
from tuner.engine.simulated.server.argument_words import UnreadableArguments, prepared
from tuner.engine.simulated.server.command_line import RefusedArguments, read_command
from tuner.engine.simulated.server.environment import stand_in
from tuner.engine.simulated.server.models import model_profile
from tuner.engine.simulated.server.vllm_flags import known_flags
from tuner.errors import EnvironmentProblem, InputError
from tuner.types import FailureCause, ServerSpec

COMMAND = ("{python}", "-m", "tuner.engine.simulated", "serve")


def read(*words):
    return read_command(words, version="0")


def spec(command=COMMAND, **env):
    return ServerSpec(command, "tiny", {}, {"SIMULATED_DEVICE": "cpu", **env}, 60.0)


# --- vLLM's parser -------------------------------------------------------------------------


def test_command_has_what_was_given_and_defaults_for_the_rest():
    command = read("serve", "org/m", "--max-num-seqs", "8", "-tp", "2", "--enforce-eager")
    assert command.model == "org/m"
    assert command.args == {"max-num-seqs": 8, "tensor-parallel-size": 2, "enforce-eager": True}
    assert command.value("gpu-memory-utilization") == 0.92
    assert (command.host, command.port, command.served_names) == ("0.0.0.0", 8000, ("org/m",))


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--kv_cache_memory_bytes=64M"], "kv-cache-memory-bytes", 64 << 20),
        (["--max-num-batched-tokens", "1.5k"], "max-num-batched-tokens", 1500),
        (["--max-model-len", "auto"], "max-model-len", -1),
        (["--max-num-seqs", "None"], "max-num-seqs", None),
        (["--no-enable-prefix-caching"], "enable-prefix-caching", False),
        (["--device-memory-utilization", "0.5"], "gpu-memory-utilization", 0.5),
        (["--gpu-memory-util", "0.5"], "gpu-memory-utilization", 0.5),
        (["--served-model-name", "a", "b"], "served-model-name", ["a", "b"]),
        (["-O3"], "optimization-level", "3"),
        (["--cudagraph-capture-sizes", "1", "2"], "cudagraph-capture-sizes", [1, 2]),
        (["--compilation-config", '{"mode": 0}'], "compilation-config", {"mode": 0}),
        (
            ["--compilation_config.pass_config.x", "true", "--compilation-config.mode=3"],
            "compilation-config",
            {"pass_config": {"x": True}, "mode": 3},
        ),
        (["-cc.mode", "3"], "compilation-config", {"mode": 3}),
    ],
)
def test_command_reads_values_as_vllm_does(words, name, value):
    assert read("serve", "m", *words).args == {name: value}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--swap-space", "4"], "vllm: error: unrecognized arguments: --swap-space 4"),
        (
            ["--max-num-seqs", "abc"],
            "vllm serve: error: argument --max-num-seqs: invalid int value: 'abc'",
        ),
        (
            ["--kv-cache-memory-bytes", "64Mi"],
            "vllm serve: error: argument --kv-cache-memory-bytes: invalid human_readable_int "
            "value: '64Mi'",
        ),
        (
            ["--kv-cache-dtype", "foo"],
            "vllm serve: error: argument --kv-cache-dtype: invalid choice: 'foo' (choose from "
            "'auto', ",
        ),
        (
            ["-cc", "{"],
            "vllm serve: error: argument --compilation-config/-cc: Value { cannot be converted to ",
        ),
        (["--max-num-s", "1"], "vllm serve: error: ambiguous option: --max-num-s could match "),
    ],
)
def test_command_is_refused_in_argparse_s_words(words, line):
    with pytest.raises(RefusedArguments) as refused:
        read("serve", "m", *words)
    assert refused.value.line.startswith(line)
    assert refused.value.usage.startswith("usage: vllm")


def test_model_may_be_an_option():
    assert read("serve", "--model", "m", "--port", "1").model == "m"
    assert read("serve", "--model=m").model == "m"


def test_flags_are_those_of_vllm():
    table = known_flags()
    assert (table.version, len(table.flags)) == ("0.32.0", 316)
    assert table.flags["max-model-len"].kind is FlagKind.SIZE
    assert table.find("tp") is table.flags["tensor-parallel-size"]
    assert FlagTable.from_json(json.loads(json.dumps(table.to_json()))) == table
    assert "VLLM_CPU_KVCACHE_SPACE" in table.env_names


# --- --config ------------------------------------------------------------------------------


def config(tmp_path, document):
    path = tmp_path / "serve.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return str(path)


def test_config_file_is_read_and_the_command_line_wins(tmp_path):
    path = config(tmp_path, {"model": "m", "max_num_seqs": 8, "kv-cache-dtype": "fp8"})
    command = read("serve", "--config", path, "--max-num-seqs", "9")
    assert command.model == "m"
    assert command.args == {"max-num-seqs": 9, "kv-cache-dtype": "fp8"}
    assert read("serve", "other", "--config", path).model == "other"


def test_config_file_s_values_become_words(tmp_path):
    keys = {"model": "m", "a": True, "b": [1, 2], "c": {"d": 1}, "e": None, "no-f": True}
    assert prepared(["serve", "--config", config(tmp_path, keys)]) == [
        *("serve", "m", "--a", "--b", "1", "2", "--c", '{"d": 1}', "--e", "None", "--no-f"),
    ]


def test_config_file_s_false_is_dropped_as_vllm_drops_it(tmp_path):
    path = config(tmp_path, {"model": "m", "enable-prefix-caching": False})
    assert read("serve", "--config", path).args == {}
    path = config(tmp_path, {"model": "m", "no-enable-prefix-caching": True})
    assert read("serve", "--config", path).args == {"enable-prefix-caching": False}


@pytest.mark.parametrize(
    "words",
    [["--config", "x.json"], ["--config", "none.yaml"], ["--config"], ["--config", "{text}"]],
)
def test_config_file_that_is_none_is_told(tmp_path, words):
    text = config(tmp_path, "just words")
    with pytest.raises(UnreadableArguments):
        read("serve", "m", *[word.format(text=text) for word in words])


# --- environment and models ----------------------------------------------------------------


def test_environment_has_defaults():
    told = stand_in({})
    assert (told.device.name, told.speed, told.noise, told.fault) == ("h100-80g", 1.0, True, "")
    assert told.version == "0.32.0+simulated"
    assert stand_in({}).seed != told.seed


def test_environment_tells_speeds_and_seed():
    told = stand_in({"SIMULATED_SPEED": "20", "SIMULATED_SEED": "7", "SIMULATED_NOISE": "0"})
    assert (told.speed, told.start_speed, told.seed, told.noise) == (20.0, 20.0, 7, False)
    assert told.version == "0.32.0+simulated.x20"
    assert stand_in({"SIMULATED_START_SPEED": "9"}).start_speed == 9.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPEED", "0"),
        ("SPEED", "fast"),
        ("SPEED", "inf"),
        ("SEED", "-1"),
        ("DEVICE", "x"),
        ("SPED", "SIMULATED_SPED"),
    ],
)
def test_environment_that_cannot_be_used_is_refused(name, value):
    with pytest.raises(InputError, match=value):
        stand_in({f"SIMULATED_{name}": value})


def test_model_is_a_profile_a_hub_id_or_a_folder(tmp_path):
    assert model_profile("meta-llama/Llama-3.1-70B-Instruct").name == "llama-3.1-70b"
    assert model_profile("Qwen/Qwen2.5-1.5B-Instruct").layers == 28
    assert model_profile("org/none") is None
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    assert model_profile(str(folder)).layers == 32
    (folder / "config.json").write_text("{}")
    assert model_profile(str(folder)).layers == 32


def test_model_from_a_folder_has_the_sizes_of_its_config(tmp_path):
    eight_b = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(eight_b))
    made, known = model_profile(str(tmp_path)), model_profile("llama-3.1-8b")
    # The norms, 4096 values each, are all that is not counted.
    assert known.parameters - made.parameters == 65 * 4096
    assert (made.head_size, made.kv_heads, made.dtype_bytes) == (128, 8, 2)


# --- what the tuner asks -------------------------------------------------------------------


def silent(_progress):
    pass


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (COMMAND, True),
        (("env", "A=1", "python", "-m", "tuner.engine.simulated", "serve"), True),
        (("vllm", "serve"), False),
        (("python", "-m", "vllm.entrypoints.openai.api_server"), False),
    ],
)
def test_stand_in_is_known_by_its_module(command, expected):
    assert is_stand_in(command) is expected


async def test_flag_table_of_the_stand_in_is_there_at_once():
    table = await flag_table(spec(SIMULATED_SPEED="5"), silent)
    assert isinstance(table, FlagTable)
    assert table.version == "0.32.0+simulated.x5"
    assert table.flags.keys() == known_flags().flags.keys()


async def test_flag_table_needs_the_command_to_exist():
    with pytest.raises(EnvironmentProblem, match="no-such-python"):
        await flag_table(spec(("no-such-python", *COMMAND[1:])), silent)


async def test_config_check_accepts_and_resolves():
    async with ConfigChecker(spec()) as checker:
        answer = await checker.ask([*COMMAND, "tiny", "--max-num-seqs", "8"], {})
    assert answer.accepted
    assert answer.error == ""
    assert answer.resolved["max-num-seqs"] == 8
    assert answer.resolved["max-num-batched-tokens"] == 2048
    assert answer.resolved["max-model-len"] == 8192


@pytest.mark.parametrize(
    ("flags", "cause", "told"),
    [
        (["--no-such"], FailureCause.BAD_CONFIG, "unrecognized arguments: --no-such"),
        (["--max-num-seqs", "0"], FailureCause.BAD_CONFIG, "greater than or equal to 1"),
        (
            ["--max-num-seqs", "64", "--max-num-batched-tokens", "32"],
            FailureCause.BAD_CONFIG,
            "must be greater than or equal to max_num_seqs (64)",
        ),
    ],
)
async def test_config_check_refuses_what_the_start_refuses(flags, cause, told):
    async with ConfigChecker(spec()) as checker:
        answer = await checker.ask([*COMMAND, "tiny", *flags], {})
    assert (answer.accepted, answer.cause) == (False, cause)
    assert told in answer.error


async def test_config_check_knows_a_missing_model():
    async with ConfigChecker(spec()) as checker:
        answer = await checker.ask([*COMMAND, "./none"], {})
    assert answer.cause is FailureCause.MODEL_NOT_FOUND


async def test_config_check_takes_the_configuration_s_environment():
    async with ConfigChecker(spec()) as checker:
        answer = await checker.ask([*COMMAND, "tiny"], {"SIMULATED_DEVICE": "h200-141g"})
    assert answer.resolved["max-num-seqs"] == 1024


async def test_config_check_compares_a_file_with_what_was_meant(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: tiny\nmax-num-seqs: 8\nenable-prefix-caching: false\n")
    meant = [*COMMAND, "tiny", "--max-num-seqs", "8", "--no-enable-prefix-caching"]
    async with ConfigChecker(spec()) as checker:
        answer = await checker.check_file(path, meant)
    assert answer.accepted
    assert answer.values["max-num-seqs"] == 8
    assert set(answer.differences) == {"enable-prefix-caching"}
    assert answer.differences["enable-prefix-caching"].meant is False
