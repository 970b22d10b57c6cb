"""Which requests keep what was promised.

Goodput as in DistServe (Zhong et al., OSDI 2024): a request counts if it meets all limits of the
SLO, and goodput is how many of them there are a second. A request that was not served meets
none. Its ITL is the largest gap between two of its tokens: a stall is what is promised not to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tuner.metrics.latency import e2e_s, itl_s, tpot_s, ttft_s
from tuner.types import RequestRecord, RequestStatus, SloLimit, SloMetric


def meets(record: RequestRecord, slo: Iterable[SloLimit]) -> bool:
    """Whether a request was served within all limits."""
    return all(_within(record, limit) for limit in slo) and _served(record)


def attained(records: Sequence[RequestRecord], slo: Sequence[SloLimit]) -> float:
    """How nearly a load meets the SLO: 1 and more if it does.

    For each limit, the share of requests within it over the share that its percentile asks for;
    the scarcest of them. Without requests nothing is met.
    """
    if not records or not slo:
        return 0.0
    return min(within(records, limit) / (limit.percentile / 100.0) for limit in slo)


def within(records: Sequence[RequestRecord], limit: SloLimit) -> float:
    """The share of requests that were served within one limit."""
    return sum(keeps(record, limit) for record in records) / len(records) if records else 0.0


def keeps(record: RequestRecord, limit: SloLimit) -> bool:
    """Whether a request was served within one limit."""
    return _served(record) and _within(record, limit)


def _served(record: RequestRecord) -> bool:
    return record.status is RequestStatus.OK and bool(record.token_times_s)


def _within(record: RequestRecord, limit: SloLimit) -> bool:
    if not record.token_times_s:
        return False
    return _latency_s(record, limit.metric) <= limit.limit_s


def _latency_s(record: RequestRecord, metric: SloMetric) -> float:
    """An answer of one token has no gaps: its TPOT and ITL are 0."""
    match metric:
        case SloMetric.TTFT:
            return ttft_s(record)
        case SloMetric.E2E:
            return e2e_s(record)
        case SloMetric.TPOT:
            return tpot_s(record) if record.output_tokens > 1 else 0.0
        case SloMetric.ITL:
            return max(itl_s(record), default=0.0)
