"""Requests that are made with the first server and kept for the others of a study."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from tuner.load.making import MOST_PROMPT_TOKENS
from tuner.load.request import Request, Tokenizer, Workload
from tuner.load.workload import build, schedule
from tuner.types import WorkloadSpec

KEPT_BYTES = 8 * MOST_PROMPT_TOKENS
"""Of prompts, all rounds together: as much as one round may have. A search for the highest load
has some twelve rounds, and every trial needs nearly the same ones."""

_BYTES_A_TOKEN = 8
"""Of a tuple of ids: they are all the same few objects."""

_SCHEDULES = 64


class PreparedWorkloads:
    """Makes the prompts of each round once; an instance serves one model.

    Loads that differ only in their rate or concurrency have the same prompts, and share them.

    Args:
        notice: is told, once, what the user should know of how they were made.
        kept_bytes: of prompts; beyond, those that were not used for the longest time are made
            again when they are needed. The last ones are always kept.
    """

    def __init__(
        self, notice: Callable[[str], None] = lambda _: None, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self._notice = notice
        self._kept_bytes = kept_bytes
        self._told: set[str] = set()
        self._made: OrderedDict[tuple[WorkloadSpec, int], Workload] = OrderedDict()
        self._schedule = lru_cache(maxsize=_SCHEDULES)(schedule)

    async def __call__(
        self, tokenizer: Tokenizer, spec: WorkloadSpec, round_number: int = 0
    ) -> Workload:
        """The requests of `spec` in this round.

        Raises:
            InputError, TokenizeError: see `tuner.load.workload.build`.
        """
        key = (_without_load(spec), round_number)
        if key not in self._made:
            self._made[key] = made = await build(spec, tokenizer, round_number)
            self._forget()
            if made.note and made.note not in self._told:
                self._told.add(made.note)
                self._notice(made.note)
        self._made.move_to_end(key)
        return replace(self._made[key], arrivals_s=self._schedule(spec, round_number))

    def _forget(self) -> None:
        sizes = [_bytes(made) for made in self._made.values()]
        total = sum(sizes)
        for size in sizes[:-1]:
            if total <= self._kept_bytes:
                return
            self._made.popitem(last=False)
            total -= size


def _without_load(spec: WorkloadSpec) -> WorkloadSpec:
    """What the prompts depend on: in a closed loop of conversations its width, too."""
    concurrency = spec.concurrency if spec.turns > 1 else None
    return replace(spec, concurrency=concurrency, request_rate_per_s=None, levels=())


def _bytes(made: Workload) -> int:
    return sum(_size(request) for request in (*made.requests, *made.warmup))


def _size(request: Request) -> int:
    each = 1 if isinstance(request.prompt, str) else _BYTES_A_TOKEN
    return each * len(request.prompt)
