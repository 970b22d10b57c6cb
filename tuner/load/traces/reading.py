"""Requests of a file, one by one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

from tuner.errors import InputError
from tuner.load.traces import (
    azure,
    burstgpt,
    custom,
    guidellm,
    mooncake,
    openai_batch,
    sharegpt,
)
from tuner.load.traces.detect import detect
from tuner.load.traces.opening import TextFile, open_text
from tuner.load.traces.trace import (
    Entry,
    RefusalCount,
    Refusals,
    Refused,
    TraceFormat,
    TraceRequest,
)

READERS: Mapping[TraceFormat, Callable[[TextFile], Iterator[Entry]]] = {
    TraceFormat.SHAREGPT: sharegpt.read,
    TraceFormat.CUSTOM: custom.read,
    TraceFormat.OPENAI_BATCH: openai_batch.read,
    TraceFormat.AZURE: azure.read,
    TraceFormat.BURSTGPT: burstgpt.read,
    TraceFormat.MOONCAKE: mooncake.read,
    TraceFormat.GUIDELLM: guidellm.read,
}


class TraceStream:
    """A file's requests, read anew and in its order each time they are iterated over.

    Args:
        form: the format; told by the content if None.

    Attributes:
        refused: what was refused so far in the last reading.

    Raises:
        InputError: the file cannot be opened, or its format not be told. Iterating raises it
            where the file is damaged, and at the end of one without a usable row.
    """

    def __init__(self, path: Path, form: TraceFormat | None = None) -> None:
        self.path = path
        self.format = form or detect(path)
        self.refused = Refusals({}, {})

    def __iter__(self) -> Generator[TraceRequest, None, None]:
        count = RefusalCount()
        usable = 0
        try:
            with open_text(self.path) as file:
                for entry in READERS[self.format](file):
                    if isinstance(entry, Refused):
                        count.add(entry)
                    else:
                        usable += 1
                        yield entry
        finally:
            self.refused = count.result()
        if not usable:
            raise self._nothing_usable()

    def _nothing_usable(self) -> InputError:
        rows = self.refused.total
        if not rows:
            return InputError(f"{self.path}: has no rows.", f"It was read as {self.format}.")
        return InputError(
            f"{self.path}: none of its {rows:,} rows is a request of the format {self.format}: "
            f"{self.refused}",
            "Mend the file, or name its format: as `workload.kind`, or with `tuner workload "
            "--format`.",
        )
