"""What of a trial's loads is kept beside its log: every request, and the server over time.

Compressed JSON lines. Times are seconds from the first request of their run.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import InputError
from tuner.metrics.page import GENERATION_TOKENS, PREEMPTIONS, PROMPT_TOKENS, Snapshot
from tuner.redact import redact_text
from tuner.types import JsonValue, RequestRecord, RequestStatus

if TYPE_CHECKING:
    from tuner.measuring.session import Run  # heavy, and reading what was kept needs none of it

REQUESTS_FILE = "requests.jsonl.gz"
"""A line for each request, in the order of the workload."""

SERVER_FILE = "server_metrics.jsonl.gz"
"""A line for each look at the server's counters."""

_MICROSECONDS = 6


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """A request as it was kept.

    Attributes:
        run: which load of the server life, from 0.
    """

    run: int
    record: RequestRecord


def keep(directory: Path, runs: Sequence[Run]) -> None:
    """Write both files of a trial.

    Raises:
        OSError: they cannot be written.
    """
    _write(directory / REQUESTS_FILE, _request_lines(runs))
    _write(directory / SERVER_FILE, _server_lines(runs))


def read_requests(directory: Path) -> Iterator[KeptRequest]:
    """The requests of a trial.

    Raises:
        InputError: there are none, or the file is damaged.
    """
    path = directory / REQUESTS_FILE
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield _kept(json.loads(line))
    except FileNotFoundError:
        raise InputError(
            f"{path}: there is no such file", "only trials that were measured have one"
        ) from None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as problem:
        raise InputError(f"{path}: cannot be read: {problem}") from problem


def _write(path: Path, lines: Iterable[Mapping[str, JsonValue]]) -> None:
    partial = path.with_suffix(".part")
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=6) as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    partial.replace(path)


def _request_lines(runs: Sequence[Run]) -> Iterator[Mapping[str, JsonValue]]:
    for number, run in enumerate(runs):
        start_s = _start_s(run)
        for record in run.records:
            yield {
                "run": number,
                "index": record.index,
                "status": record.status.value,
                "intended_s": None
                if record.intended_s is None
                else _from(record.intended_s, start_s),
                "send_s": _from(record.send_s, start_s),
                "end_s": _from(record.end_s, start_s),
                "prompt_tokens": record.prompt_tokens,
                "output_tokens": record.output_tokens,
                "token_times_s": [_from(at_s, start_s) for at_s in record.token_times_s],
                "token_counts": list(record.token_counts),
                "error": redact_text(record.error),
            }


def _server_lines(runs: Sequence[Run]) -> Iterator[Mapping[str, JsonValue]]:
    for number, run in enumerate(runs):
        start_s = _start_s(run)
        for sample in run.samples:
            yield {
                "run": number,
                "at_s": _from(sample.at_s, start_s),
                "running": sample.running,
                "waiting": sample.waiting,
                "kv_cache_usage": sample.kv_usage_mean,
                "preemptions": _sum(sample, PREEMPTIONS),
                "prompt_tokens": _sum(sample, PROMPT_TOKENS),
                "generation_tokens": _sum(sample, GENERATION_TOKENS),
            }


def _kept(line: dict[str, Any]) -> KeptRequest:
    run = int(line.pop("run"))
    line["status"] = RequestStatus(line["status"])
    for name in ("token_times_s", "token_counts"):
        line[name] = tuple(line[name])
    return KeptRequest(run, RequestRecord(**line))


def _start_s(run: Run) -> float:
    return min((record.send_s for record in run.records), default=0.0)


def _from(at_s: float, start_s: float) -> float:
    return round(at_s - start_s, _MICROSECONDS)


def _sum(sample: Snapshot, names: Sequence[str]) -> float:
    return sum(sample.series(names).values())
