"""From a configuration to the command line that vLLM is started with.

`adapt` gives the flags as the installed vLLM spells them; `argv` writes the whole command.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.engine.flags import Flag, FlagKind, FlagTable
from tuner.errors import InputError
from tuner.types import EngineConfig, JsonValue, ServerSpec

Args = dict[str, JsonValue]

KV_OFFLOADING = "kv-offloading-size"
"""GiB of host memory for evicted KV cache in total, over all ranks (vLLM 0.13 and newer)."""
KV_OFFLOADING_BACKEND = "kv-offloading-backend"
SWAP_SPACE = "swap-space"
"""GiB of host memory for each GPU (to vLLM 0.17.1)."""

QUIET = "disable-uvicorn-access-log"
"""Without it the log gets a line for each request and each look at /metrics."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """Flags in the installed vLLM's own names, and what had to be changed for it."""

    args: Args
    notices: tuple[str, ...] = ()


def argv(
    server: ServerSpec,
    config: EngineConfig,
    *,
    host: str,
    port: int,
    flags: FlagTable | None = None,
) -> list[str]:
    """The command that serves `config` on `host:port`.

    Args:
        flags: of the vLLM that will run it, None if it could not be asked.

    Raises:
        InputError: `config` has a flag that this vLLM cannot be given.
    """
    args = adapt(config.args, flags).args
    if flags is not None and flags.find(QUIET) is not None:
        args.setdefault(QUIET, True)
    words = command_with_model(server)
    for name, value in args.items():
        words += flag_words(name, value, flags.find(name) if flags else None)
    return [*words, "--host", host, "--port", str(port)]


def command_with_model(server: ServerSpec) -> list[str]:
    """`server.command` with its placeholders filled in and the model where vLLM expects it.

    `{python}` is the tuner's own interpreter, `{model}` the model. Without `{model}`, it
    follows `serve`, or is given as `--model` to older vLLM's `api_server` module.
    """
    words = command_words(server)
    if any("{model}" in word for word in server.command):
        return words
    if "serve" in words:
        at = words.index("serve") + 1
        return [*words[:at], server.model, *words[at:]]
    if any("api_server" in word for word in words):
        return [*words, "--model", server.model]
    return [*words, server.model]


def command_words(server: ServerSpec) -> list[str]:
    """`server.command` with its placeholders filled in."""
    fill = {"{python}": sys.executable, "{model}": server.model}
    return [_filled(word, fill) for word in server.command]


def _filled(word: str, fill: Mapping[str, str]) -> str:
    for placeholder, text in fill.items():
        word = word.replace(placeholder, text)
    return word


def shell_line(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """A command as one would type it into a shell, variables in front; nothing is masked."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in (env or {}).items()]
    return " ".join([*variables, shlex.join(command)])


# --- names -----------------------------------------------------------------------------


def adapt(args: Mapping[str, JsonValue], flags: FlagTable | None) -> Adapted:
    """`args` as the vLLM of `flags` takes them; what is None (vLLM's default) is left out.

    Aliases become names, `no-x: true` becomes `x: false`, dotted keys become one JSON object,
    and host memory for the KV cache is given to whichever flag this vLLM has for it.

    Raises:
        InputError: two keys set the same flag, or host memory has no flag in this vLLM.
    """
    named = _canonical(args, flags)
    adapted, notices = _with_host_memory(merge_dotted(named), flags)
    return Adapted({name: value for name, value in adapted.items() if value is not None}, notices)


def merge_dotted(args: Mapping[str, JsonValue]) -> Args:
    """`x.a.b: 1` becomes `x: {a: {b: 1}}`, added to the object or JSON text that `x` has.

    A dotted key wins over the object, at whatever depth; vLLM itself would pass both on, and
    the last one would win as a whole.

    Raises:
        InputError: `x` has a value that is no object.
    """
    merged: Args = {name: value for name, value in args.items() if "." not in name}
    for name, value in args.items():
        flag, *path = name.split(".")
        if path and value is not None:
            merged[flag] = _with_path(_as_object(flag, merged.get(flag)), path, value, name)
    return merged


def _as_object(flag: str, value: JsonValue) -> dict[str, JsonValue]:
    if value is None:
        return {}
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, dict):
        raise InputError(
            f"`{flag}` is set to {json.dumps(value)} and by `{flag}.…` too",
            f"Write all of it as one mapping under `{flag}`.",
        )
    return value


def _with_path(
    target: Mapping[str, JsonValue], path: Sequence[str], value: JsonValue, name: str
) -> dict[str, JsonValue]:
    first, *rest = path
    if not rest:
        return {**target, first: value}
    inner = _as_object(name.rpartition(".")[0], target.get(first))
    return {**target, first: _with_path(inner, rest, value, name)}


def _canonical(args: Mapping[str, JsonValue], flags: FlagTable | None) -> Args:
    named: Args = {}
    spelled: dict[str, str] = {}
    for key, given in args.items():
        name, value = _canonical_item(key, given, flags)
        if name in named:
            raise InputError(
                f"`{spelled[name]}` and `{key}` set the same flag, `{name}`", "Keep one of them."
            )
        named[name], spelled[name] = value, key
    return named


def _canonical_item(key: str, value: JsonValue, flags: FlagTable | None) -> tuple[str, JsonValue]:
    head, dot, path = key.partition(".")
    head = head.replace("_", "-")
    if flags is not None and (flag := flags.find(head)) is not None:
        head = flag.name
    elif head.startswith("no-") and not dot and isinstance(value, bool):
        return positive_name(head, flags), not value
    return head + dot + path, value


def positive_name(name: str, flags: FlagTable | None) -> str:
    """`x` for `no-x`, by its name in `flags` if it is there."""
    positive = name.removeprefix("no-")
    flag = flags.find(positive) if flags else None
    return flag.name if flag else positive


# --- host memory for the KV cache ------------------------------------------------------


def host_memory_flag(name: str, flags: FlagTable) -> str | None:
    """The flag that stands for `name` (one of the two) in this vLLM; None if it has neither."""
    if flags.find(name) is not None:
        return name
    other = SWAP_SPACE if name == KV_OFFLOADING else KV_OFFLOADING
    return other if flags.find(other) is not None else None


def _with_host_memory(args: Args, flags: FlagTable | None) -> tuple[Args, tuple[str, ...]]:
    """Off is off, and a size goes to the flag that this vLLM has."""
    args = dict(args)
    notices: list[str] = []
    for name in (KV_OFFLOADING, SWAP_SPACE):
        if flags is None or args.get(name) is None or flags.find(name) is not None:
            continue
        size = _gib(name, args.pop(name))
        target = host_memory_flag(name, flags)
        if target is None and size > 0:
            raise InputError(
                f"vLLM {flags.version} has neither `{KV_OFFLOADING}` nor `{SWAP_SPACE}`: "
                "it keeps no KV cache in host memory",
                f"Remove `{name}`.",
            )
        if target is not None:
            if args.get(target) is not None:
                raise InputError(
                    f"`{name}` and `{target}` set the same memory in vLLM {flags.version}",
                    "Keep one of them.",
                )
            args[target] = _converted(target, size, args)
            notices += [_renamed(name, target, flags.version)] if size else []
    if args.get(KV_OFFLOADING) is not None and _gib(KV_OFFLOADING, args[KV_OFFLOADING]) == 0:
        del args[KV_OFFLOADING]
    if KV_OFFLOADING not in args:
        # Without a size the backend means nothing, and older vLLM does not know it.
        args.pop(KV_OFFLOADING_BACKEND, None)
    return args, tuple(notices)


def _converted(target: str, size: float, args: Mapping[str, JsonValue]) -> float:
    """GiB in total to GiB a GPU, or back."""
    ranks = args.get("tensor-parallel-size") or 1
    count = ranks if isinstance(ranks, int) else int(str(ranks))
    return size / count if target == SWAP_SPACE else size * count


def _renamed(name: str, target: str, version: str) -> str:
    unit = "GiB for each GPU" if target == SWAP_SPACE else "GiB in total over all GPUs"
    return f"vLLM {version} has no `{name}`: its value is given as `--{target}` ({unit})"


def _gib(name: str, value: JsonValue) -> float:
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(value)
    except ValueError:
        pass
    raise InputError(f"`{name}` takes a number of GiB, not {json.dumps(value)}")


# --- words -----------------------------------------------------------------------------


def flag_words(name: str, value: JsonValue, flag: Flag | None) -> list[str]:
    """One flag as argv words; none where it is left at its default.

    Args:
        flag: what the installed vLLM says of it; without that a list of plain values is
            written as several words, and false as `--no-name`.
    """
    if value is None:
        return []
    if isinstance(value, bool):
        return _bool_words(name, value, flag)
    if isinstance(value, list):
        return _list_words(name, value, flag)
    return _single(name, _text(value, flag))


def _bool_words(name: str, value: bool, flag: Flag | None) -> list[str]:
    kind = flag.kind if flag else FlagKind.BOOL
    if kind is FlagKind.BOOL:
        return [f"--{name}" if value else f"--no-{name}"]
    if kind is FlagKind.SWITCH or (flag is not None and flag.optional_value):
        return [f"--{name}"] if value else []
    return [f"--{name}", json.dumps(value)]


def _list_words(name: str, values: Sequence[JsonValue], flag: Flag | None) -> list[str]:
    texts = [_text(value, flag) for value in values]
    if flag is not None and flag.repeats:
        return [word for text in texts for word in _single(name, text)]
    plain = not any(isinstance(value, list | dict) for value in values)
    if flag.takes_list if flag else plain:
        return [f"--{name}", *texts] if texts else []
    return _single(name, json.dumps(values))


def _single(name: str, text: str) -> list[str]:
    # vLLM takes a word that starts with "-" and has a dot for a dotted option.
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def _text(value: JsonValue, flag: Flag | None) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        if flag is not None and flag.kind in (FlagKind.INT, FlagKind.SIZE) and value.is_integer():
            return str(int(value))
        # Twelve digits tell 0.85 from its neighbours and hide the noise of 0.7 + 15 * 0.01.
        return f"{value:.12g}"
    return json.dumps(value)
