"""Requests that are made with the first server and kept for the others of a study."""

from __future__ import annotations

from collections.abc import Callable

from tuner.load.request import Tokenizer, Workload
from tuner.load.workload import build
from tuner.types import WorkloadSpec

KEPT = 8
"""Workloads kept at a time: those of one server life, mostly; a search for the highest load has
some ten, of which each trial needs nearly the same."""


class PreparedWorkloads:
    """Makes each workload once; an instance serves one model.

    Args:
        notice: is told, once, what the user should know of how they were made.
    """

    def __init__(self, notice: Callable[[str], None] = lambda _: None) -> None:
        self._notice = notice
        self._told: set[str] = set()
        self._made: dict[tuple[WorkloadSpec, int], Workload] = {}

    async def __call__(
        self, tokenizer: Tokenizer, spec: WorkloadSpec, round_number: int = 0
    ) -> Workload:
        """The requests of `spec` in this round.

        Raises:
            InputError, TokenizeError: see `tuner.load.workload.build`.
        """
        key = (spec, round_number)
        if key not in self._made:
            if len(self._made) >= KEPT:
                del self._made[next(iter(self._made))]
            self._made[key] = made = await build(spec, tokenizer, round_number)
            if made.note and made.note not in self._told:
                self._told.add(made.note)
                self._notice(made.note)
        return self._made[key]
