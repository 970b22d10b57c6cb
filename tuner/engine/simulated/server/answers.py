"""What the stand-in answers where a real vLLM is asked by `tuner/engine/probe/ask_vllm.py`.

The same questions and answers, at once and without a process: nothing has to be imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from tuner.engine.flags import FlagTable
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.server.argument_words import UnreadableArguments
from tuner.engine.simulated.server.command_line import (
    RefusedArguments,
    ServeCommand,
    read_command,
)
from tuner.engine.simulated.server.environment import stand_in
from tuner.engine.simulated.server.resolve import resolve
from tuner.engine.simulated.server.vllm_flags import known_flags
from tuner.engine.simulated.settings import EngineSettings
from tuner.errors import InputError
from tuner.types import JsonValue

Answer = dict[str, object]

MODULE = "tuner.engine.simulated"


def is_stand_in(command: Sequence[str]) -> bool:
    """Whether a server's command runs the stand-in: `... -m tuner.engine.simulated ...`."""
    return ("-m", MODULE) in pairwise(command)


class StandInAnswers:
    """Answers for the stand-in that would be started with this environment.

    Raises:
        InputError: the environment has a variable of the stand-in's that cannot be used.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._told = stand_in(env)

    def flags(self) -> FlagTable:
        """All flags of `vllm serve`."""
        return replace(known_flags(), version=self._told.version)

    async def ask(self, question: Mapping[str, object]) -> Answer:
        """The answer to a question about a configuration (`config`) or a file (`file`)."""
        if question["ask"] == "file":
            return self._file(str(question["path"]), _words(question.get("meant")))
        return self._config(_words(question["argv"]), question.get("env"))

    @property
    def is_alive(self) -> bool:
        """Always."""
        return True

    async def close(self) -> None:
        """Nothing to end."""

    def _config(self, words: Sequence[str], more: object) -> Answer:
        env = {**self._env, **(more if isinstance(more, dict) else {})}
        command = self._read(words)
        if isinstance(command, str):
            return {"accepted": False, "error": command}
        try:
            settings = resolve(command, stand_in(env), env)
        except InputError as problem:
            return {"accepted": False, "error": f"ValueError: {problem}"}
        if isinstance(settings, StartFailure):
            return {"accepted": False, "error": settings.message}
        return {"accepted": True, "resolved": _resolved(settings)}

    def _file(self, path: str, meant: Sequence[str]) -> Answer:
        command = self._read(["serve", "--config", path])
        if isinstance(command, str):
            return {"accepted": False, "error": command}
        values, differences = _values(command), {}
        if meant:
            other = self._read(meant)
            if isinstance(other, str):
                return {"accepted": False, "error": other}
            differences = {
                name: {"file": values[name], "meant": value}
                for name, value in _values(other).items()
                if values[name] != value
            }
        return {"accepted": True, "values": values, "differences": differences}

    def _read(self, words: Sequence[str]) -> ServeCommand | str:
        """The command, or the parser's complaint."""
        try:
            return read_command(words, version=self._told.version)
        except RefusedArguments as refused:
            return refused.line[refused.line.rfind("error: ") :]
        except UnreadableArguments as problem:
            return str(problem)


def _words(given: object) -> list[str]:
    return [str(word) for word in given] if isinstance(given, list | tuple) else []


def _values(command: ServeCommand) -> dict[str, JsonValue]:
    """The effective value of every flag by its name."""
    names = [name for name in known_flags().flags if name not in ("model", "config")]
    return {"model": command.model, **{name: command.value(name) for name in names}}


def _resolved(settings: EngineSettings) -> dict[str, JsonValue]:
    return {
        "max-model-len": settings.max_model_len,
        "max-num-seqs": settings.max_num_seqs,
        "max-num-batched-tokens": settings.max_num_batched_tokens,
        "enable-chunked-prefill": settings.enable_chunked_prefill,
        "gpu-memory-utilization": settings.gpu_memory_utilization,
        "kv-cache-memory-bytes": settings.kv_cache_memory_bytes,
        "kv-cache-dtype": settings.kv_cache_dtype,
        "block-size": settings.block_size,
        "enable-prefix-caching": settings.enable_prefix_caching,
        "kv-offloading-size": settings.kv_offloading_gib or None,
        "num-gpu-blocks-override": settings.num_gpu_blocks_override,
        "enforce-eager": settings.enforce_eager,
        "tensor-parallel-size": settings.tensor_parallel_size,
    }
