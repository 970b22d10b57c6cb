"""`tuner show STUDY TRIAL --requests`: each request of a trial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console

from tuner.measuring.kept import KeptRequest
from tuner.metrics.latency import due_s, e2e_s, tpot_s, ttft_s
from tuner.metrics.slo import limit_name, missed_limits
from tuner.report.plain import plain_line
from tuner.types import JsonValue, SloLimit

_HEAD = (
    f"{'load':>4} {'request':>7} {'status':<12} {'due s':>9} {'late ms':>8} {'TTFT ms':>9} "
    f"{'TPOT ms':>8} {'E2E ms':>10} {'in':>7} {'out':>6}"
)
_KEPT = "kept"


def print_requests(
    console: Console, requests: Iterable[KeptRequest], slo: Sequence[SloLimit] = ()
) -> None:
    """A line each, in the order of the workload.

    Args:
        slo: which limits each missed is told, if there are any.
    """
    _print(console, f"{_HEAD}{_slo_cell('SLO', slo)}  error")
    for kept in requests:
        missed = ",".join(missed_limits(kept.record, slo)) or _KEPT
        cells = f"{_line(kept)}{_slo_cell(missed, slo)}  {plain_line(kept.record.error)}"
        _print(console, cells.rstrip())


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def _slo_cell(text: str, slo: Sequence[SloLimit]) -> str:
    """As wide as all limits together; nothing without any."""
    if not slo:
        return ""
    width = max(len(_KEPT), len(",".join(map(limit_name, slo))))
    return f"  {text:<{width}}"


def requests_document(
    requests: Iterable[KeptRequest], slo: Sequence[SloLimit] = ()
) -> list[JsonValue]:
    """The same for scripts: seconds from the first request of the load."""
    return list(_documents(requests, slo))


def _documents(requests: Iterable[KeptRequest], slo: Sequence[SloLimit]) -> Iterator[JsonValue]:
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
            "slo_missed": list(missed_limits(record, slo)) if slo else None,
            "error": record.error,
        }


def _line(kept: KeptRequest) -> str:
    record = kept.record
    ttft, tpot, e2e = _latencies_s(kept)
    late_ms = (record.send_s - due_s(record)) * 1000
    return (
        f"{kept.run:>4} {record.index:>7} {record.status.value:<12} {due_s(record):>9.3f} "
        f"{late_ms:>8.1f} {_ms(ttft, 9)} {_ms(tpot, 8)} {_ms(e2e, 10)} "
        f"{record.prompt_tokens:>7} {record.output_tokens:>6}"
    )


def _latencies_s(kept: KeptRequest) -> tuple[float | None, float | None, float | None]:
    """TTFT, TPOT and E2E as far as there were tokens."""
    record = kept.record
    if not record.token_times_s:
        return None, None, None
    tpot = tpot_s(record) if record.output_tokens > 1 else None
    return ttft_s(record), tpot, e2e_s(record)


def _ms(seconds: float | None, width: int) -> str:
    return f"{'-':>{width}}" if seconds is None else f"{seconds * 1000:>{width}.1f}"
