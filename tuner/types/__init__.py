"""The frozen values that the layers hand to one another.

Plain data that can cross a process or a network: no behaviour beyond derived properties,
no pydantic, no Optuna. Units stand in the names: `_s` seconds, `_gib` GiB (2^30 bytes),
`_tokens`, `_per_s`.
"""

from __future__ import annotations

from tuner.types.asked import (
    BudgetSpec,
    Constraint,
    LengthSpec,
    Metric,
    ObjectiveSpec,
    SamplerKind,
    SearchSpec,
    ServerSpec,
    StudySpec,
    WorkloadKind,
    WorkloadSpec,
)
from tuner.types.config import (
    ENV_PREFIX,
    Choice,
    EngineConfig,
    FloatRange,
    IntRange,
    JsonValue,
    Knob,
    Suggestion,
)
from tuner.types.failed import (
    Blame,
    Failure,
    FailureCause,
    Outcome,
    Progress,
    ProgressSink,
    Stage,
    Verdict,
)
from tuner.types.measured import (
    DeviceUse,
    Measurement,
    MemoryFacts,
    Percentiles,
    RequestRecord,
    RequestStatus,
    ServerCounters,
)

__all__ = [
    "ENV_PREFIX",
    "Blame",
    "BudgetSpec",
    "Choice",
    "Constraint",
    "DeviceUse",
    "EngineConfig",
    "Failure",
    "FailureCause",
    "FloatRange",
    "IntRange",
    "JsonValue",
    "Knob",
    "LengthSpec",
    "Measurement",
    "MemoryFacts",
    "Metric",
    "ObjectiveSpec",
    "Outcome",
    "Percentiles",
    "Progress",
    "ProgressSink",
    "RequestRecord",
    "RequestStatus",
    "SamplerKind",
    "SearchSpec",
    "ServerCounters",
    "ServerSpec",
    "Stage",
    "StudySpec",
    "Suggestion",
    "Verdict",
    "WorkloadKind",
    "WorkloadSpec",
]
