"""Finding the vLLM behind a command, and asking it: a package that looks like one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_vllm_package import write_command, write_vllm

from tuner.engine import asking
from tuner.engine.asking import Asker, NoAnswer, VllmPython, question_argv
from tuner.engine.config_check import ConfigChecker
from tuner.engine.flags import FlagKind, FlagTable
from tuner.engine.introspect import CannotAsk, find_python, flag_table
from tuner.errors import EnvironmentProblem
from tuner.types import FailureCause, Progress, ServerSpec

SCRIPT = __file__
"""A Python program that is not vLLM."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm-memory-tuner"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_vllm(tmp_path / "site")


def server(*command: str, model: str = "org/model", **env: str) -> ServerSpec:
    return ServerSpec(command or (sys.executable, "-m", "vllm.x"), model, {}, env, 60.0)


def asked(package: Path, model: str = "org/model") -> ServerSpec:
    return server(model=model, PYTHONPATH=str(package))


def quiet(progress: Progress) -> None:
    pass


async def table(spec: ServerSpec) -> FlagTable:
    answer = await flag_table(spec, quiet)
    assert isinstance(answer, FlagTable)
    return answer


# --- where vLLM is ---------------------------------------------------------------------


def found(*command: str, **env: str) -> VllmPython:
    python = find_python(server(*command, **env))
    assert isinstance(python, VllmPython)
    return python


def test_find_python_reads_the_first_line_of_a_script(tmp_path: Path) -> None:
    script = write_command(tmp_path, sys.executable)
    assert found(str(script), "serve").path == sys.executable
    assert found(str(script), "serve").required


def test_find_python_looks_on_the_servers_path(tmp_path: Path) -> None:
    write_command(tmp_path, sys.executable)
    assert found("vllm", "serve", PATH=str(tmp_path)).path == sys.executable


def test_find_python_follows_env_in_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    script = write_command(tmp_path, "/usr/bin/env -S python3 -P")
    assert found(str(script), PATH=str(tmp_path)).path == str(tmp_path / "python3")


def test_find_python_reads_pips_form_for_long_paths(tmp_path: Path) -> None:
    script = write_command(tmp_path, "/bin/sh")
    script.write_text(f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n")
    assert found(str(script)).path == sys.executable


@pytest.mark.parametrize(
    ("command", "required"),
    [
        ((sys.executable, "-m", "vllm.entrypoints.openai.api_server"), True),
        (("{python}", "-m", "vllm.entrypoints.cli.main", "serve"), True),
        (("{python}", SCRIPT, "serve"), False),
        (("nice", "-n", "5", sys.executable, "-m", "vllm.x"), True),
        (("env", "A=1", sys.executable, "wrapper.py"), False),
    ],
)
def test_find_python_takes_a_python_for_what_it_is(
    command: tuple[str, ...], required: bool
) -> None:
    python = found(*command)
    assert (python.path, python.required) == (sys.executable, required)


@pytest.mark.parametrize("interpreter", ["/bin/bash", "/bin/sh"])
def test_find_python_cannot_ask_other_programs(tmp_path: Path, interpreter: str) -> None:
    script = write_command(tmp_path, interpreter, "docker")
    answer = find_python(server(str(script), "run", "image"))
    assert answer == CannotAsk(f"`{script}` is not a Python program")


def test_find_python_says_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"vLLM is not found: `vllm`") as problem:
        find_python(server("vllm", "serve", PATH=str(tmp_path)))
    assert "pip install vllm" in problem.value.hint
    plain = tmp_path / "plain"
    plain.write_text("text")
    with pytest.raises(EnvironmentProblem, match="cannot be executed"):
        find_python(server(str(plain)))


# --- its flags -------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
async def test_flag_table_describes_flags(tmp_path: Path, old: bool) -> None:
    flags = await table(asked(write_vllm(tmp_path / "p", version="0.9.1", old=old)))
    assert flags.version == "0.9.1"
    assert flags.env_names == {"VLLM_LOGGING_LEVEL", "VLLM_FAKE_SEQS"}
    kinds = {name: flag.kind for name, flag in flags.flags.items()}
    assert kinds["max-num-seqs"] is FlagKind.INT
    assert kinds["max-num-batched-tokens"] is FlagKind.SIZE
    assert kinds["gpu-memory-utilization"] is FlagKind.FLOAT
    assert kinds["enable-prefix-caching"] is FlagKind.BOOL
    assert kinds["headless"] is FlagKind.SWITCH
    assert kinds["compilation-config"] is FlagKind.JSON
    assert flags.flags["kv-cache-dtype"].choices == ("auto", "fp8")
    assert flags.flags["gpu-memory-utilization"].default == 0.92
    assert flags.flags["served-model-name"].takes_list
    assert flags.flags["middleware"].repeats
    assert flags.flags["hf-token"].optional_value
    assert flags.find("tp") is flags.flags["tensor-parallel-size"]
    assert flags.find("device_memory_utilization") is flags.flags["gpu-memory-utilization"]
    assert "config" in flags.flags


async def test_flag_table_is_asked_once_for_each_version(
    tmp_path: Path, package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await table(asked(package))
    with monkeypatch.context() as patch:
        patch.setattr(Asker, "start", None)  # would raise if it were asked again
        assert await table(asked(package)) == first
    write_vllm(package, version="0.33.0")
    assert (await table(asked(package))).version == "0.33.0"
    assert len(list(cache.iterdir())) == 2


async def test_flag_table_survives_a_broken_cache(package: Path, cache: Path) -> None:
    first = await table(asked(package))
    for broken in ("", "{", "[]", '{"version": "1", "flags": [{}], "env_names": []}'):
        next(cache.iterdir()).write_text(broken)
        assert await table(asked(package)) == first


async def test_flag_table_does_without_a_cache_that_cannot_be_written(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert (await table(asked(package))).version == "0.32.0"


async def test_flag_table_tells_how_long_it_takes(package: Path) -> None:
    progress: list[Progress] = []
    await flag_table(asked(package), progress.append)
    assert {p.activity for p in progress} == {"asking vLLM"}


async def test_flag_table_cannot_ask_a_python_without_vllm() -> None:
    answer = await flag_table(server("{python}", SCRIPT, "serve"), quiet)
    assert answer == CannotAsk(f"{sys.executable} has no vLLM installed")


async def test_flag_table_needs_vllm_where_the_command_names_it() -> None:
    with pytest.raises(EnvironmentProblem, match="vLLM is not installed in"):
        await flag_table(server(sys.executable, "-m", "vllm.entrypoints.cli.main"), quiet)


async def test_flag_table_shows_why_vllm_cannot_be_imported(package: Path) -> None:
    (package / "vllm" / "entrypoints" / "launchers" / "cli_args.py").write_text(
        "import sys\nprint('libcuda.so is missing', file=sys.stderr)\nimport no_such_library\n"
    )
    with pytest.raises(EnvironmentProblem, match="vLLM cannot be imported") as problem:
        await flag_table(asked(package), quiet)
    assert "libcuda.so is missing" in problem.value.message
    assert "No module named 'no_such_library'" in problem.value.message
    assert "-c 'import vllm'" in problem.value.hint


async def test_flag_table_shows_how_a_crash_at_import_ended(package: Path) -> None:
    (package / "vllm" / "entrypoints" / "launchers" / "cli_args.py").write_text(
        "import os\nos.abort()\n"
    )
    with pytest.raises(EnvironmentProblem, match=r"its process has ended with -6"):
        await flag_table(asked(package), quiet)


# --- its opinion -----------------------------------------------------------------------


@pytest.fixture
def argv() -> list[str]:
    return [sys.executable, "-m", "vllm.x", "serve", "org/model"]


async def test_config_checker_accepts_and_resolves(package: Path, argv: list[str]) -> None:
    async with ConfigChecker(asked(package)) as checker:
        answer = await checker.ask([*argv, "--max-num-batched-tokens", "4K"], {})
    assert answer.accepted
    assert answer.error == ""
    assert answer.resolved == {
        "max-num-seqs": 128,
        "max-num-batched-tokens": 4096,
        "max-model-len": 8192,
        "gpu-memory-utilization": 0.92,
    }


async def test_config_checker_keeps_questions_apart(package: Path, argv: list[str]) -> None:
    async with ConfigChecker(asked(package)) as checker:
        seqs = [
            (await checker.ask(argv, env)).resolved["max-num-seqs"]
            for env in ({"VLLM_FAKE_SEQS": "64"}, {}, {"VLLM_FAKE_SEQS": "32"})
        ]
    assert seqs == [64, 128, 32]


@pytest.mark.parametrize(
    ("model", "words", "error", "cause"),
    [
        (
            "org/model",
            ["--max-num-seqs", "64", "--max-num-batched-tokens", "32"],
            "ValueError: max_num_batched_tokens (32) must be greater than or equal to "
            "max_num_seqs (64).",
            FailureCause.BAD_CONFIG,
        ),
        (
            "org/model",
            ["--max-num-seqs", "abc"],
            "error: argument --max-num-seqs: invalid _optional_type value: 'abc'",
            FailureCause.BAD_CONFIG,
        ),
        (
            "org/model",
            ["--swap-space", "4"],
            "error: unrecognized arguments: --swap-space 4",
            FailureCause.BAD_CONFIG,
        ),
        (
            "missing/model",
            [],
            "OSError: missing/model is not a valid model identifier listed on the hub",
            FailureCause.MODEL_NOT_FOUND,
        ),
    ],
)
async def test_config_checker_refuses(
    package: Path, model: str, words: list[str], error: str, cause: FailureCause
) -> None:
    async with ConfigChecker(asked(package, model)) as checker:
        answer = await checker.ask(["vllm", "serve", model, *words], {})
    assert (answer.accepted, answer.error, answer.cause) == (False, error, cause)


@pytest.mark.parametrize(
    ("model", "reason"), [("hang", "no answer in time"), ("crash", "the check crashed")]
)
async def test_config_checker_takes_no_answer_for_yes(
    package: Path, monkeypatch: pytest.MonkeyPatch, model: str, reason: str
) -> None:
    monkeypatch.setattr(asking, "ANSWER_LIMIT_S", 0.5)
    async with ConfigChecker(asked(package, model)) as checker:
        answer = await checker.ask(["vllm", "serve", model], {})
        assert (answer.accepted, answer.error, answer.resolved) == (True, reason, {})
        # The next question is answered all the same.
        assert (await checker.ask(["vllm", "serve", "org/model"], {})).resolved


def kill_probe() -> None:
    for child in psutil.Process().children():
        if "ask_vllm.py" in " ".join(child.cmdline()):
            child.kill()


async def test_config_checker_takes_a_dead_process_for_yes_and_starts_another_once(
    package: Path, argv: list[str]
) -> None:
    async with ConfigChecker(asked(package)) as checker:
        await checker.ask(argv, {})
        kill_probe()
        unanswered = await checker.ask(argv, {})
        assert (unanswered.accepted, unanswered.resolved) == (True, {})
        assert unanswered.error
        assert (await checker.ask(argv, {})).resolved
        kill_probe()
        assert (await checker.ask(argv, {})).error
        final = await checker.ask(argv, {})
    assert final.accepted
    assert final.error


async def test_config_checker_without_vllm_takes_everything() -> None:
    async with ConfigChecker(server("{python}", SCRIPT, "serve")) as checker:
        answer = await checker.ask(["x", "serve", "m", "--nonsense"], {})
    assert answer.accepted
    assert answer.resolved == {}
    assert answer.error == f"{sys.executable} has no vLLM installed"


async def test_config_checker_ends_its_process(package: Path, argv: list[str]) -> None:
    async with ConfigChecker(asked(package)) as checker:
        await checker.ask(argv, {})
        assert probes()
    assert not probes()


def probes(parent: int | None = None) -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process(parent).children(recursive=True)
        if "ask_vllm.py" in " ".join(process.cmdline())
    ]


def test_asker_ends_when_the_tuner_is_killed(package: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from tuner.engine.config_check import ConfigChecker\n"
        "from tuner.types import ServerSpec\n"
        "async def main():\n"
        "    spec = ServerSpec((sys.executable, '-m', 'vllm.x'), 'm', {}, {}, 60.0)\n"
        "    checker = ConfigChecker(spec)\n"
        "    await checker.ask(['vllm', 'serve', 'm'], {})\n"
        "    print('asked', flush=True)\n"
        "    await checker.ask(['vllm', 'serve', 'hang'], {})\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{Path(asking.__file__).parents[2]}"}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE
    ) as tuner:
        assert tuner.stdout is not None
        assert tuner.stdout.readline() == b"asked\n"
        started = probes(tuner.pid)
        assert started
        tuner.kill()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive


# --- exported files --------------------------------------------------------------------


async def test_check_file_finds_what_vllm_drops(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: org/model\nmax-num-seqs: 16\nenable-prefix-caching: false\n")
    meant = ["vllm", "serve", "org/model", "--max-num-seqs", "16", "--no-enable-prefix-caching"]
    async with ConfigChecker(asked(package)) as checker:
        answer = await checker.check_file(path, [*meant, "--port", "1234"])
    assert answer.accepted
    assert answer.values["max-num-seqs"] == 16
    assert answer.values["model"] == "org/model"
    assert list(answer.differences) == ["enable-prefix-caching"]
    difference = answer.differences["enable-prefix-caching"]
    assert (difference.in_file, difference.meant) == (None, False)


async def test_check_file_refuses_what_vllm_refuses(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: org/model\nswap-space: 4\n")
    async with ConfigChecker(asked(package)) as checker:
        answer = await checker.check_file(path, ["vllm", "serve", "org/model"])
    assert not answer.accepted
    assert "unrecognized arguments: --swap-space 4" in answer.error


async def test_check_file_refuses_a_file_without_a_model(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("max-num-seqs: 4\n")
    async with ConfigChecker(asked(package)) as checker:
        answer = await checker.check_file(path, ["vllm", "serve", "org/model"])
    assert (answer.accepted, answer.known) == (False, True)
    assert answer.error.startswith("ValueError")


# --- questions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["a", "b", "serve", "m", "--x", "1"], ["serve", "m", "--x", "1"]),
        (
            ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--x", "1"],
            ["serve", "m", "--x", "1"],
        ),
        (["docker", "run", "image", "m"], ["serve", "m"]),
    ],
)
def test_question_argv(command: list[str], expected: list[str]) -> None:
    assert question_argv(command, "m") == expected


async def test_asker_gives_up_on_a_process_that_says_something_else(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text(
        f"import sys\nprint({json.dumps(json.dumps({'id': 0, 'ready': True}))}, flush=True)\n"
        "sys.stdin.readline()\nprint('nonsense', flush=True)\nsys.stdin.readline()\n"
    )
    monkeypatch.setattr(asking, "PROBE", probe)
    asker = await Asker.start(VllmPython(sys.executable, dict(os.environ), True), quiet)
    begin_s = time.monotonic()
    with pytest.raises(NoAnswer):
        await asker.ask({"ask": "flags"})
    with pytest.raises(NoAnswer):
        await asker.ask({"ask": "flags"})
    await asker.close()
    assert time.monotonic() - begin_s < 5


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not probes()
