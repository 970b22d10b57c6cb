"""`tuner show STUDY TRIAL --requests`: each request of a trial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console

from tuner.measuring.kept import KeptRequest
from tuner.metrics.latency import due_s, e2e_s, tpot_s, ttft_s
from tuner.report.plain import plain_line
from tuner.types import JsonValue

_HEAD = (
    f"{'load':>4} {'request':>7} {'status':<12} {'due s':>9} {'late ms':>8} {'TTFT ms':>9} "
    f"{'TPOT ms':>8} {'E2E ms':>10} {'in':>7} {'out':>6}  error"
)


def print_requests(console: Console, requests: Iterable[KeptRequest]) -> None:
    """A line each, in the order of the workload."""
    for line in (_HEAD, *map(_line, requests)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def requests_document(requests: Iterable[KeptRequest]) -> list[JsonValue]:
    """The same for scripts: seconds from the first request of the load."""
    return list(_documents(requests))


def _documents(requests: Iterable[KeptRequest]) -> Iterator[JsonValue]:
    for kept in requests:
        record = kept.record
        ttft, tpot, e2e = _latencies_s(kept)
        yield {
            "load": kept.run,
            "index": record.index,
            "status": record.status.value,
            "due_s": due_s(record),
            "send_s": record.send_s,
            "end_s": record.end_s,
            "ttft_s": ttft,
            "tpot_s": tpot,
            "e2e_s": e2e,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "token_times_s": list(record.token_times_s),
            "token_counts": list(record.token_counts),
            "error": record.error,
        }


def _line(kept: KeptRequest) -> str:
    record = kept.record
    ttft, tpot, e2e = _latencies_s(kept)
    late_ms = (record.send_s - due_s(record)) * 1000
    return (
        f"{kept.run:>4} {record.index:>7} {record.status.value:<12} {due_s(record):>9.3f} "
        f"{late_ms:>8.1f} {_ms(ttft, 9)} {_ms(tpot, 8)} {_ms(e2e, 10)} "
        f"{record.prompt_tokens:>7} {record.output_tokens:>6}  {plain_line(record.error)}"
    ).rstrip()


def _latencies_s(kept: KeptRequest) -> tuple[float | None, float | None, float | None]:
    """TTFT, TPOT and E2E as far as there were tokens."""
    record = kept.record
    if not record.token_times_s:
        return None, None, None
    tpot = tpot_s(record) if record.output_tokens > 1 else None
    return ttft_s(record), tpot, e2e_s(record)


def _ms(seconds: float | None, width: int) -> str:
    return f"{'-':>{width}}" if seconds is None else f"{seconds * 1000:>{width}.1f}"
