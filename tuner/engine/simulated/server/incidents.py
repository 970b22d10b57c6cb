"""Faults that come under load: what they do to the engine and the API process."""

from __future__ import annotations

import os
from collections.abc import Callable

from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.server.engine_client import EngineClient
from tuner.engine.simulated.server.fault_kinds import KILLS
from tuner.engine.simulated.server.faults import Fault, Faults
from tuner.engine.simulated.server.kills import kill
from tuner.engine.simulated.server.served import Served
from tuner.types import Stage


class Incidents:
    """Watches the number of answered completions, and strikes once for each fault.

    Args:
        on_failure: called with the exit code that the server is to end with when its engine
            dies, before that death.
    """

    def __init__(
        self,
        faults: Faults,
        served: Served,
        engine: EngineClient,
        on_failure: Callable[[int], None],
    ) -> None:
        self._faults = faults
        self._served = served
        self._engine = engine
        self._on_failure = on_failure
        self._struck: set[str] = set()

    def after(self, answered: int) -> None:
        """So many completions have been answered by now."""
        failing = self._faults.of_cause(under_load=True)
        if failing is not None and self._due(failing.name, answered):
            self._fail(failing)
        if self._due("hang_load", answered):
            self._engine.hang()
        if self._due("counters_reset", answered):
            self._served.metrics.begin_again(self._engine.counters)
        if self._due("engine_dead", answered):
            self._engine.murder()
        for name in KILLS:
            if self._due(name, answered):
                kill(name, self._engine.pid, self._engine.lose_worker)

    def _due(self, name: str, answered: int) -> bool:
        if name in self._struck or not self._faults.after(name, answered):
            return False
        self._struck.add(name)
        return True

    def _fail(self, fault: Fault) -> None:
        """The engine dies with vLLM's words for it, or the API process without any."""
        assert fault.cause is not None
        if fault.exit_code < 0:
            os.kill(os.getpid(), -fault.exit_code)
            return
        self._on_failure(fault.exit_code)
        self._served.log.obituary(
            StartFailure(
                fault.cause,
                Stage.LOAD,
                exit_code=fault.exit_code,
                settings=self._served.settings,
                plan=self._served.plan,
            )
        )
        self._engine.murder()
