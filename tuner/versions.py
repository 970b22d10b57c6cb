"""Versions of the tuner and of what it stands on."""

from __future__ import annotations

import importlib.metadata
import platform

import tuner

_DISTRIBUTIONS = ("optuna", "torch")
"""What decides what a search proposes; torch only where it is installed."""


def versions(vllm: str | None = None) -> dict[str, str]:
    """Name to version, for records and for `tuner version`.

    Args:
        vllm: version of the server under test, where it is known.
    """
    found = {"tuner": tuner.__version__, "Python": platform.python_version()}
    if vllm is not None:
        found["vLLM"] = vllm
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
