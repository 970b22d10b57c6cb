"""BurstGPT's traces (CSV): when, and how many tokens; no text.

Six columns, or eight with `Session ID` and `Elapsed time`; times are seconds from the first
day's midnight. Requests that failed have no response tokens: they are refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from tuner.load.traces import values
from tuner.load.traces.csv_rows import plain, read_header, require, simple_rows
from tuner.load.traces.opening import TextFile
from tuner.load.traces.trace import Entry, Reason, TraceRequest, entries

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_SESSION = "Session ID"


def read(file: TextFile) -> Iterator[Entry]:
    """Every row's time and lengths.

    Raises:
        InputError: a column is missing, or the file cannot be read to its end.
    """
    header = read_header(file)
    time, asked, responded = require(file, header, *COLUMNS)
    named = header.places.get(plain(_SESSION))

    def request(line: int, cells: list[str]) -> TraceRequest | Reason:
        session = None if named is None else cells[named].strip() or None
        arrival_s = values.seconds(cells[time])
        return values.timed_request(line, arrival_s, cells[asked], cells[responded], session)

    return entries(simple_rows(file, header), request)
