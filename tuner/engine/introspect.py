"""Asks the vLLM that will run which flags it has.

vLLM is found behind `server.command` and asked in its own process, with the server's
environment; the answer takes some ten seconds and is kept until that vLLM changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tuner.engine.asking import PROBE, Asker, VllmPython, where_vllm_is
from tuner.engine.flags import FlagTable
from tuner.engine.simulated.server.answers import StandInAnswers, is_stand_in
from tuner.errors import EnvironmentProblem
from tuner.redact import MASK
from tuner.types import ProgressSink, ServerSpec

_INSTALL = "Install it (pip install vllm), or set `server: command:` to where it is."

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?")

_TRANSPARENT = frozenset(
    {"chrt", "env", "ionice", "nice", "nohup", "numactl", "prlimit", "setsid", "stdbuf"}
    | {"taskset", "time", "timeout"}
)
"""Commands that only start another one, on this machine and with this environment."""

_ENV_OF_INTEREST = re.compile(r"VLLM_\w+|PYTHONPATH|PYTHONHOME|CUDA_VISIBLE_DEVICES|HF_\w*HOME")
"""What changes the flags, their defaults, or which vLLM it is."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS")


@dataclass(frozen=True, slots=True)
class CannotAsk:
    """There is no Python here that could tell, such as when vLLM runs in a container.

    Attributes:
        reason: a phrase for a sentence such as "flags were not checked: REASON".
    """

    reason: str


def server_env(server: ServerSpec, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of the server's process.

    VLLM_API_KEY is left out: the server listens on this machine alone, and would turn the
    tuner's own requests away.
    """
    set_here = {**server.env, **(more or {})}
    # A study's database holds secrets masked; then the caller's own environment has them.
    known = {name: value for name, value in set_here.items() if MASK not in value}
    env = {**os.environ, **known}
    env.pop("VLLM_API_KEY", None)
    return env


# --- where vLLM is ---------------------------------------------------------------------


def find_python(server: ServerSpec) -> VllmPython | CannotAsk:
    """The Python that `server.command` runs vLLM with.

    Raises:
        EnvironmentProblem: the command does not exist.
    """
    env = server_env(server)
    words = [word.replace("{python}", sys.executable) for word in server.command]
    found = _resolve(words[0], env)
    if os.path.basename(words[0]) in _TRANSPARENT:
        inner = next((i for i, word in enumerate(words[1:], 1) if _starts_vllm(word)), None)
        if inner is None:
            return CannotAsk(f"`{words[0]}` starts something that is not known to be vLLM")
        words = words[inner:]
        found = _resolve(words[0], env)
    if _PYTHON.fullmatch(os.path.basename(words[0])):
        return VllmPython(found, env, required=_names_vllm(words[1:]))
    interpreter = _interpreter_of(found, env)
    if interpreter is None:
        return CannotAsk(f"`{words[0]}` is not a Python program")
    return VllmPython(interpreter, env, required=os.path.basename(words[0]) == "vllm")


def _starts_vllm(word: str) -> bool:
    name = os.path.basename(word)
    return name == "vllm" or _PYTHON.fullmatch(name) is not None


def _names_vllm(arguments: Sequence[str]) -> bool:
    """Whether a Python's arguments say that vLLM is what it runs."""
    for option, value in pairwise(arguments):
        if option == "-m":
            return value.partition(".")[0] == "vllm"
    return bool(arguments) and os.path.basename(arguments[0]) == "vllm"


def _resolve(command: str, env: Mapping[str, str]) -> str:
    found = shutil.which(command, path=env.get("PATH"))
    if found is not None:
        return os.path.abspath(found)
    if os.path.exists(command):
        raise EnvironmentProblem(
            f"`{command}` cannot be executed", f"Make it executable: chmod +x {command}"
        )
    what = "vLLM" if os.path.basename(command) == "vllm" else "The server's command"
    raise EnvironmentProblem(f"{what} is not found: `{command}`", _INSTALL)


def _interpreter_of(script: str, env: Mapping[str, str]) -> str | None:
    """The Python that a script's `#!` names; None if it is another program."""
    try:
        with open(script, "rb") as file:
            start = file.read(4096).decode("utf-8", "replace")
    except OSError as error:
        raise EnvironmentProblem(f"{script} cannot be read: {error.strerror}") from error
    if not start.startswith("#!"):
        return None
    first, _, rest = start[2:].partition("\n")
    words = first.split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    elif words and os.path.basename(words[0]) == "sh":
        # What pip and uv write where the path is too long for the kernel, or has a space:
        # '''exec' "/path/to/python" "$0" "$@"
        exec_line = re.match(r"'''exec' (.+?) \"\$0\"", rest)
        words = shlex.split(exec_line[1]) if exec_line else []
    if not words or not _PYTHON.fullmatch(os.path.basename(words[0])):
        return None
    return _resolve(words[0], env)


# --- its flags -------------------------------------------------------------------------


async def flag_table(server: ServerSpec, on_progress: ProgressSink) -> FlagTable | CannotAsk:
    """The flags of the vLLM behind `server.command`; from the cache where it is unchanged.

    Raises:
        EnvironmentProblem: there is no vLLM, or it cannot be imported.
        InputError: the environment of the stand-in has a value that it cannot use.
    """
    python = find_python(server)
    if is_stand_in(server.command):
        return StandInAnswers(server_env(server)).flags()
    if isinstance(python, CannotAsk):
        return python
    place = await where_vllm_is(python)
    if place is None:
        if python.required:
            raise EnvironmentProblem(f"vLLM is not installed in {python.path}", _INSTALL)
        return CannotAsk(f"{python.path} has no vLLM installed")
    cache = _cache_file(python, place)
    if (cached := _read_cache(cache)) is not None:
        return cached
    asker = await Asker.start(python, on_progress)
    try:
        table = await asker.flags()
    finally:
        await asker.close()
    _write_cache(cache, table)
    return table


def _cache_file(python: VllmPython, place: Mapping[str, object]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    env = {
        name: value
        for name, value in python.env.items()
        if _ENV_OF_INTEREST.fullmatch(name) and not _SECRET.search(name)
    }
    probe = hashlib.sha256(PROBE.read_bytes()).hexdigest()
    key = json.dumps([python.path, dict(place), env, probe], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:20]
    return Path(base, "vllm-memory-tuner", f"flags-{place.get('version')}-{digest}.json")


def _read_cache(path: Path) -> FlagTable | None:
    try:
        return FlagTable.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # absent, cut short, or from another version of this program


def _write_cache(path: Path, table: FlagTable) -> None:
    """Atomically; a cache that cannot be written is no trouble."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".flags-")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(table.to_json(), file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
