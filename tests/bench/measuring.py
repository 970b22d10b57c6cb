#!/usr/bin/env python3
"""How long measuring takes, how true its intervals are, and what early stops cost.

    python tests/bench/measuring.py [--seeds 40] [--first-seed 0] [--case queueing ...] [--json]

Loads run on the simulated engine on virtual time, and the tuner's own judge looks at each every
second as it would at a server's. The truth of a case is the mean score of loads several times as
long. Noise is that of requests' lengths and arrivals, and a machine whose pace wanders; how much
launches of one configuration differ is left out, because no single measurement can know it.

- Precise stop: share of the time saved against sending every request; how often the interval
  (95 %) holds the truth; error of the score (root mean square).
- Early stop: each load is judged against incumbents whose true score is higher by some factor,
  and whose low end is as uncertain as those of the measurements here. A stop is wrong where the
  configuration is, in the long run, within 3 % of its incumbent.

The rules were chosen on seeds from 1000 on; what docstrings tell is of seeds 0 to 39.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `bench`

from bench.measuring_cases import CASES
from bench.measuring_runs import Case, Judged, judged, play, truth

from tuner.simulation import cores
from tuner.types import MeasureEnd, MeasureSpec

TRUTHS = 6
"""Long loads a case."""

_TRUTH_SEEDS = 1_000_000
"""None of them is a load's that is judged."""

NEAR = (1.0, 0.97)
"""True scores, as shares of the incumbent's, at which giving up is wrong."""

WORSE = (0.9, 0.7, 0.5)
"""At which it is right."""


@dataclass(frozen=True)
class Row:
    """What the loads of one case showed; shares are of 1.

    Attributes:
        full_s, precise_s: mean seconds of a measurement, of all requests and until precise.
        precise: share of measurements that became precise.
        intervals, covered: measurements with an interval, those whose interval holds the truth.
        full_covered: the same of those of all requests.
        within: measurements whose score is within 2 % of the truth.
        error, full_error: root mean square, relative.
        bias: mean relative error.
        asked, wrong: questions whether to give up a configuration as good; wrong answers.
        given_up: of configurations so much worse, the share that was given up early.
        saved: for them, the share of the time saved against sending every request.
    """

    case: str
    truth: float
    loads: int
    full_s: float
    precise_s: float
    precise: float
    intervals: int
    covered: int
    full_intervals: int
    full_covered: int
    within: int
    error: float
    full_error: float
    bias: float
    asked: int
    wrong: int
    given_up: dict[str, float]
    saved: dict[str, float]


def run(
    cases: Sequence[Case], seeds: int, first_seed: int = 0, *, truths: int = TRUTHS
) -> list[Row]:
    """All cases, one process a core."""
    with cores(seeds) as pool:
        rows = []
        for case in cases:
            long_run = list(
                pool.map(partial(truth, case), range(_TRUTH_SEEDS, _TRUTH_SEEDS + truths))
            )
            loads = list(pool.map(partial(_judged, case), range(first_seed, first_seed + seeds)))
            rows.append(_row(case, float(np.mean(long_run)), loads))
        return rows


def _judged(case: Case, seed: int) -> Judged:
    return judged(play(case, seed))


def _row(case: Case, score: float, loads: Sequence[Judged]) -> Row:
    lows = [load.precise.interval.low for load in loads if load.precise.interval]
    lows = lows or [load.precise.score for load in loads]
    near = [_stops(loads, lows, share) for share in NEAR]
    full_s = float(np.mean([load.full.took_s for load in loads]))
    errors = np.array([load.precise.score / score - 1 for load in loads])
    return Row(
        case=case.name,
        truth=score,
        loads=len(loads),
        full_s=full_s,
        precise_s=float(np.mean([load.precise.took_s for load in loads])),
        precise=float(np.mean([load.precise.end is MeasureEnd.PRECISE for load in loads])),
        intervals=sum(load.precise.interval is not None for load in loads),
        covered=sum(load.precise.covers(score) for load in loads),
        full_intervals=sum(load.full.interval is not None for load in loads),
        full_covered=sum(load.full.covers(score) for load in loads),
        within=int(np.sum(np.abs(errors) <= MeasureSpec().precision)),
        error=float(np.sqrt(np.mean(errors**2))),
        full_error=float(np.sqrt(np.mean([(x.full.score / score - 1) ** 2 for x in loads]))),
        bias=float(errors.mean()),
        asked=sum(len(stops) for stops in near),
        wrong=sum(stop is not None for stops in near for stop in stops),
        given_up={
            f"{share:g}": float(np.mean([s is not None for s in _stops(loads, lows, share)]))
            for share in WORSE
        },
        saved={f"{share:g}": _saved(loads, lows, share) for share in WORSE},
    )


def _stops(loads: Sequence[Judged], lows: Sequence[float], share: float) -> list[float | None]:
    """When each load is given up for each incumbent whose true score is 1 / `share` of its own."""
    return [load.given_up_s(low / share) for load in loads for low in lows]


def _saved(loads: Sequence[Judged], lows: Sequence[float], share: float) -> float:
    saved = [
        1 - (load.precise.took_s if at_s is None else at_s) / load.full.took_s
        for load in loads
        for low in lows
        for at_s in [load.given_up_s(low / share)]
    ]
    return float(np.mean(saved))


def print_rows(rows: Sequence[Row]) -> None:
    """The table, and what it comes to."""
    worse = [f"{share:g}" for share in WORSE]
    print(
        f"{'':18}{'time to':>16}{'interval holds':>22}{'error, rms':>15}{'':>7}"
        f"{'wrong':>8}   time saved (given up) at ... of the incumbent"
    )
    print(
        f"{'case':18}{'all':>8}{'±2 %':>8}{'saved':>8}{'±2 %':>7}{'all':>7}{'±2 %':>8}"
        f"{'all':>7}{'bias':>7}{'stops':>8}" + "".join(f"{share:>14}" for share in worse)
    )
    for row in rows:
        cells = "".join(
            f"{f'{row.saved[share]:.0%} ({row.given_up[share]:.0%})':>14}" for share in worse
        )
        print(
            f"{row.case:18}{row.full_s:>6.0f} s{row.precise_s:>6.0f} s"
            f"{1 - row.precise_s / row.full_s:>8.0%}{_share(row.covered, row.intervals):>7}"
            f"{_share(row.full_covered, row.full_intervals):>7}{row.error:>8.1%}"
            f"{row.full_error:>7.1%}{row.bias:>+7.1%}{_percent(row.wrong, row.asked):>8}{cells}"
        )
    for line in totals(rows):
        print(line)


def totals(rows: Sequence[Row]) -> list[str]:
    """Over all cases."""
    covered, intervals = sum(r.covered for r in rows), sum(r.intervals for r in rows)
    full_s, precise_s = sum(r.full_s for r in rows), sum(r.precise_s for r in rows)
    wrong, asked = sum(r.wrong for r in rows), sum(r.asked for r in rows)
    return [
        f"intervals hold the truth: {covered} of {intervals} ({covered / max(1, intervals):.1%})",
        f"scores within 2 % of the truth: {sum(r.within for r in rows)} of "
        f"{sum(r.loads for r in rows)}",
        f"time saved by the precise stop: {1 - precise_s / full_s:.0%}",
        f"configurations given up wrongly: {wrong} of {asked} ({_percent(wrong, asked)})",
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=40, help="loads a case (default: 40)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the loads (default: 0)")
    names = [case.name for case in CASES]
    parser.add_argument("--case", action="append", choices=names, help="by default all of them")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    wanted = options.case or names
    rows = run([case for case in CASES if case.name in wanted], options.seeds, options.first_seed)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_rows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
