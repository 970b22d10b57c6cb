#!/usr/bin/env python3
"""Measure a grid of configurations on the real CPU engine and write it down as a replay table.

    python tests/real/measure_cpu.py --output studies/cpu-tiny-measured/replay.json

Needs the vLLM of `prepare_vllm.py`; takes some ten minutes on two cores. Points are run in a
seeded random order, so that a drift of the machine does not look like the effect of a
parameter. Exit codes: 0 written, 3 no prepared vLLM.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `bench`

from bench.replay_table import Params, Provenance, write
from cpu_runs import MIB, cpu_tiny_document, measure, spec_of, told
from forked import NOT_PREPARED, PreparedVllm, find_prepared, forking

from tuner.errors import ExitCode
from tuner.metrics.device import DeviceMonitor
from tuner.space import Space
from tuner.types import EngineConfig, Measurement, Outcome
from tuner.versions import versions

GRID: dict[str, list[Any]] = {
    "kv-cache-memory-bytes": [2 * MIB, 4 * MIB, 8 * MIB],
    "max-num-seqs": [4, 8, 16, 32, 128],
    "max-num-batched-tokens": [128, 2048],
    "kv-cache-dtype": ["auto", "fp8"],
}
"""From a KV cache that does not hold one context (2 MiB without fp8) to one where the batch that
just fits is best: the optimum lies inside the range of max-num-seqs."""

REFERENCE = {
    "kv-cache-memory-bytes": 8 * MIB,
    "max-num-seqs": 128,
    "max-num-batched-tokens": 2048,
    "kv-cache-dtype": "auto",
}
"""vLLM's defaults on CPU, with a KV cache of known size."""

NOTE = (
    "Every point of a small space on vLLM's CPU build and a tiny model with random weights "
    "(tests/real/prepare_vllm.py), one server life each, started by a fork server with one OMP "
    "thread (about 10 % slower than the plain command). Times are of a shared machine: see the "
    "spread of reference_tokens_per_s. Counts repeat by one or two."
)


def grid_document() -> dict[str, Any]:
    """`cpu_tiny.yaml` with the grid as its search space; names no place on this machine."""
    document = cpu_tiny_document(
        study="cpu-tiny-measured", search_space=GRID, constraints=[], reference=REFERENCE
    )
    server = document["server"]
    server |= {"command": ["vllm", "serve"], "args": server["args"] | {"max-model-len": 512}}
    return document


def in_random_order(points: Sequence[Params], every: int = 20) -> list[Params]:
    """The points, seeded, and `REFERENCE` itself besides them: before, between and after."""
    order = list(points)
    random.Random(0).shuffle(order)
    parts = [order[start : start + every] for start in range(0, len(order), every)]
    return [REFERENCE, *(params for part in parts for params in [*part, REFERENCE])]


def measure_points(
    order: Sequence[Params], document: dict[str, Any], prepared: PreparedVllm
) -> list[Outcome]:
    """Run the points in this order, and say how each went."""

    def tell(number: int, _config: EngineConfig, outcome: Outcome) -> None:
        values = " ".join(str(value) for value in order[number].values())
        print(f"{number + 1}/{len(order)}  {values}: {told(outcome)}", flush=True)

    with forking(prepared) as server, tempfile.TemporaryDirectory(prefix="tuner-cpu-") as folder:
        spec = spec_of(document, server.command, prepared.model)
        space = Space(spec)
        return measure(spec, [space.decode(params) for params in order], Path(folder), tell)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    output: Path = parser.parse_args(argv).output
    prepared = find_prepared()
    if prepared is None:
        print(f"measure_cpu: {NOT_PREPARED}", file=sys.stderr)
        return ExitCode.ENVIRONMENT
    begun = datetime.now(UTC)
    document = grid_document()
    order = in_random_order(list(Space(spec_of(document, Path("vllm"), prepared.model)).points()))
    outcomes = measure_points(order, document, prepared)
    again = [o for params, o in zip(order, outcomes, strict=True) if params is REFERENCE]
    runs = [(p, o) for p, o in zip(order, outcomes, strict=True) if p is not REFERENCE]
    output.parent.mkdir(parents=True, exist_ok=True)
    write(output, provenance(begun, again), document, runs)
    print(f"measure_cpu: {len(runs)} points in {output}")
    return ExitCode.OK


def provenance(begun: datetime, references: Sequence[Outcome]) -> Provenance:
    """What the table says of itself; `references` are the runs of the reference."""
    measured = [outcome for outcome in references if isinstance(outcome, Measurement)]
    known = versions(next(m.memory.vllm_version for m in measured))
    return Provenance(
        note=NOTE,
        made_with="python tests/real/measure_cpu.py --output studies/cpu-tiny-measured/replay.json",
        measured_at=begun.isoformat(timespec="minutes"),
        machine=DeviceMonitor().describe(),
        versions={name: known[name] for name in ("vLLM", "tuner", "Python")},
        reference_tokens_per_s=[round(m.output_throughput_tokens_per_s, 1) for m in measured],
    )


if __name__ == "__main__":
    sys.exit(main())
