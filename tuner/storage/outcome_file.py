"""`outcome.json` in a trial's folder: written before the database, and read where that failed.

A database that is full or locked at the end of a trial must not cost its measurement.
"""

from __future__ import annotations

import json
from pathlib import Path

from tuner.storage import files
from tuner.storage.attributes import FAILURE, MEASUREMENT, outcome_json, stored_outcome
from tuner.types import Outcome

_NAME = "outcome.json"


def write(folder: Path, outcome: Outcome, duration_s: float) -> None:
    """Keep an outcome, secrets masked.

    Raises:
        OSError: it cannot be written.
    """
    document = {"duration_s": round(duration_s, 3), "outcome": outcome_json(outcome)}
    files.write_text(folder / _NAME, json.dumps(document, indent=2) + "\n")


def forget(folder: Path) -> None:
    """Remove what an older study of the same name left here."""
    (folder / _NAME).unlink(missing_ok=True)


def read(folder: Path) -> tuple[Outcome, float] | None:
    """The outcome and its duration in seconds, if they were written as a whole."""
    try:
        document = json.loads((folder / _NAME).read_text(encoding="utf-8"))
        data = document["outcome"]
        kind = FAILURE if "cause" in data else MEASUREMENT
        outcome = stored_outcome({kind: data})
        return None if outcome is None else (outcome, float(document["duration_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
