"""`workload.json` beside a study: the load of a server that was asked once what it serves.

Of kind `like-server` alone: every other workload follows from the space file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tuner.errors import EnvironmentProblem
from tuner.storage import files
from tuner.types import WorkloadSpec

FILE = "workload.json"


@dataclass(frozen=True, slots=True)
class AskedWorkload:
    """What the space file asks for, and what that came to when the server was asked."""

    asked: WorkloadSpec
    found: WorkloadSpec


_ADAPTER = TypeAdapter(AskedWorkload)


def read(directory: Path, asked: WorkloadSpec) -> WorkloadSpec | None:
    """What was found for `asked`; None if the study does not know, or asked for something else."""
    try:
        kept = _ADAPTER.validate_json((directory / FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return kept.found if kept.asked == asked else None


def write(directory: Path, asked: WorkloadSpec, found: WorkloadSpec) -> None:
    """Keep what was found.

    Raises:
        EnvironmentProblem: it cannot be written.
    """
    path = directory / FILE
    text = _ADAPTER.dump_json(AskedWorkload(asked, found), indent=1).decode()
    try:
        files.write_text(path, text + "\n")
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be written: {error.strerror}") from error
