"""Why a server life gave no measurement, and what either is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from tuner.types.measured import Measurement, MemoryFacts


class Blame(StrEnum):
    """Who has to change for the next start to go better."""

    CONFIGURATION = "configuration"
    ENVIRONMENT = "environment"
    NONE = "none"
    UNKNOWN = "unknown"


class FailureCause(StrEnum):
    """Why a server life ended without a measurement; the values are also the JSON names."""

    OOM_LOAD = "oom_load"
    OOM_PROFILE = "oom_profile"
    OOM_KV_ALLOC = "oom_kv_alloc"
    OOM_WARMUP = "oom_warmup"
    OOM_GRAPH_CAPTURE = "oom_graph_capture"
    OOM_RUNTIME = "oom_runtime"
    HOST_OOM = "host_oom"
    KV_NO_BLOCKS = "kv_no_blocks"
    KV_TOO_SMALL = "kv_too_small"
    STATE_BLOCKS = "state_blocks"
    DEVICE_BUSY = "device_busy"
    MEMORY_BASELINE_MOVED = "memory_baseline_moved"
    STARTUP_TIMEOUT = "startup_timeout"
    HANG = "hang"
    CRASH = "crash"
    NCCL = "nccl"
    PORT_IN_USE = "port_in_use"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_ACCESS = "model_access"
    BAD_CONFIG = "bad_config"
    UNSUPPORTED = "unsupported"
    COMPILE_CACHE = "compile_cache"
    DISK_FULL = "disk_full"
    NONE = "none"
    """Nothing failed: what a healthy log tells."""
    UNKNOWN = "unknown"

    @property
    def blame(self) -> Blame:
        """Whether the configuration or the machine has to change."""
        if self is FailureCause.NONE:
            return Blame.NONE
        if self in _ENVIRONMENT_CAUSES:
            return Blame.ENVIRONMENT
        return Blame.UNKNOWN if self in _OPEN_CAUSES else Blame.CONFIGURATION

    @property
    def retry(self) -> bool:
        """Whether the same configuration may do better at the next start."""
        return self in _PASSING_CAUSES


_ENVIRONMENT_CAUSES = frozenset(
    {
        FailureCause.DEVICE_BUSY,
        FailureCause.MEMORY_BASELINE_MOVED,
        FailureCause.NCCL,
        FailureCause.PORT_IN_USE,
        FailureCause.MODEL_NOT_FOUND,
        FailureCause.MODEL_ACCESS,
        FailureCause.COMPILE_CACHE,
        FailureCause.DISK_FULL,
    }
)

_OPEN_CAUSES = frozenset(
    {
        FailureCause.UNKNOWN,
        FailureCause.CRASH,
        FailureCause.HANG,
        FailureCause.STARTUP_TIMEOUT,
    }
)
"""Those that tell what happened, but not whose fault it was."""

_PASSING_CAUSES = frozenset(
    {
        FailureCause.DEVICE_BUSY,
        FailureCause.MEMORY_BASELINE_MOVED,
        FailureCause.NCCL,
        FailureCause.PORT_IN_USE,
        FailureCause.COMPILE_CACHE,  # with a fresh cache
        FailureCause.CRASH,
        FailureCause.HANG,
        FailureCause.UNKNOWN,
    }
)


class Stage(StrEnum):
    """How far a server life has come."""

    LAUNCH = "launch"
    LOADING = "loading"
    COMPILING = "compiling"
    PROFILING = "profiling"
    KV_ALLOCATION = "kv_allocation"
    WARMUP = "warmup"
    GRAPH_CAPTURE = "graph_capture"
    READY = "ready"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Failure:
    """A server life that gave no measurement.

    Attributes:
        line: the decisive line of the log, or what the tuner saw.
        numbers: what that line says, by names such as `needed_gib`, `available_gib`,
            `estimated_max_model_len_tokens`, `tried_to_allocate_gib`.
        excerpt: the lines around it.
        exit_code: of the server process, None while it runs.
    """

    cause: FailureCause
    stage: Stage
    line: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    excerpt: str = ""
    exit_code: int | None = None
    log_path: Path | None = None
    memory: MemoryFacts = field(default_factory=MemoryFacts)

    @property
    def blame(self) -> Blame:
        """See `FailureCause.blame`."""
        return self.cause.blame


Outcome: TypeAlias = Measurement | Failure


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an outcome is worth to the search.

    Attributes:
        score: higher is better; 0 for a failure.
        constraints: the same names in every trial of a study, feasible at <= 0
            (see `tuner.objective.CONSTRAINTS`).
    """

    score: float
    constraints: Mapping[str, float]

    @property
    def feasible(self) -> bool:
        """Whether this configuration may win."""
        return all(value <= 0 for value in self.constraints.values())


@dataclass(frozen=True, slots=True)
class Progress:
    """What is going on now, for the person at the keyboard.

    Attributes:
        activity: such as "starting" or "measuring".
        elapsed_s: since the activity began.
        total_s: how long it may take at most or will take, where that is known.
        detail: such as "212/500 requests".
    """

    activity: str
    elapsed_s: float
    total_s: float | None = None
    detail: str = ""


ProgressSink: TypeAlias = Callable[[Progress], None]
"""Told what is going on, a few times a second; must return at once."""
