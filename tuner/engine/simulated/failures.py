"""How a simulated server life ends badly; `words` turns it into vLLM's log lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuner.types import FailureCause, Stage

if TYPE_CHECKING:
    from tuner.engine.simulated.memory_plan import MemoryPlan
    from tuner.engine.simulated.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A start (or, at the stages READY and LOAD, a running server) that fails.

    Attributes:
        cause, stage: what `tuner.engine.logs.LogReader` must read from the words.
        exit_code: of the server process: 2 from the argument parser, 1 before the server is
            ready, 0 after (vLLM ends so when its engine dies), negative for a signal.
        numbers: what the decisive line says, by the names of `tuner.types.Failure.numbers`.
        message: the decisive line in vLLM's words where the cause alone does not give it;
            several lines where vLLM writes several.
        settings, plan: what was known when it failed, for the lines before the failure.
    """

    cause: FailureCause
    stage: Stage
    exit_code: int = 1
    numbers: Mapping[str, float] = field(default_factory=dict)
    message: str = ""
    settings: EngineSettings | None = None
    plan: MemoryPlan | None = None
