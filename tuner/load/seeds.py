"""Random streams of a workload: each kind of chance has its own."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """Numbers of the random streams; a change of one would change everybody's workload."""

    INPUT = 0
    OUTPUT = 1
    ARRIVALS = 2
    PROMPTS = 3
    WARMUP = 4
    ORDER = 5
    BLOCKS = 6
    ANSWERS = 7


def generator(seed: int, stream: Stream, *parts: int) -> np.random.Generator:
    """The generator of one stream, the same for the same numbers; `parts` divide it further."""
    return np.random.default_rng([seed, stream, *parts])
