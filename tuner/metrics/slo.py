"""Which requests keep what was promised.

Goodput as in DistServe (Zhong et al., OSDI 2024): a request counts if it meets all limits of the
SLO, and goodput is how many of them there are a second. A request that was not served meets
none. Its ITL is the largest gap between two of its tokens: a stall is what is promised not to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tuner.metrics.latency import e2e_s, itl_s, tpot_s, ttft_s
from tuner.types import RequestRecord, RequestStatus, SloLimit, SloMetric


@dataclass(frozen=True, slots=True)
class Promises:
    """What became of an SLO.

    Attributes:
        kept: share of the requests that met all limits.
        missed: how many missed each limit, by `limit_name`.
        reached_s: the latency at each limit's percentile, over all requests: the limit is kept
            if it is not above it. Missing where too many requests were not served.
    """

    kept: float
    missed: Mapping[str, int]
    reached_s: Mapping[str, float]


def promises(records: Sequence[RequestRecord], slo: Sequence[SloLimit]) -> Promises | None:
    """What became of an SLO in these requests; None without requests or promises."""
    if not records or not slo:
        return None
    reached = {limit_name(limit): _reached_s(records, limit) for limit in slo}
    return Promises(
        kept=sum(meets(record, slo) for record in records) / len(records),
        missed={limit_name(x): sum(not keeps(r, x) for r in records) for x in slo},
        reached_s={name: value for name, value in reached.items() if math.isfinite(value)},
    )


def limit_name(limit: SloLimit) -> str:
    """As in the space file: `ttft_p99`."""
    return f"{limit.metric}_p{limit.percentile:g}"


def missed_limits(record: RequestRecord, slo: Iterable[SloLimit]) -> tuple[str, ...]:
    """Names of the limits that a request missed."""
    return tuple(limit_name(limit) for limit in slo if not keeps(record, limit))


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


def _reached_s(records: Sequence[RequestRecord], limit: SloLimit) -> float:
    """The smallest latency that the limit's share of the requests did not exceed."""
    latencies_s = sorted(
        _latency_s(record, limit.metric) if _served(record) else math.inf for record in records
    )
    # Rounded, because 0.999 * 1000 is a little more than 999 in floats.
    place = math.ceil(round(limit.percentile / 100.0 * len(records), 9))
    return latencies_s[max(place, 1) - 1]


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
