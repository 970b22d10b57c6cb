"""What `tuner simulate` shows: simulated figures, and says so."""

from __future__ import annotations

import statistics

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tuner.report.console import shown_params
from tuner.simulation import NEAR, SimulationReport, played
from tuner.types import JsonValue


def print_simulation(console: Console, report: SimulationReport) -> None:
    """How near the studies came to the optimum, by the number of trials."""
    spec, optimum = report.spec, report.optimum
    kind = "the optimum" if optimum.is_exact else "the best found by a wide search"
    plays = played(spec)
    lines = [
        f"SIMULATED: {plays.model.name} on {plays.device.name}"
        " (SIMULATED_DEVICE under `server: env:` names another device)",
        f"{len(report.traces)} simulated studies of {spec.name}, {spec.budget.trials} trials each, "
        f"sampler {spec.search.sampler.value}; no figure here was measured",
        f"{kind}, without noise: score {optimum.score:.1f} at {shown_params(optimum.params)}",
    ]
    for line in lines:
        console.print(Text(line), highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("after", justify="right")
    for heading in ("median", "worst tenth", "best tenth"):
        table.add_column(heading, justify="right")
    for trials in report.milestones:
        shares = report.share_after(trials)
        quantiles = np.quantile(shares, [0.5, 0.1, 0.9])
        table.add_row(f"{trials} trials", *(f"{share:.1%}" for share in quantiles))
    console.print(table)
    near = report.median_trials_to_near
    reached = sum(n is not None for n in report.trials_to_near)
    console.print(
        Text(
            f"within {1 - NEAR:.0%} of it: {reached} of {len(report.traces)} studies, "
            f"median {'not reached' if near is None else f'after {near:g} trials'}; "
            f"{_failed(report):.1f} trials of each study could not serve"
        ),
        highlight=False,
        soft_wrap=True,
    )


def simulation_document(report: SimulationReport) -> dict[str, JsonValue]:
    """`tuner simulate --json`; shares are of the optimum's score."""
    return {
        "simulated": True,
        "device": played(report.spec).device.name,
        "model": played(report.spec).model.name,
        "study": report.spec.name,
        "sampler": report.spec.search.sampler.value,
        "trials": report.spec.budget.trials,
        "optimum": {
            "params": dict(report.optimum.params),
            "score": report.optimum.score,
            "is_exact": report.optimum.is_exact,
        },
        "share_of_optimum": {
            str(trials): [*report.share_after(trials)] for trials in report.milestones
        },
        "trials_to_within_5_percent": [*report.trials_to_near],
        "median_trials_to_within_5_percent": report.median_trials_to_near,
        "failed_trials": [trace.failed for trace in report.traces],
    }


def _failed(report: SimulationReport) -> float:
    return statistics.mean(trace.failed for trace in report.traces)
