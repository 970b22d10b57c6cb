"""What a file of traffic contains, in one reading and 16 bytes a request.

Percentiles are exact, and numpy's (linear interpolation).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tuner.load.traces.prefixes import PrefixCount
from tuner.load.traces.reading import TraceStream
from tuner.load.traces.trace import Refusals, TraceFormat, TraceRequest

CHARACTERS_PER_TOKEN = 4
"""A usual rule of thumb for English text; only for estimates, never for a measurement."""

USUAL_CONTEXTS = (2048, 4096, 8192, 16_384, 32_768, 131_072)
"""`max-model-len` values that requests are compared with if none is given."""

_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: mean and percentiles."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: int


@dataclass(frozen=True, slots=True)
class Exceeding:
    """How many requests, input and output together, a context does not hold."""

    max_model_len: int
    requests: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a file contains.

    Attributes:
        requests: usable rows.
        input_tokens: of those requests that have a length or a text.
        output_tokens: of those whose answer has a length; None if there is none.
        estimated_tokens: whether some length is an estimate of a text, at
            `CHARACTERS_PER_TOKEN`.
        duration_s: from the first arrival to the last; None without times.
        request_rate_per_s: gaps between arrivals over `duration_s`; None if that is 0.
        burstiness: 1 / CV^2 of the gaps between arrivals, which is the shape of the gamma
            distribution with their mean and variance, and what `vllm bench serve` calls
            burstiness: 1 is Poisson, below is burstier. None for fewer than two gaps, or if
            all are equal.
        shared_prefix_fraction: share of the input that repeats the beginning of an earlier
            request; None where only lengths are known. See `prefixes.PrefixCount`.
        exceeding: an output that is not known counts as one token, the least there is.
        untimed: requests without an arrival, in a file where others have one.
        out_of_order: requests that came in the file after a later one.
    """

    path: Path
    format: TraceFormat
    requests: int
    refused: Refusals
    input_tokens: Lengths
    output_tokens: Lengths | None
    estimated_tokens: bool
    duration_s: float | None
    request_rate_per_s: float | None
    burstiness: float | None
    shared_prefix_fraction: float | None
    exceeding: tuple[Exceeding, ...]
    untimed: int
    out_of_order: int


def estimated_tokens(text: str) -> int:
    """Roughly how many tokens `text` has, at four characters a token; at least one."""
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))


def describe(stream: TraceStream, contexts: Sequence[int] = USUAL_CONTEXTS) -> TraceSummary:
    """Read a file once and say what it contains.

    Raises:
        InputError: the file cannot be read, or no row of it is usable.
    """
    columns = _Columns()
    prefixes = PrefixCount()
    for request in stream:
        columns.add(request)
        prefixes.add(request)
    inputs, outputs = columns.inputs(), columns.outputs()
    arrivals = np.sort(columns.arrivals())
    duration, rate, burstiness = _timing(arrivals)
    return TraceSummary(
        path=stream.path,
        format=stream.format,
        requests=len(inputs),
        refused=stream.refused,
        input_tokens=_lengths(inputs),
        output_tokens=_lengths(known) if (known := outputs[outputs != _UNKNOWN]).size else None,
        estimated_tokens=columns.is_estimated,
        duration_s=duration,
        request_rate_per_s=rate,
        burstiness=burstiness,
        shared_prefix_fraction=prefixes.fraction(),
        exceeding=_exceeding(inputs, outputs, contexts),
        untimed=len(inputs) - len(arrivals) if len(arrivals) else 0,
        out_of_order=columns.out_of_order,
    )


class _Columns:
    """Lengths and times of all requests: two integers of four bytes and a float each."""

    def __init__(self) -> None:
        self._inputs = array("i")
        self._outputs = array("i")
        self._arrivals = array("d")
        self._latest = float("-inf")
        self.is_estimated = False
        self.out_of_order = 0

    def add(self, request: TraceRequest) -> None:
        sent = request.input_tokens
        self._inputs.append(self._estimate(request.text) if sent is None else sent)
        answered = request.output_tokens
        if answered is None:
            answered = _UNKNOWN if request.reply is None else self._estimate(request.reply)
        self._outputs.append(answered)
        if request.arrival_s is not None:
            self._arrivals.append(request.arrival_s)
            self.out_of_order += request.arrival_s < self._latest
            self._latest = max(self._latest, request.arrival_s)

    def inputs(self) -> NDArray[np.int32]:
        return np.asarray(self._inputs, dtype=np.int32)

    def outputs(self) -> NDArray[np.int32]:
        return np.asarray(self._outputs, dtype=np.int32)

    def arrivals(self) -> NDArray[np.float64]:
        return np.asarray(self._arrivals, dtype=np.float64)

    def _estimate(self, text: str | None) -> int:
        self.is_estimated = True
        return estimated_tokens(text or "")


def _lengths(tokens: NDArray[np.int32]) -> Lengths:
    p50, p90, p99 = np.percentile(tokens, (50, 90, 99)).tolist()
    return Lengths(float(tokens.mean()), p50, p90, p99, int(tokens.max()))


def _exceeding(
    inputs: NDArray[np.int32], outputs: NDArray[np.int32], contexts: Sequence[int]
) -> tuple[Exceeding, ...]:
    least = np.where(outputs == _UNKNOWN, 1, outputs)
    total = inputs.astype(np.int64) + least
    return tuple(
        Exceeding(context, int(np.count_nonzero(total > context))) for context in sorted(contexts)
    )


def _timing(arrivals: NDArray[np.float64]) -> tuple[float | None, float | None, float | None]:
    """Duration, rate and burstiness of sorted arrivals."""
    if not arrivals.size:
        return None, None, None
    duration = float(arrivals[-1] - arrivals[0])
    gaps = np.diff(arrivals)
    if duration <= 0:
        return 0.0, None, None
    variance = float(gaps.var())
    # Gaps that were written as decimals differ in their last bits though they are equal.
    is_even = variance <= (1e-9 * float(gaps.mean())) ** 2
    burstiness = None if len(gaps) < 2 or is_even else float(gaps.mean()) ** 2 / variance
    return duration, len(gaps) / duration, burstiness
