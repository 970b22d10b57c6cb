"""`tuner workload`: what a file of recorded traffic contains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tuner.load.traces.reading import TraceStream
from tuner.load.traces.statistics import USUAL_CONTEXTS, TraceSummary, describe
from tuner.load.traces.trace import TraceFormat


def describe_file(
    path: Path, form: TraceFormat | None, contexts: Sequence[int] | None
) -> TraceSummary:
    """Read a file, of the format that it shows if none is named.

    Args:
        contexts: `max-model-len` values to compare requests with; usual ones if none.

    Raises:
        InputError: the file cannot be read, its format not be told, or no row is usable.
    """
    return describe(TraceStream(path, form), contexts or USUAL_CONTEXTS)
