"""One server life on the stand-in: what ends a measurement, and what it is called."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import builders
import pytest
from stand_in import COMMAND, FAST

from tuner import evaluate
from tuner.engine.base import LaunchObserver
from tuner.engine.vllm import LaunchTiming, VllmLauncher
from tuner.evaluate import ServerEvaluator
from tuner.load.prepared import PreparedWorkloads
from tuner.measuring import session
from tuner.measuring.session import Asked
from tuner.types import (
    EngineConfig,
    Failure,
    FailureCause,
    LengthSpec,
    Measurement,
    MeasureSpec,
    ObjectiveSpec,
    Outcome,
    ServerSpec,
    Stage,
    WorkloadSpec,
)

SERVER = ServerSpec(
    tuple(COMMAND),
    "tiny",
    {"max-model-len": 512, "kv-cache-memory-bytes": "16M"},
    FAST,
    startup_timeout_s=20.0,
)
TIMING = LaunchTiming(poll_s=0.05, decisive_grace_s=0.3, stop_grace_s=1.0)
LOAD = builders.workload(requests=24, concurrency=8)
LONG_ANSWERS = replace(LOAD, output_tokens=LengthSpec(64), request_timeout_s=600.0)
SLOWLY = {"SIMULATED_SPEED": "4"}
"""An engine that hangs does so some steps after the answer that it is told to hang at."""


@pytest.fixture(autouse=True)
def _short_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "DEATH_NOTICE_S", 2.0)
    # A load that a busy machine makes late is measured again: these are about which request of
    # which load meets a fault.
    monkeypatch.setattr(session, "bottleneck", lambda *_: "")


async def outcome_of(
    tmp_path: Path,
    fault: str = "",
    *,
    load: WorkloadSpec = LOAD,
    hang_timeout_s: float = 1.0,
    notice: Callable[[str], None] = print,
    **env: str,
) -> Outcome:
    """Of one server life with a fault."""

    launcher = VllmLauncher(SERVER, timing=TIMING)
    asked = Asked(load, MeasureSpec(), ObjectiveSpec(), hang_timeout_s)
    evaluator = ServerEvaluator(launcher, asked, PreparedWorkloads(), notice)
    config = EngineConfig(dict(SERVER.args), {"SIMULATED_FAULT": fault, **env})
    observer = LaunchObserver(lambda record: None, lambda progress: None)
    return await evaluator.evaluate(config, tmp_path, observer)


def failed(outcome: Outcome, cause: FailureCause) -> Failure:
    assert isinstance(outcome, Failure), outcome
    assert outcome.cause is cause, outcome
    return outcome


# --- what is kept ----------------------------------------------------------------------


async def test_measurement_counts_where_its_requests_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "requests.jsonl.part")

    monkeypatch.setattr(evaluate, "keep", full)
    told: list[str] = []
    outcome = await outcome_of(tmp_path, notice=told.append)
    assert isinstance(outcome, Measurement), outcome
    assert outcome.served == LOAD.requests
    assert told == [
        "the requests of this measurement are not kept, its figures are: "
        "requests.jsonl.part cannot be written: No space left on device"
    ]


# --- hangs -----------------------------------------------------------------------------


async def test_hang_under_load_ends_the_measurement_before_any_request_times_out(
    tmp_path: Path,
) -> None:
    begin_s = time.monotonic()
    outcome = await outcome_of(tmp_path, "hang_load after=10", load=LONG_ANSWERS, **SLOWLY)
    failure = failed(outcome, FailureCause.HANG)
    assert time.monotonic() - begin_s < 30
    assert failure.stage is Stage.LOAD
    assert failure.line.startswith("no token for 1 s ")
    assert failure.line.endswith("; /health still answers 200")
    assert failure.numbers["stalled_s"] >= 1.0
    assert failure.numbers["in_flight"] == 8
    assert failure.memory.kv_cache_tokens == 4096


async def test_hang_while_warming_up_is_one_too(tmp_path: Path) -> None:
    load = replace(LONG_ANSWERS, warmup_requests=16)
    outcome = await outcome_of(tmp_path, "hang_load after=4", load=load, **SLOWLY)
    failure = failed(outcome, FailureCause.HANG)
    assert failure.line.startswith("no token for 1 s ")


async def test_hang_that_lasts_until_the_requests_time_out_is_one_too(tmp_path: Path) -> None:
    load = replace(LONG_ANSWERS, requests=12, request_timeout_s=3.0)
    fault = "hang_load after=8"
    outcome = await outcome_of(tmp_path, fault, load=load, hang_timeout_s=60.0, **SLOWLY)
    failure = failed(outcome, FailureCause.HANG)
    assert failure.line.startswith("no token for ")
    assert failure.stage is Stage.LOAD


async def test_server_that_idles_between_arrivals_does_not_hang(tmp_path: Path) -> None:
    rare = replace(LOAD, requests=4, concurrency=None, request_rate_per_s=1.0, burstiness=50.0)
    outcome = await outcome_of(tmp_path, load=rare, hang_timeout_s=0.4)
    assert isinstance(outcome, Measurement), outcome
    assert outcome.served == 4


# --- restarts and deaths -----------------------------------------------------------------


async def test_restart_in_the_middle_voids_the_measurement_at_once(tmp_path: Path) -> None:
    failure = failed(await outcome_of(tmp_path, "counters_reset after=12"), FailureCause.CRASH)
    assert failure.line.startswith("the engine restarted under the load: ")
    assert failure.stage is Stage.LOAD


@pytest.mark.parametrize(
    ("fault", "cause", "told"),
    [
        # The process ends with exit code 0, and the streams before it with 200 and an error
        # event: only the log says why.
        ("oom_runtime after=8", FailureCause.OOM_RUNTIME, "out of memory"),
        ("crash stage=load after=8", FailureCause.CRASH, "illegal memory access"),
        ("kv_too_small stage=load after=8", FailureCause.KV_TOO_SMALL, "KV cache"),
        # The API process lives on.
        ("engine_dead after=8", FailureCause.CRASH, ""),
    ],
)
async def test_death_under_load_is_named_from_the_log(
    tmp_path: Path, fault: str, cause: FailureCause, told: str
) -> None:
    failure = failed(await outcome_of(tmp_path, fault), cause)
    assert failure.stage is Stage.LOAD
    assert failure.exit_code in (0, None)
    assert told in failure.line
    assert failure.memory.kv_cache_tokens == 4096


async def test_healthy_server_is_measured(tmp_path: Path) -> None:
    outcome = await outcome_of(tmp_path)
    assert isinstance(outcome, Measurement)
    assert (outcome.served, outcome.offered) == (24, 24)
    assert outcome.counters.generation_tokens == 24 * 8  # the warm-up is not in it


# --- requests under way --------------------------------------------------------------------
