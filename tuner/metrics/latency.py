"""Latencies of one request, in seconds.

Definitions as in vLLM's own serving benchmark (`vllm bench serve`), but that latencies count
from when a request was due: in an open loop a client that is late, because the server kept it
busy, would otherwise hide the wait (coordinated omission).

- TTFT, time to first token: first token - due.
- E2E latency: last token - due.
- TPOT, time per output token: (last token - first token) / (output tokens - 1), for answers of
  two tokens or more.
- ITL, inter-token latency: each gap between two tokens. Where an event of the stream carries
  several tokens (speculative decoding, `--stream-interval`), the time since the event before is
  theirs in equal parts: a gap of 40 ms before an event of four tokens is four gaps of 10 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tuner.types import RequestRecord


def due_s(record: RequestRecord) -> float:
    """When it was to be sent; in a closed loop, when it was sent."""
    return record.send_s if record.intended_s is None else record.intended_s


def ttft_s(record: RequestRecord) -> float:
    """Time to first token; the record must have tokens."""
    return record.token_times_s[0] - due_s(record)


def e2e_s(record: RequestRecord) -> float:
    """Time to the last token; the record must have tokens."""
    return record.token_times_s[-1] - due_s(record)


def tpot_s(record: RequestRecord) -> float:
    """Time per output token after the first; the record must have two tokens or more."""
    return (record.token_times_s[-1] - record.token_times_s[0]) / (record.output_tokens - 1)


def itl_s(record: RequestRecord) -> Iterator[float]:
    """The gaps between tokens, one fewer than there are tokens in events after the first."""
    counts = record.token_counts or (1,) * len(record.token_times_s)
    gaps = pairwise(record.token_times_s)
    for (earlier_s, later_s), count in zip(gaps, counts[1:], strict=True):
        for _ in range(count):
            yield (later_s - earlier_s) / count


def token_arrivals(record: RequestRecord) -> Iterator[tuple[float, int]]:
    """When how many tokens came."""
    counts = record.token_counts or (1,) * len(record.token_times_s)
    return zip(record.token_times_s, counts, strict=True)
