"""Noise of a machine: between launches, and from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tuner.engine.simulated.profiles import DeviceProfile

_DRAWN_AT_ONCE = 1024


class Noise:
    """Factors around 1 by which durations differ; lognormal, so that none is negative.

    Args:
        seeds: integers that together tell this launch from every other.
        on: without it every factor is 1.

    Attributes:
        memory_jitter: in 0..1, how badly this launch's memory is fragmented.
    """

    def __init__(self, device: DeviceProfile, seeds: Sequence[int], *, on: bool = True) -> None:
        self._on = on
        self._rng = np.random.default_rng(list(seeds))
        self._step_sigma = device.step_noise
        launch, jitter = self._rng.standard_normal(), self._rng.random()
        self._launch_factor = math.exp(device.launch_noise * launch) if on else 1.0
        self.memory_jitter = float(jitter) if on else 0.5
        self._drawn: list[float] = []

    def factor(self) -> float:
        """Of the next step."""
        if not self._on:
            return 1.0
        if not self._drawn:
            normal = self._rng.standard_normal(_DRAWN_AT_ONCE)
            factors = np.exp(self._step_sigma * normal) * self._launch_factor
            self._drawn = factors.tolist()
            self._drawn.reverse()
        return self._drawn.pop()
