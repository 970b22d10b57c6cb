"""What a server that has started serves: its configuration, its sizes, its voice."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.engine.simulated.engine import Refusal, SimulatedEngine
from tuner.engine.simulated.memory_plan import MemoryPlan
from tuner.engine.simulated.server.command_line import ServeCommand
from tuner.engine.simulated.server.log_output import Log
from tuner.engine.simulated.server.metrics_page import Metrics
from tuner.engine.simulated.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Served:
    """What all of the API process needs.

    Attributes:
        pattern: the engine as it was before its process began: tells which requests fit.
        version: what the server says it is.
    """

    command: ServeCommand
    settings: EngineSettings
    plan: MemoryPlan
    pattern: SimulatedEngine
    metrics: Metrics
    log: Log
    version: str

    @property
    def vocabulary(self) -> int:
        """Token ids are smaller."""
        return self.settings.model.vocab

    def note_access(self, client: str, method: str, path: str, status: int) -> None:
        """uvicorn's line for a request, unless it is switched off."""
        if not self.command.args.get("disable-uvicorn-access-log"):
            self.log.text(f'INFO:     {client}:0 - "{method} {path} HTTP/1.1" {status}')

    def refuse(self, prompt_tokens: int, max_tokens: int | None) -> Refusal | None:
        """See `SimulatedEngine.refuse`."""
        return self.pattern.refuse(prompt_tokens, max_tokens)
