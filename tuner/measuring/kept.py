"""What of a trial's loads is kept beside its log: every request, and the server over time.

Compressed JSON lines. Times are seconds from the first request of their run.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from tuner.errors import InputError
from tuner.metrics.page import GENERATION_TOKENS, PREEMPTIONS, PROMPT_TOKENS, Snapshot
from tuner.redact import redact_text
from tuner.types import JsonValue, RequestRecord, RequestStatus

if TYPE_CHECKING:
    from tuner.measuring.session import Run  # heavy, and reading what was kept needs none of it

Kept = TypeVar("Kept")

REQUESTS_FILE = "requests.jsonl.gz"
"""A line for each request, in the order of the workload."""

SERVER_FILE = "server_metrics.jsonl.gz"
"""A line for each look at the server's counters."""

_MICROSECONDS = 6
_FILE_MODE = 0o600
"""Only for their owner, as all that a study writes: errors may quote prompts and hosts."""


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """A request as it was kept.

    Attributes:
        run: which load of the server life, from 0.
    """

    run: int
    record: RequestRecord


@dataclass(frozen=True, slots=True)
class KeptLook:
    """A look at the server's counters as it was kept.

    Attributes:
        run: which load of the server life, from 0.
        at_s: seconds from the first request of the run; below 0 before it.
        running, waiting: requests at that moment.
        kv_cache_usage: share of the KV cache in use.
        preemptions, prompt_tokens, generation_tokens: counted since the server's start.
    """

    run: int
    at_s: float
    running: float
    waiting: float
    kv_cache_usage: float
    preemptions: float
    prompt_tokens: float
    generation_tokens: float


def keep(directory: Path, runs: Sequence[Run]) -> None:
    """Write both files of a trial.

    Raises:
        OSError: they cannot be written; nothing of the one that failed is left.
    """
    _write(directory / REQUESTS_FILE, _request_lines(runs))
    _write(directory / SERVER_FILE, _server_lines(runs))


def read_requests(directory: Path) -> Iterator[KeptRequest]:
    """The requests of a trial.

    Raises:
        InputError: there are none, or the file is damaged.
    """
    return _read(directory / REQUESTS_FILE, _kept)


def read_server(directory: Path) -> Iterator[KeptLook]:
    """The looks at a trial's server, in order: queue, KV cache and counters over time.

    Raises:
        InputError: there are none, or the file is damaged.
    """
    return _read(directory / SERVER_FILE, lambda line: KeptLook(**line))


def _read(path: Path, kept: Callable[[dict[str, Any]], Kept]) -> Iterator[Kept]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield kept(json.loads(line))
    except FileNotFoundError:
        raise InputError(
            f"{path}: there is no such file", "only trials that were measured have one"
        ) from None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as problem:
        raise InputError(f"{path}: cannot be read: {problem}") from problem


def _write(path: Path, lines: Iterable[Mapping[str, JsonValue]]) -> None:
    partial = path.with_suffix(".part")
    try:
        with _private(partial) as raw, gzip.open(raw, "wt", 6, encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _private(path: Path) -> BinaryIO:
    """A new file, not what a killed run left there."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    return open(descriptor, "wb")


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
