"""A replay table: every point of a small space, as a real engine measured it.

One JSON document. `space` is the space file whose grid was measured; a row of `runs` holds a
point and its outcome as a study's database does: figures for people, and the whole record
under `tuner:measurement` or `tuner:failure`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner import spec as spec_file
from tuner.space import Space
from tuner.storage.attributes import outcome_attributes, stored_outcome
from tuner.types import Failure, JsonValue, Outcome, StudySpec

Params = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a table comes from.

    Attributes:
        note: what the table is, and what to know of its figures.
        made_with: the command.
        measured_at: date and time, UTC.
        machine: processor model and cores.
        versions: of vLLM, tuner, Python.
        reference_tokens_per_s: output throughput of the reference each time it was run, spread
            over the whole measurement: how far figures are to be trusted.
    """

    note: str
    made_with: str
    measured_at: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    reference_tokens_per_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class ReplayTable:
    """A table as it was read.

    Attributes:
        spec: the space that was measured, every range a choice of grid values.
        runs: each point and its outcome.
    """

    provenance: Provenance
    spec: StudySpec
    runs: Sequence[tuple[Params, Outcome]]

    def by_digest(self) -> dict[str, Outcome]:
        """Outcomes by `EngineConfig.digest`."""
        space = Space(self.spec)
        return {space.decode(params).digest: outcome for params, outcome in self.runs}


def write(
    path: Path,
    provenance: Provenance,
    space: Mapping[str, Any],
    runs: Sequence[tuple[Params, Outcome]],
) -> None:
    """Write a table, one row a line.

    Args:
        space: the content of a space file, which names no place on this machine.
    """
    fields = {name: getattr(provenance, name) for name in Provenance.__slots__}
    rows = [
        json.dumps({"params": dict(params), "outcome": outcome_attributes(_portable(outcome))})
        for params, outcome in runs
    ]
    head, end = json.dumps({**fields, "space": space, "runs": [None]}, indent=2).split("null")
    path.write_text(head + ",\n    ".join(rows) + end + "\n")


def read(path: Path) -> ReplayTable:
    """Read what `write` wrote."""
    document = json.loads(path.read_text())
    runs: list[tuple[Params, Outcome]] = []
    for row in document["runs"]:
        outcome = stored_outcome(row["outcome"])
        assert outcome is not None, row
        runs.append((row["params"], outcome))
    return ReplayTable(
        Provenance(**{name: document[name] for name in Provenance.__slots__}),
        spec_file.parse(json.dumps(document["space"]), path),
        runs,
    )


def _portable(outcome: Outcome) -> Outcome:
    """Without what only means something where it was measured."""
    if isinstance(outcome, Failure):
        return replace(outcome, excerpt="", log_path=None)
    return outcome
