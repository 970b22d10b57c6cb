#!/usr/bin/env python3
"""How fast the search comes to the best of a space that was measured point by point.

    python tests/bench/replay.py [TABLE] [--seeds 20] [--trials N] [--samplers tpe,random]

Runs whole studies, by the tuner's own loop, with a replay table in the place of servers.
Each point was measured once and is replayed as it was: the best is the best of the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `bench`

from bench.replay_table import ReplayTable, read

from tuner.engine.base import ConfigAnswer, LaunchObserver
from tuner.objective import judge
from tuner.simulation import NEAR, Optimum, SimulationReport, Trace, cores, run_in_memory
from tuner.types import (
    BudgetSpec,
    EngineConfig,
    ObjectiveSpec,
    Outcome,
    SamplerKind,
    SearchSpec,
)

TABLE = Path(__file__).parents[2] / "studies" / "cpu-tiny-measured" / "replay.json"


class ReplayEvaluator:
    """An `Evaluator` and a `ConfigCheck` that know the answers."""

    def __init__(self, table: ReplayTable) -> None:
        self._outcomes = table.by_digest()

    def command_line(self, config: EngineConfig) -> list[str]:
        """See `tuner.evaluate.Evaluator`; nothing is started."""
        return ["replayed", config.digest]

    async def evaluate(
        self,
        config: EngineConfig,
        trial_dir: Path,
        observer: LaunchObserver,
        incumbent: float | None = None,
    ) -> Outcome:
        """See `tuner.evaluate.Evaluator`.

        Raises:
            KeyError: the table does not hold this configuration.
        """
        return self._outcomes[config.digest]

    async def check(self, config: EngineConfig) -> ConfigAnswer:
        """See `tuner.engine.base.ConfigCheck`: what was refused was launched all the same."""
        return ConfigAnswer(accepted=True)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What studies with one sampler showed; the statistics are those of `tuner simulate`."""

    sampler: SamplerKind
    report: SimulationReport


def worth(outcome: Outcome, objective: ObjectiveSpec) -> float:
    """The score; 0 for what may not win."""
    verdict = judge(outcome, objective)
    return verdict.score if verdict.feasible else 0.0


def optimum(table: ReplayTable) -> Optimum:
    """The table's best point."""
    scores = [(worth(outcome, table.spec.objective), params) for params, outcome in table.runs]
    score, params = max(scores, key=lambda scored: scored[0])
    return Optimum(params, score, is_exact=True)


def replay(table: ReplayTable, sampler: SamplerKind, trials: int, seed: int) -> Trace:
    """One study; it ends early where it has seen every point."""
    spec = replace(table.spec, budget=BudgetSpec(trials, None), search=SearchSpec(sampler, seed))
    evaluator = ReplayEvaluator(table)
    finished = run_in_memory(spec, evaluator, evaluator)
    outcomes = [trial.outcome for trial in finished if trial.outcome is not None]
    best_so_far = accumulate((worth(o, spec.objective) for o in outcomes), max)
    return Trace(seed, tuple(best_so_far), sum(worth(o, spec.objective) == 0 for o in outcomes))


def benchmark(
    table: ReplayTable, samplers: Sequence[SamplerKind], *, trials: int, seeds: int
) -> list[Benchmark]:
    """Studies with each sampler and seed, one process a core."""
    best = optimum(table)
    with cores(seeds) as pool:
        return [
            Benchmark(
                sampler,
                SimulationReport(
                    table.spec,
                    best,
                    list(pool.map(partial(replay, table, sampler, trials), range(seeds))),
                ),
            )
            for sampler in samplers
        ]


def print_benchmarks(table: ReplayTable, benchmarks: Sequence[Benchmark]) -> None:
    """A table: how near each sampler's studies were to the best after so many trials."""
    source, best = table.provenance, optimum(table)
    print(
        f"{len(table.runs)} points measured {source.measured_at} on "
        f"{', '.join(source.machine.values())} cores, vLLM {source.versions['vLLM']}"
    )
    print(f"the best: score {best.score:.0f} at {dict(best.params)}")
    milestones = benchmarks[0].report.milestones
    print(f"\nshare of it, median (worst tenth) of {len(benchmarks[0].report.traces)} studies")
    print("sampler " + "".join(f"{f'{n} trials':>16}" for n in milestones) + f"{_NEAR:>20}")
    for each in benchmarks:
        cells = "".join(f"{_share(each.report, n):>16}" for n in milestones)
        near = each.report.median_trials_to_near
        after = "not reached" if near is None else f"after {near:g} trials"
        print(f"{each.sampler.value:<8}{cells}{after:>20}")


_NEAR = f"within {1 - NEAR:.0%}"


def _share(report: SimulationReport, trials: int) -> str:
    median, worst = np.quantile(report.share_after(trials), [0.5, 0.1])
    return f"{median:.0%} ({worst:.0%})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("table", type=Path, nargs="?", default=TABLE)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, help="by default until every point was seen")
    parser.add_argument("--samplers", default="tpe,random")
    options = parser.parse_args(argv)
    table = read(options.table)
    samplers = [SamplerKind(name) for name in options.samplers.split(",")]
    trials = options.trials or len(table.runs)
    print_benchmarks(table, benchmark(table, samplers, trials=trials, seeds=options.seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
