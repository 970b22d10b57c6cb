"""The stand-in's model, calibrated with two runs, against the real CPU engine.

Counts are compared with care for what repeats on the real engine: with all requests sent at
once, preemptions repeat by one or two, so that `TINY_COUNT` at most and none are the same.
Throughputs are of a machine that others may use: configurations run in an order that mixes
fast and slow ones, and where the ranks disagree all are run a second time and each counts
with its faster run, for other load only ever makes one slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cpu_runs import MIB, cpu_tiny_document, measure, spec_of, told
from scipy.stats import spearmanr

from tuner.engine.simulated.calibrate import CalibrationPoint, calibrate
from tuner.engine.simulated.profiles import DEVICES, MODELS
from tuner.engine.simulated.virtual import evaluate_virtually
from tuner.space import Space
from tuner.types import (
    EngineConfig,
    Failure,
    FailureCause,
    JsonValue,
    Measurement,
    Outcome,
    StudySpec,
)

BLOCK_TOKENS = 32
TINY_COUNT = 3
MANY = 20
MOST_APART = 1.5
"""Factor between preemption counts where one of them is above `MANY`."""
LEAST_RANK_CORRELATION = 0.85


@dataclass(frozen=True, slots=True)
class Case:
    """KV cache in MiB, `max-num-seqs`, `max-num-batched-tokens`, `max-model-len`."""

    kv_mib: float
    seqs: int
    tokens: int = 2048
    length: int = 512

    @property
    def params(self) -> Mapping[str, JsonValue]:
        return {
            "kv-cache-memory-bytes": int(self.kv_mib * MIB),
            "max-num-seqs": self.seqs,
            "max-num-batched-tokens": self.tokens,
            "max-model-len": self.length,
            "kv-cache-dtype": "auto",
        }

    def __str__(self) -> str:
        return f"{self.kv_mib:g} MiB, {self.seqs} seqs, {self.tokens} tokens, {self.length}"


FEW, MANY_SEQS = Case(16, 4), Case(64, 64, length=2048)
CALIBRATING = (FEW, MANY_SEQS)
"""A small batch tells what a step costs, a large one what a sequence does."""

FEASIBLE = (
    FEW,
    MANY_SEQS,
    Case(4, 16),
    Case(8, 8),
    Case(8, 3, tokens=64),
    Case(16, 128),
    Case(8, 128),
    Case(16, 2),
    Case(32, 16, tokens=16, length=1024),
    Case(4, 4),
    Case(16, 6, length=1024),
    Case(16, 16),
    Case(8, 16, tokens=32, length=1024),
    Case(32, 32, tokens=64, length=1024),
)

INFEASIBLE = {
    Case(2, 32): FailureCause.KV_TOO_SMALL,
    Case(8, 32, length=2048): FailureCause.KV_TOO_SMALL,
    Case(0.1, 32): FailureCause.KV_NO_BLOCKS,
    Case(16, 128, tokens=64): FailureCause.BAD_CONFIG,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides of each case."""

    real: Mapping[Case, Outcome]
    model: Mapping[Case, Outcome]

    def measured(self) -> list[tuple[Case, Measurement, Measurement]]:
        """Case, real, model, of all that should serve."""
        pairs = []
        for case in FEASIBLE:
            real, model = self.real[case], self.model[case]
            assert isinstance(real, Measurement), (str(case), told(real))
            assert isinstance(model, Measurement), (str(case), told(model))
            pairs.append((case, real, model))
        return pairs

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of output throughput."""
        real, model = (
            [pair[side].output_throughput_tokens_per_s for pair in self.measured()]
            for side in (1, 2)
        )
        return float(spearmanr(real, model).statistic)

    def __str__(self) -> str:
        rows = [f"{'':40}{'real':>12}{'model':>12}  preemptions  KV tokens"]
        for case, real, model in self.measured():
            throughputs = "".join(
                f"{m.output_throughput_tokens_per_s:>12.0f}" for m in (real, model)
            )
            preemptions = f"{real.counters.preemptions:>6} {model.counters.preemptions:<6}"
            tokens = f"{real.memory.kv_cache_tokens} {model.memory.kv_cache_tokens}"
            rows.append(f"{case!s:40}{throughputs}  {preemptions}{tokens}")
        rows += [
            f"{case!s:40}  {told(self.real[case])} | {told(self.model[case])}"
            for case in INFEASIBLE
        ]
        return "\n".join([*rows, f"Spearman's rank correlation: {self.rank_correlation:.3f}"])


def compare(spec: StudySpec, real: Mapping[Case, Outcome]) -> Comparison:
    """Calibrate the model and ask it about each case."""

    def config(case: Case) -> EngineConfig:
        return Space(spec).decode(case.params)

    points = []
    for case in CALIBRATING:
        measured = real[case]
        assert isinstance(measured, Measurement), (str(case), told(measured))
        points.append(CalibrationPoint(config(case), spec.workload, measured))
    model = MODELS["tiny"]
    device = calibrate(points, model=model, start=DEVICES["cpu"])
    found = {
        case: evaluate_virtually(
            config(case),
            spec.workload,
            model=model,
            device=device,
            seed=0,
            launch=0,
            noise=False,
        )
        for case in real
    }
    return Comparison(real, found)


def run_all(spec: StudySpec, cases: Sequence[Case], folder: Path) -> dict[Case, Outcome]:
    """Run the cases on the real engine; each is told in the captured output."""

    def tell(number: int, _config: EngineConfig, outcome: Outcome) -> None:
        print(f"{cases[number]}: {told(outcome)}")

    configs = [Space(spec).decode(case.params) for case in cases]
    return dict(zip(cases, measure(spec, configs, folder, tell), strict=True))


def faster(one: Outcome, other: Outcome) -> Outcome:
    """The run of two that others disturbed less."""
    if isinstance(one, Failure) or isinstance(other, Failure):
        return one
    return max(one, other, key=lambda outcome: outcome.output_throughput_tokens_per_s)


@pytest.fixture(scope="module")
def compared(forked_vllm, tiny_model, tmp_path_factory) -> Comparison:
    spec = spec_of(cpu_tiny_document(), forked_vllm, tiny_model)
    folder = tmp_path_factory.mktemp("compared")
    real = run_all(spec, [*FEASIBLE, *INFEASIBLE], folder / "first")
    comparison = compare(spec, real)
    if comparison.rank_correlation < LEAST_RANK_CORRELATION:
        print(comparison)
        again = run_all(spec, FEASIBLE, folder / "again")
        real |= {case: faster(real[case], outcome) for case, outcome in again.items()}
        comparison = compare(spec, real)
    print(comparison)
    return comparison


def test_model_has_as_many_kv_tokens_as_the_engine(compared):
    for case, real, model in compared.measured():
        tokens, simulated = real.memory.kv_cache_tokens, model.memory.kv_cache_tokens
        assert tokens == case.kv_mib * MIB / 4096, str(case)
        assert abs(tokens - simulated) <= BLOCK_TOKENS, str(case)


def test_model_preempts_where_the_engine_does(compared):
    counts = {
        str(case): (real.counters.preemptions, model.counters.preemptions)
        for case, real, model in compared.measured()
    }
    unlike = {
        name: pair
        for name, pair in counts.items()
        if (pair[0] > 0) != (pair[1] > 0) and max(pair) > TINY_COUNT
    }
    assert unlike == {}
    assert sum(min(pair) > MANY for pair in counts.values()) >= 3, "there is something to compare"
    assert sum(max(pair) == 0 for pair in counts.values()) >= 3


def test_model_preempts_as_often_as_the_engine(compared):
    for case, real, model in compared.measured():
        fewer, more = sorted((real.counters.preemptions, model.counters.preemptions))
        if more > MANY:
            assert more <= MOST_APART * fewer, str(case)


def test_model_ranks_throughput_as_the_engine(compared):
    assert compared.rank_correlation >= LEAST_RANK_CORRELATION, str(compared)


@pytest.mark.parametrize("case", INFEASIBLE, ids=str)
def test_model_refuses_what_the_engine_refuses(compared, case):
    real, model = compared.real[case], compared.model[case]
    assert isinstance(real, Failure)
    assert isinstance(model, Failure)
    assert real.cause is model.cause is INFEASIBLE[case]
    assert real.stage is model.stage
    assert dict(real.numbers) == pytest.approx(dict(model.numbers), abs=0.011)
