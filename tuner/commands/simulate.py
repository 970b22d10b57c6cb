"""`tuner simulate`: how fast the search comes near the optimum, on the simulated engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tuner import spec as spec_file
from tuner.commands.like_server import settled
from tuner.engine.flag_check import check_flags
from tuner.engine.simulated.server.vllm_flags import known_flags
from tuner.errors import InputError
from tuner.search.samplers import check_sampler
from tuner.simulation import SimulationReport, find_optimum, played, simulate_many
from tuner.storage import StudyLocation
from tuner.types import BudgetSpec, SamplerKind


def simulate_space(
    space: Path, *, trials: int | None, sampler: SamplerKind | None, seeds: int
) -> SimulationReport:
    """Run `seeds` studies of a space on virtual time.

    Raises:
        InputError: the space file, or what it names, cannot be simulated.
    """
    spec = spec_file.load(space)
    spec = settled(spec, StudyLocation.of(spec.name).directory, lambda _: None)
    limit = trials or spec.budget.trials
    if limit is None:
        raise InputError("the budget names no trials", "write --trials N")
    search = replace(spec.search, sampler=sampler or spec.search.sampler)
    spec = replace(spec, budget=BudgetSpec(limit, None), search=search)
    check_sampler(search.sampler)
    played(spec)
    check_flags(spec, known_flags())
    optimum = find_optimum(spec)
    if optimum.score <= 0:
        raise InputError("nothing in this space can serve", "widen the ranges of `search_space:`")
    return SimulationReport(spec, optimum, simulate_many(spec, range(seeds)))
