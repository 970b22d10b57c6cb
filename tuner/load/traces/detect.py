"""Which format a file has, by its content: the names in its header, or the keys of its rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path

from tuner.errors import InputError
from tuner.load.traces import azure, burstgpt, guidellm, sharegpt
from tuner.load.traces.csv_rows import plain, read_header
from tuner.load.traces.json_rows import JsonObject, json_rows
from tuner.load.traces.opening import TextFile, open_text
from tuner.load.traces.trace import TraceFormat

_ROWS = 20
"""So many rows of JSON are looked at."""

_BATCH_KEYS = frozenset({"custom_id", "body"})
_MOONCAKE_KEYS = frozenset({"input_length", "hash_ids", "text_input"})
_MOONCAKE_CHAT_KEYS = frozenset({"timestamp", "output_length", "session_id", "delay"})
_HINT = (
    f"Formats: {', '.join(TraceFormat)}. Name one if you know it: as "
    "`workload.kind`, or with `tuner workload --format`."
)
_SHOWN_KEYS = 12
_LONGEST_KEY = 40


def detect(path: Path) -> TraceFormat:
    """The format of a file.

    Raises:
        InputError: none fits, or rows of several; what was seen is in the message.
    """
    with open_text(path) as file:
        first = file.next_character()
        if not first:
            raise file.problem("has nothing but white space", _HINT, 0)
        return _by_rows(file) if first in (b"{", b"[") else _by_header(file)


def _by_header(file: TextFile) -> TraceFormat:
    header = read_header(file)
    names = header.places.keys()
    if {plain(name) for name in azure.COLUMNS} <= names:
        return TraceFormat.AZURE
    if {plain(name) for name in burstgpt.COLUMNS} <= names:
        return TraceFormat.BURSTGPT
    if not names.isdisjoint((*guidellm.TEXT_NAMES, *guidellm.INPUT_NAMES)):
        return TraceFormat.GUIDELLM
    raise file.problem(f"no format has these columns: {_listed(header.names)}", _HINT)


def _by_rows(file: TextFile) -> TraceFormat:
    found: dict[TraceFormat, int] = {}
    seen: dict[str, None] = {}  # in the order of the file
    for line, row in islice(json_rows(file), _ROWS):
        if isinstance(row, dict):
            seen.update(dict.fromkeys(row))
            fitting = of_row(row)
            if fitting is not None:
                found.setdefault(fitting, line)
    if found.keys() == {TraceFormat.CUSTOM, TraceFormat.GUIDELLM}:
        return TraceFormat.GUIDELLM  # which takes the rows of both
    if len(found) == 1:
        return next(iter(found))
    if found:
        lines = ", ".join(f"{name} in line {line}" for name, line in found.items())
        raise InputError(f"{file.path}: has rows of several formats: {lines}", _HINT)
    keys = _listed(list(seen))
    what = f"no format has these keys: {keys}" if keys else "has no JSON object in its first rows"
    raise file.problem(what, _HINT, line=1)


def _listed(names: Sequence[str]) -> str:
    """The first names, so that a person sees where one ends and that some were cut."""
    shown = []
    for name in names[:_SHOWN_KEYS]:
        short = name if len(name) <= _LONGEST_KEY else f"{name[:_LONGEST_KEY]}…"
        shown.append(f'"{short}"' if "," in short else short)
    if len(names) > _SHOWN_KEYS:
        shown.append(f"… ({len(names)} in all)")
    return ", ".join(shown)


def of_row(row: JsonObject) -> TraceFormat | None:
    """The format whose keys a row has; the more telling ones first."""
    keys = row.keys()
    if keys >= _BATCH_KEYS or keys >= {"method", "url"}:
        return TraceFormat.OPENAI_BATCH
    if "conversations" in keys:
        return TraceFormat.SHAREGPT
    if keys & _MOONCAKE_KEYS:
        return TraceFormat.MOONCAKE
    if keys & set(sharegpt.TURN_KEYS):
        is_timed = "messages" in keys and keys & _MOONCAKE_CHAT_KEYS
        return TraceFormat.MOONCAKE if is_timed else TraceFormat.SHAREGPT
    names: Collection[str] = {plain(key) for key in keys}
    if "prompt" in keys and not set(guidellm.INPUT_NAMES) & set(names):
        return TraceFormat.CUSTOM if _is_custom(keys) else TraceFormat.GUIDELLM
    if set(names) & {*guidellm.TEXT_NAMES, *guidellm.INPUT_NAMES}:
        return TraceFormat.GUIDELLM
    return None


def _is_custom(keys: Collection[str]) -> bool:
    """Whether a row with a `prompt` gives its output length, if at all, as vLLM names it."""
    lengths = {key for key in keys if plain(key) in guidellm.OUTPUT_NAMES}
    return lengths <= {"output_tokens"}
