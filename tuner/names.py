"""Names: of vLLM flags, of environment variables (`env.NAME`), and of studies.

A flag has one canonical spelling here: hyphens, no leading `--`. What follows the first dot
(`compilation-config.cudagraph_mode`) is a key of a JSON value and stays as it is written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from tuner.types import ENV_PREFIX

_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9-]*(?:\.[A-Za-z0-9_+-]+)*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STUDY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

GIB_NAMES = frozenset({"kv-offloading-size", "swap-space", f"{ENV_PREFIX}VLLM_CPU_KVCACHE_SPACE"})
"""Values that vLLM reads as a number of GiB, besides the flags that end in `-gb`."""

_CHOSEN = "the tuner chooses it for every server it starts"
_CHANNEL = "the tuner speaks plain HTTP to a port on 127.0.0.1"
_RESERVED = {
    "host": _CHOSEN,
    "port": _CHOSEN,
    "uds": _CHANNEL,
    "grpc": _CHANNEL,
    "enable-ssl-refresh": _CHANNEL,
    "root-path": "the tuner asks the server at its usual paths",
    "api-key": "the tuner sends none, so that the server would turn every request away",
    "headless": "a server without an API cannot be measured",
    "config": "a second file could set what the space file does not show",
    "model": "it belongs to `server.model`",
    "model-tag": "it belongs to `server.model`",
    "disable-log-stats": "it removes /metrics, where preemptions are counted",
    "dry-run": "a server that does not start cannot be measured",
    "help": "it starts no server",
    "version": "it starts no server",
    f"{ENV_PREFIX}VLLM_API_KEY": "the tuner sends no key, so that every request would fail",
    f"{ENV_PREFIX}TMPDIR": "every server gets a private one",
}


def canonical(name: str) -> str:
    """The one spelling of a flag or `env.NAME`; not checked, see `check_name`."""
    text = name.strip()
    if text.startswith(ENV_PREFIX):
        return text
    head, dot, tail = text.removeprefix("--").partition(".")
    return head.replace("_", "-") + dot + tail


def check_name(name: str) -> None:
    """Refuse what cannot be a flag or an environment variable (`name` is canonical).

    Raises:
        ValueError: with a message that starts with the name.
    """
    if name.startswith(ENV_PREFIX):
        if not _ENV_NAME.fullmatch(name.removeprefix(ENV_PREFIX)):
            raise ValueError(f"`{name}` is not an environment variable")
    elif not _FLAG.fullmatch(name):
        raise ValueError(f"`{name}` is not a flag of `vllm serve`")


def reserved(name: str) -> str | None:
    """Why the user cannot set `name` (canonical), None where they can."""
    flag = name if name.startswith(ENV_PREFIX) else name.partition(".")[0]
    flag = flag.removeprefix("no-")
    return _CHANNEL if flag.startswith("ssl-") else _RESERVED.get(flag)


def is_gib(name: str) -> bool:
    """Whether vLLM reads the value of `name` (canonical) as a number of GiB."""
    return name in GIB_NAMES or name.endswith("-gb")


def is_study_name(name: str) -> bool:
    """Whether `name` can be a study: letters, digits, `.`, `_`, `-`, not starting with `.` or `-`.

    Such a name is one folder under `studies/` and cannot lead out of it.
    """
    return _STUDY.fullmatch(name) is not None


def study_name_from(stem: str) -> str:
    """A study name made from a file's stem; empty if nothing of it can be used."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).lstrip(".-")[:100]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "Did you mean `x`?" for the closest of `known`, empty if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"Did you mean `{close[0]}`?" if close else ""
