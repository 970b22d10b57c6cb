"""Fit a device profile to what a real machine did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from tuner.engine.simulated.profiles import DeviceProfile, ModelProfile
from tuner.engine.simulated.virtual import evaluate_virtually
from tuner.errors import InputError
from tuner.types import EngineConfig, Measurement, Outcome, WorkloadSpec

_FITTED = ("bandwidth_gb_per_s", "flops_per_s", "step_overhead_s", "sequence_overhead_s")

_PRIOR = 0.05
"""Weight of a parameter's distance from the start: two runs do not tell four parameters apart
wherever they lie, and what they do not tell should stay where it was."""

_LATENCY_WEIGHT = 0.5
"""Of a logarithm of a latency, against 1 of one of throughput, which the search ranks by."""

_MOST_EVALUATIONS = 40
_DIFFERENCE = 0.02
"""Relative step of the numerical derivative: larger than the jumps of a schedule that changes
with the speed of the steps."""


@dataclass(frozen=True, slots=True)
class CalibrationPoint:
    """One configuration as it was measured on the real machine."""

    config: EngineConfig
    workload: WorkloadSpec
    measured: Measurement


def calibrate(
    points: Sequence[CalibrationPoint], *, model: ModelProfile, start: DeviceProfile
) -> DeviceProfile:
    """`start` with FLOP/s, bandwidth and overheads fitted to `points`.

    Two points are enough where their batches differ: a small one tells the cost of a step, a
    large one that of a sequence and its tokens. Minimises, by least squares over the logarithms
    of the parameters, the logarithms of simulated / measured output throughput, TTFT and TPOT.
    Noise is off while fitting.

    Raises:
        InputError: no points, or one that does not start (or serves nothing) on `start`.
    """
    if not points:
        raise InputError("There is nothing to calibrate with.", "Measure two configurations.")

    def residuals(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        device = _scaled(start, logarithms)
        errors = [error for point in points for error in _errors(point, model, device)]
        return np.array([*errors, *(_PRIOR * logarithms)])

    fitted = least_squares(
        residuals,
        np.zeros(len(_FITTED)),
        bounds=(-4.0, 4.0),
        diff_step=[_DIFFERENCE] * len(_FITTED),
        max_nfev=_MOST_EVALUATIONS,
    )
    return _scaled(start, fitted.x)


def _scaled(start: DeviceProfile, logarithms: NDArray[np.float64]) -> DeviceProfile:
    factors = dict(zip(_FITTED, np.exp(logarithms).tolist(), strict=True))
    return replace(
        start,
        bandwidth_gb_per_s=start.bandwidth_gb_per_s * factors["bandwidth_gb_per_s"],
        flops_per_s=start.flops_per_s * factors["flops_per_s"],
        step_overhead_s=start.step_overhead_s * factors["step_overhead_s"],
        sequence_overhead_s=start.sequence_overhead_s * factors["sequence_overhead_s"],
    )


def _errors(point: CalibrationPoint, model: ModelProfile, device: DeviceProfile) -> list[float]:
    """Logarithms of simulated / measured."""
    simulated = evaluate_virtually(
        point.config,
        point.workload,
        model=model,
        device=device,
        seed=0,
        launch=0,
        noise=False,
    )
    here, there = _figures(simulated), _figures(point.measured)
    if here is None or there is None:
        raise InputError(
            f"The configuration {dict(point.config.args)} serves nothing "
            f"{'in the simulation' if here is None else 'as it was measured'}.",
            "Calibrate with configurations that start and answer.",
        )
    return [
        weight * math.log(one / other)
        for one, other, weight in zip(
            here, there, (1.0, _LATENCY_WEIGHT, _LATENCY_WEIGHT), strict=True
        )
    ]


def _figures(outcome: Outcome) -> tuple[float, float, float] | None:
    """Output throughput, mean TTFT, mean TPOT; None where nothing was served."""
    if not isinstance(outcome, Measurement) or outcome.ttft_s is None or outcome.tpot_s is None:
        return None
    return (
        outcome.output_throughput_tokens_per_s,
        outcome.ttft_s.mean,
        outcome.tpot_s.mean,
    )
