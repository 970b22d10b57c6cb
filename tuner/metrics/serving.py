"""What the clients saw: throughput and latencies of a load.

Definitions as in vLLM's own serving benchmark (`vllm bench serve`), per served request:

- TTFT, time to first token: first token - send.
- E2E latency: last token - send.
- TPOT, time per output token: (E2E latency - TTFT) / (output tokens - 1), for answers of two
  tokens or more.
- ITL, inter-token latency: each gap between two chunks that carried tokens. One chunk may
  carry several tokens, so ITL shows stalls and TPOT the mean pace.

Throughputs count served requests only, over the window from the first send to the last end
of any request: work on requests that failed is not output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tuner.types import (
    DeviceUse,
    Measurement,
    MemoryFacts,
    Percentiles,
    RequestRecord,
    RequestStatus,
    ServerCounters,
)


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """A load in figures; see the module for definitions, `Measurement` for their use.

    Latencies are None where no request was served (TPOT, ITL: none of two tokens).

    Attributes:
        window_s: first send to last end, 0 without requests.
        offered: `served + rejected + failed`.
        failed: those that timed out included.
        first_error: of the request that failed or was rejected first, "" if none.
    """

    window_s: float
    offered: int
    served: int
    rejected: int
    failed: int
    request_throughput_per_s: float
    output_throughput_tokens_per_s: float
    input_throughput_tokens_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    first_error: str = ""


def summarise(records: Sequence[RequestRecord]) -> ServingFigures:
    """Turn the records of all offered requests into figures."""
    served = [record for record in records if record.status is RequestStatus.OK]
    timed = [record for record in served if record.token_times_s]
    unserved = [record for record in records if record.status is not RequestStatus.OK]
    rejected = sum(record.status is RequestStatus.REJECTED for record in records)
    window_s = _window_s(records)
    first_unserved = min(unserved, key=lambda record: record.end_s, default=None)
    return ServingFigures(
        window_s=window_s,
        offered=len(records),
        served=len(served),
        rejected=rejected,
        failed=len(unserved) - rejected,
        request_throughput_per_s=_rate(len(served), window_s),
        output_throughput_tokens_per_s=_rate(sum(r.output_tokens for r in served), window_s),
        input_throughput_tokens_per_s=_rate(sum(r.prompt_tokens for r in served), window_s),
        ttft_s=percentiles(_ttft_s(record) for record in timed),
        tpot_s=percentiles(_tpot_s(record) for record in timed if record.output_tokens > 1),
        itl_s=percentiles(gap_s for record in timed for gap_s in _gaps_s(record)),
        e2e_s=percentiles(_e2e_s(record) for record in timed),
        first_error=first_unserved.error if first_unserved else "",
    )


def measurement(
    records: Sequence[RequestRecord],
    counters: ServerCounters,
    memory: MemoryFacts,
    device: DeviceUse,
) -> Measurement:
    """The figures of `records` with what was seen of the server meanwhile."""
    figures = summarise(records)
    return Measurement(
        window_s=figures.window_s,
        offered=figures.offered,
        served=figures.served,
        rejected=figures.rejected,
        failed=figures.failed,
        request_throughput_per_s=figures.request_throughput_per_s,
        output_throughput_tokens_per_s=figures.output_throughput_tokens_per_s,
        input_throughput_tokens_per_s=figures.input_throughput_tokens_per_s,
        ttft_s=figures.ttft_s,
        tpot_s=figures.tpot_s,
        itl_s=figures.itl_s,
        e2e_s=figures.e2e_s,
        counters=counters,
        memory=memory,
        device=device,
        first_error=figures.first_error,
    )


def percentiles(values_s: Iterable[float]) -> Percentiles | None:
    """Mean, p50, p90, p99 by linear interpolation (numpy's default); None of no values."""
    values = np.fromiter(values_s, dtype=np.float64)
    if values.size == 0:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Percentiles(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


def _window_s(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    return max(record.end_s for record in records) - min(record.send_s for record in records)


def _rate(amount: int, window_s: float) -> float:
    return amount / window_s if window_s > 0 else 0.0


def _ttft_s(record: RequestRecord) -> float:
    return record.token_times_s[0] - record.send_s


def _e2e_s(record: RequestRecord) -> float:
    return record.token_times_s[-1] - record.send_s


def _gaps_s(record: RequestRecord) -> Iterator[float]:
    return (later_s - earlier_s for earlier_s, later_s in pairwise(record.token_times_s))


def _tpot_s(record: RequestRecord) -> float:
    return (_e2e_s(record) - _ttft_s(record)) / (record.output_tokens - 1)
