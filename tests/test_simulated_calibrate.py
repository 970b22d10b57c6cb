"""Two measured runs tell a machine's speed well enough to rank the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import measurement
from real_cpu_runs import DECODES, RUNS, RealRun
from scipy.stats import spearmanr
from simulated_builders import flags, load

from tuner.engine.simulated.calibrate import CalibrationPoint, calibrate
from tuner.engine.simulated.profiles import DEVICES, MODELS, DeviceProfile
from tuner.engine.simulated.virtual import evaluate_virtually
from tuner.errors import InputError
from tuner.types import EngineConfig, Measurement

CPU = DEVICES["cpu"]
TINY = MODELS["tiny"]


def simulate(
    config: EngineConfig, workload, device: DeviceProfile, *, noise: bool = False
) -> Measurement:
    found = evaluate_virtually(
        config, workload, model=TINY, device=device, seed=0, launch=0, noise=noise
    )
    assert isinstance(found, Measurement)
    return found


def config(kv: str, seqs: int) -> EngineConfig:
    return EngineConfig(
        flags(
            kv_cache_memory_bytes=kv,
            max_num_seqs=seqs,
            max_model_len=512,
            block_size=32,
            enforce_eager=True,
        )
    )


# --- the real engine -------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_simulated_preemptions_are_those_of_the_real_engine(run: RealRun):
    found = simulate(run.config, run.workload, CPU)
    assert found.counters.preemptions == pytest.approx(run.preemptions, rel=0.1)


@pytest.mark.parametrize("pair", [(0, 2), (2, 7), (0, 11), (2, 5)])
def test_calibration_with_two_real_runs_ranks_all_of_them(pair):
    points = [RUNS[index].point for index in pair]
    device = calibrate(points, model=TINY, start=CPU)
    simulated = [
        simulate(run.config, run.workload, device).output_throughput_tokens_per_s for run in RUNS
    ]
    real = [run.throughput for run in RUNS]
    assert spearmanr(simulated, real).statistic > 0.9
    ratios = np.array(simulated) / np.array(real)
    assert np.median(np.abs(np.log(ratios))) < np.log(1.25)


# --- a known machine -------------------------------------------------------------------

HIDDEN = replace(
    CPU,
    bandwidth_gb_per_s=CPU.bandwidth_gb_per_s / 3,
    flops_per_s=CPU.flops_per_s / 4,
    step_overhead_s=CPU.step_overhead_s * 4,
    sequence_overhead_s=CPU.sequence_overhead_s * 2,
)


def test_calibration_finds_a_known_machine_through_its_noise():
    points = [
        CalibrationPoint(made, DECODES, simulate(made, DECODES, HIDDEN, noise=True))
        for made in (config("16M", 4), config("16M", 64))
    ]
    device = calibrate(points, model=TINY, start=CPU)
    for kv, seqs in (("8M", 8), ("32M", 16), ("64M", 32), ("4M", 64)):
        expected = simulate(config(kv, seqs), DECODES, HIDDEN)
        found = simulate(config(kv, seqs), DECODES, device)
        assert found.output_throughput_tokens_per_s == pytest.approx(
            expected.output_throughput_tokens_per_s, rel=0.15
        )


def test_calibration_leaves_everything_but_speed_alone():
    point = CalibrationPoint(config("16M", 4), DECODES, measurement())
    device = calibrate([point], model=TINY, start=CPU)
    speeds = {
        name: getattr(CPU, name)
        for name in (
            "bandwidth_gb_per_s",
            "flops_per_s",
            "step_overhead_s",
            "sequence_overhead_s",
        )
    }
    assert replace(device, **speeds) == CPU


def test_calibration_keeps_a_machine_that_it_already_fits():
    points = [
        CalibrationPoint(made, DECODES, simulate(made, DECODES, CPU))
        for made in (config("16M", 4), config("16M", 64))
    ]
    device = calibrate(points, model=TINY, start=CPU)
    assert device.bandwidth_gb_per_s == pytest.approx(CPU.bandwidth_gb_per_s, rel=0.01)
    assert device.step_overhead_s == pytest.approx(CPU.step_overhead_s, rel=0.01)


def test_calibration_refuses_what_tells_nothing():
    with pytest.raises(InputError, match="nothing to calibrate"):
        calibrate([], model=TINY, start=CPU)
    refused = CalibrationPoint(config("16K", 4), load(4), measurement())
    with pytest.raises(InputError, match="serves nothing in the simulation"):
        calibrate([refused], model=TINY, start=CPU)
    empty = CalibrationPoint(config("16M", 4), load(4), replace(measurement(), ttft_s=None))
    with pytest.raises(InputError, match="serves nothing as it was measured"):
        calibrate([empty], model=TINY, start=CPU)
