"""`tuner version`: the tuner, what it stands on, and the vLLM on the PATH."""

from __future__ import annotations

import asyncio

from tuner.engine.asking import where_vllm_is
from tuner.engine.introspect import CannotAsk, find_python
from tuner.errors import EnvironmentProblem
from tuner.types import ServerSpec
from tuner.versions import versions

_DEFAULT_SERVER = ServerSpec(("vllm", "serve"), model="", args={}, env={}, startup_timeout_s=0)


def all_versions() -> dict[str, str]:
    """Name to version; of vLLM that which `[vllm, serve]` would start, or why there is none."""
    return versions(vllm=_vllm_version())


def _vllm_version() -> str:
    try:
        python = find_python(_DEFAULT_SERVER)
        if isinstance(python, CannotAsk):
            return f"not known: {python.reason}"
        place = asyncio.run(where_vllm_is(python))
    except EnvironmentProblem:
        return "not on the PATH (`server: command:` may name another)"
    return str(place["version"]) if place else f"not installed for {python.path}"
