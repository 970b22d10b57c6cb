"""Requests of a file, one by one or all in memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
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
    Trace,
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
            "Mend the file, or name its format with --format.",
        )


def load(path: Path, form: TraceFormat | None = None, *, limit: int | None = None) -> Trace:
    """Requests of a file in memory, in order of arrival where times are recorded.

    Args:
        limit: stop after so many requests of the file's order; rows behind are not looked at.

    Raises:
        InputError: the file cannot be read, its format not be told, or no row is usable.
    """
    stream = TraceStream(path, form)
    requests: list[TraceRequest] = []
    reading = iter(stream)
    for request in reading:
        requests.append(request)
        if limit is not None and len(requests) >= limit:
            break
    reading.close()  # so that the stream tells what was refused
    ordered, moved = _in_order_of_arrival(requests)
    return Trace(stream.format, path, tuple(ordered), stream.refused, moved)


def _in_order_of_arrival(requests: list[TraceRequest]) -> tuple[list[TraceRequest], int]:
    """Sorted and beginning at 0, and how many rows came after a later one."""
    latest = None
    moved = 0
    keys = []
    for request in requests:
        if request.arrival_s is not None:
            moved += latest is not None and request.arrival_s < latest
            latest = max(request.arrival_s, latest) if latest is not None else request.arrival_s
            keys.append(request.arrival_s)
        else:  # without a time it stays behind the row before it
            keys.append(keys[-1] if keys else float("-inf"))
    if latest is None:
        return requests, 0
    places = sorted(range(len(requests)), key=keys.__getitem__)
    begin = min(key for key in keys if key != float("-inf"))
    return [_shifted(requests[place], begin) for place in places], moved


def _shifted(request: TraceRequest, begin_s: float) -> TraceRequest:
    if request.arrival_s is None:
        return request
    return replace(request, arrival_s=request.arrival_s - begin_s)
