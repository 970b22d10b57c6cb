"""Azure's public traces of language models (CSV): when, and how many tokens; no text.

`TIMESTAMP,ContextTokens,GeneratedTokens`, the times with seven digits after the point (2023)
or with a zone (2024). The multimodal trace (2025) has `NumImages` too: its rows with images
are refused, because the work that images make is not that of as many tokens of text.
"""

from __future__ import annotations

from collections.abc import Iterator

from tuner.load.traces import values
from tuner.load.traces.csv_rows import plain, read_header, require, simple_rows
from tuner.load.traces.opening import TextFile
from tuner.load.traces.trace import Entry, Reason, TraceRequest, entries

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_IMAGES = "NumImages"
_NONE = frozenset({"0", "0.0", ""})


def read(file: TextFile) -> Iterator[Entry]:
    """Every row's time and lengths.

    Raises:
        InputError: a column is missing, or the file cannot be read to its end.
    """
    header = read_header(file)
    time, context, generated = require(file, header, *COLUMNS)
    images = header.places.get(plain(_IMAGES))

    def request(line: int, cells: list[str]) -> TraceRequest | Reason:
        if images is not None and cells[images].strip() not in _NONE:
            return Reason.MEDIA
        arrival_s = values.date_seconds(cells[time])
        return values.timed_request(line, arrival_s, cells[context], cells[generated])

    return entries(simple_rows(file, header), request)
