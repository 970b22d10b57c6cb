"""All requests of a trace in memory, as tests look at them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tuner.load.traces.reading import TraceStream
from tuner.load.traces.trace import Refusals, TraceFormat, TraceRequest


@dataclass(frozen=True)
class Loaded:
    """In the file's order; times are from the first one."""

    format: TraceFormat
    requests: list[TraceRequest]
    refused: Refusals


def load(path: Path, form: TraceFormat | None = None) -> Loaded:
    stream = TraceStream(path, form)
    requests = list(stream)
    times_s = [row.arrival_s for row in requests if row.arrival_s is not None]
    begin_s = times_s[0] if times_s else 0.0
    shifted = [
        row if row.arrival_s is None else replace(row, arrival_s=row.arrival_s - begin_s)
        for row in requests
    ]
    return Loaded(stream.format, shifted, stream.refused)
