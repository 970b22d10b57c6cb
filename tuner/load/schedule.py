"""When the requests of an open loop are due."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tuner.load import recorded
from tuner.load.seeds import Stream, generator
from tuner.types import ArrivalKind, WorkloadSpec


def schedule(spec: WorkloadSpec, round_number: int = 0) -> tuple[float, ...] | None:
    """Seconds from the first request to each, rising, or None for a closed loop.

    The same in every round but for a trace of which a round takes other rows.

    - `poisson`: gaps are gamma-distributed with shape `burstiness` and mean 1/rate, that is of
      scale 1/(rate * burstiness): the same as in vLLM's own serving benchmark. Shape 1 is a
      Poisson process, below is burstier, above more even. As there, the schedule is stretched
      so that the rate comes out exactly: of a hundred gaps the mean alone would be off by a
      tenth.
    - `constant`: gaps of 1/rate.
    - `ramp`: the rate rises evenly from `request_rate_per_s` to `ramp_to_per_s`, so that the
      whole takes 2/(rate + ramp_to) seconds a request. Gaps are gamma-distributed for the rate
      of their time.
    - `trace`: as recorded, `speedup` times as fast; with a rate stretched to that mean.

    Raises:
        InputError: the times of a trace cannot be read.
    """
    if spec.arrivals is ArrivalKind.TRACE and spec.concurrency is None:
        return _recorded(spec, round_number)
    rate = spec.request_rate_per_s
    if rate is None:
        return None
    if spec.arrivals is ArrivalKind.CONSTANT:
        due = np.arange(spec.requests) / rate
    elif spec.arrivals is ArrivalKind.RAMP:
        due = _ramp(_random(spec), rate, spec.ramp_to_per_s or rate)
    else:
        due = _random(spec) / rate
    return tuple(due.tolist())


def _random(spec: WorkloadSpec) -> NDArray[np.float64]:
    """Times of a process of rate 1, whose last one is at `requests` - 1."""
    gaps = generator(spec.seed, Stream.ARRIVALS).gamma(
        shape=spec.burstiness, scale=1 / spec.burstiness, size=spec.requests
    )
    due: NDArray[np.float64] = np.cumsum(gaps) - gaps[0]
    return due * ((spec.requests - 1) / due[-1]) if due[-1] > 0 else due


def _ramp(unit: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Times t at which the integral of the rate, low * t + slope * t^2 / 2, reaches `unit`.

    An inhomogeneous process is a homogeneous one on a clock that runs at its rate (Lewis and
    Shedler, 1979). The root is written so that it holds for a slope of 0 as well.
    """
    whole_s = 2 * unit[-1] / (low + high)
    slope = (high - low) / whole_s if whole_s > 0 else 0.0
    root = np.sqrt(np.maximum(low * low + 2 * slope * unit, 0.0))
    times: NDArray[np.float64] = 2 * unit / (low + root)
    return times


def _recorded(spec: WorkloadSpec, round_number: int) -> tuple[float, ...] | None:
    due_s = recorded.plan(spec, round_number).due_s
    if due_s is None:
        return None
    speedup = spec.speedup
    if spec.request_rate_per_s is not None and due_s[-1] > 0:
        speedup = spec.request_rate_per_s * due_s[-1] / (len(due_s) - 1)
    return tuple(due / speedup for due in due_s)
