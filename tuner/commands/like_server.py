"""Asking the server that a workload of kind `like-server` is to be like: once for a study."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tuner import spec as spec_file
from tuner.load import like_server
from tuner.storage import workload_file
from tuner.types import StudySpec, WorkloadKind


def settled(spec: StudySpec, directory: Path, notice: Callable[[str], None]) -> StudySpec:
    """The study with a workload that is the same from now on.

    Args:
        directory: of the study, which may have asked before.

    Raises:
        InputError: the server cannot be asked.
    """
    asked = spec.workload
    if asked.kind is not WorkloadKind.LIKE_SERVER:
        return spec
    kept = workload_file.read(directory, asked)
    if kept is not None:
        return replace(spec, workload=kept)
    seen = asyncio.run(like_server.resolved(asked))
    notice(f"workload {seen.summary}")
    return replace(spec, workload=seen.workload)


def keep(spec: StudySpec, directory: Path) -> None:
    """Write down what the server told, so that the study asks no more.

    Raises:
        EnvironmentProblem: it cannot be written.
    """
    asked = spec_file.parse(spec.text, spec.path).workload
    if asked.kind is WorkloadKind.LIKE_SERVER:
        workload_file.write(directory, asked, spec.workload)
