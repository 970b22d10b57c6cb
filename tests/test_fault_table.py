"""Faults x phases through the whole tuner: each is named, survived, and followed by a good trial.

One study plays many faults, each in one trial, so that every trial starts on what the one
before has left. Whatever strikes, no process, shared memory, socket or file may remain, and the
study must be consistent and go on. What the answers and the log may do wrong besides is in
`test_simulated_faults`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from faulty_studies import Tuning, assert_consistent, clean_up_checked

from tuner.attempts import Attempts
from tuner.stopping import FAILURES_AT_FIRST
from tuner.types import FailureCause

KNOB = "env.SIMULATED_FAULT"
DATABASE = Path("studies/faulty/study.db")


class Named(NamedTuple):
    """What a trial must be recorded as.

    Attributes:
        stage: one, or several with `/` between them where it is chance which one it has reached.
    """

    cause: str
    stage: str
    exit_codes: tuple[int | None, ...] = (1,)
    """Any of these: whether the log's words or the end of the process are seen first is chance."""


KILLED = (-9,)
"""By a fault, so by somebody; `tuner.engine.kernel_kills` tells that from the kernel's doing."""

ALIVE_OR_WELL = (0, None)
"""vLLM exits with 0 when its engine dies after the start."""

LONG_ENOUGH = "slow_start seconds=1.5 stage=launch;"
"""Shared memory whose owners are all killed at once is removed if it was there for half a second:
who cleans up looks for it no more often, not to disturb the measurement."""

STARTS: Mapping[str, Named] = {
    # Argument parsing and the configuration.
    "bad_config exit=1": Named("bad_config", "launch"),
    "crash stage=launch exit=-11": Named("crash", "launch", (-11,)),
    "host_oom stage=launch exit=-9": Named("crash", "launch", KILLED),
    # Loading the weights.
    "oom_load": Named("oom_load", "loading"),
    "host_oom": Named("crash", "loading"),
    "host_oom exit=-9": Named("crash", "loading", KILLED),
    "startup_timeout": Named("startup_timeout", "loading"),
    "unknown": Named("unknown", "loading"),
    "crash stage=loading exit=-11": Named("crash", "loading", (-11,)),
    "engine_killed stage=loading": Named("crash", "loading"),
    "worker_killed stage=loading": Named("crash", "loading"),
    "server_killed stage=loading": Named("crash", "loading", KILLED),
    "all_killed stage=loading": Named("crash", "loading", KILLED),
    f"{LONG_ENOUGH} group_killed stage=loading": Named("crash", "loading", KILLED),
    # Profiling.
    "oom_profile": Named("oom_profile", "profiling"),
    "crash": Named("crash", "profiling"),
    "host_oom stage=profiling exit=-9": Named("crash", "profiling", KILLED),
    # Sizing and allocating the KV cache.
    "oom_kv_alloc": Named("oom_kv_alloc", "kv_allocation"),
    "kv_no_blocks": Named("kv_no_blocks", "kv_allocation"),
    "kv_too_small": Named("kv_too_small", "kv_allocation"),
    "state_blocks": Named("state_blocks", "kv_allocation"),
    "unsupported": Named("unsupported", "kv_allocation"),
    "host_oom stage=kv_allocation exit=-9": Named("crash", "kv_allocation", KILLED),
    "engine_killed stage=kv_allocation": Named("crash", "kv_allocation"),
    # Warm-up.
    "oom_warmup": Named("oom_warmup", "warmup"),
    "crash stage=warmup": Named("crash", "warmup"),
    "server_killed stage=warmup": Named("crash", "warmup", KILLED),
}

GRAPHS: Mapping[str, Named] = {
    "crash stage=compiling": Named("crash", "compiling"),
    "host_oom stage=compiling exit=-9": Named("crash", "compiling", KILLED),
    "oom_graph_capture": Named("oom_graph_capture", "graph_capture"),
    "crash stage=graph_capture exit=-11": Named("crash", "graph_capture", (-11,)),
    "engine_killed stage=graph_capture": Named("crash", "graph_capture"),
}
"""What there is on a GPU alone."""

BY_KERNEL: Mapping[str, Named] = {"host_oom exit=-9": Named("host_oom", "loading", KILLED)}
"""Where the kernel says that it killed for memory."""

HANGS: Mapping[str, Named] = {
    f"hang_start stage={stage}": Named("startup_timeout", stage, (None,))
    for stage in ("launch", "profiling", "warmup")
}

LOADS: Mapping[str, Named] = {
    # As soon as it is ready: at its first answer.
    "oom_runtime after=1": Named("oom_runtime", "ready/load", ALIVE_OR_WELL),
    "engine_killed after=1": Named("crash", "ready/load", ALIVE_OR_WELL),
    # While the load warms up: the readiness probe and two requests are before it.
    "crash stage=load after=2": Named("crash", "load", ALIVE_OR_WELL),
    "server_killed after=2": Named("crash", "load", KILLED),
    # Under load.
    "oom_runtime": Named("oom_runtime", "load", ALIVE_OR_WELL),
    "crash stage=load": Named("crash", "load", ALIVE_OR_WELL),
    "crash stage=load exit=-6": Named("crash", "load", (-6,)),
    "host_oom stage=load exit=-9": Named("crash", "load", KILLED),
    "hang": Named("hang", "load", ALIVE_OR_WELL),
    "engine_dead": Named("crash", "load", ALIVE_OR_WELL),
    "engine_killed": Named("crash", "load", ALIVE_OR_WELL),
    "worker_killed": Named("crash", "load", ALIVE_OR_WELL),
    "server_killed": Named("crash", "load", KILLED),
    "all_killed": Named("crash", "load", KILLED),
    f"{LONG_ENOUGH} group_killed": Named("crash", "load", KILLED),
    # With a server that does not want to end besides.
    "server_killed; leave_engine": Named("crash", "load", KILLED),
}


class Environment(NamedTuple):
    """A failure that no configuration can mend.

    Attributes:
        attempts: how often it is tried before the study stops.
    """

    stage: str
    attempts: int


ENVIRONMENT: Mapping[str, Environment] = {
    "port_in_use": Environment("launch", 3),
    "device_busy": Environment("launch", 3),
    "memory_baseline_moved": Environment("profiling", 3),
    "nccl": Environment("launch", 2),
    "model_not_found": Environment("launch", 1),
    "model_access": Environment("launch", 1),
    "compile_cache": Environment("profiling", 2),  # the CPU's log has no line for compiling
    "disk_full": Environment("loading", 1),
    "bad_config": Environment("launch", 1),  # exit code 2: a flag that does not exist
}


@pytest.fixture
def tuning(in_tmp, capsys, monkeypatch):
    """See `Tuning`; nothing may be left of its servers in the end.

    The kernel, which really killed none of them, says so.
    """
    monkeypatch.setattr("tuner.engine.kernel_kills.oom_kills", lambda: 7)
    monkeypatch.setattr("tuner.engine.vllm_server.oom_kills", lambda: 7)
    with clean_up_checked(in_tmp, monkeypatch):
        yield Tuning(in_tmp, capsys)


def play(tuning, faults, **run):
    """One study with each fault in one trial of its own; their trials, by fault.

    The reference comes first and is spared; the space is run to its end, so that the last trial
    is followed by nothing but a resume, which must find nothing to do.
    """
    study = {"search_space": {KNOB: list(faults)}, "trials": len(faults) + 1, **run}
    assert tuning.run(**study) == 0
    assert_consistent(DATABASE)
    trials = tuning.trials()
    assert tuning.run(**study) == 0
    assert tuning.trials() == trials, "a finished study is left alone"
    by_fault = {trial["params"].get(KNOB): trial for trial in trials}
    assert by_fault.pop(None)["state"] == "measured"  # the reference
    assert by_fault.keys() == set(faults)
    assert len(trials) == len(faults) + 1, "none was interrupted or lost"
    return by_fault


def assert_named(trials, expected):
    """Every fault by its name, without a score."""
    found = {}
    for fault, trial in trials.items():
        facts, (_, stage, codes) = trial["failure_facts"] or {}, expected[fault]
        found[fault] = Named(
            facts.get("cause"),
            stage if facts.get("stage") in stage.split("/") else facts.get("stage"),
            codes if facts.get("exit_code") in codes else (facts.get("exit_code"),),
        )
    assert found == dict(expected)
    for trial in trials.values():
        assert (trial["state"], trial["score"]) == ("infeasible", 0.0)
        assert trial["failure_facts"]["line"]
        assert any(value > 0 for value in trial["constraints"].values())


def test_fault_of_a_start_is_named_and_the_next_trial_is_fine(tuning):
    assert_named(play(tuning, STARTS), STARTS)


def test_fault_of_a_start_on_a_gpu_is_named_and_the_next_trial_is_fine(tuning):
    gpu = {"model": "qwen2.5-1.5b", "args": {"max-model-len": 512}}
    assert_named(play(tuning, GRAPHS, server=gpu, SIMULATED_DEVICE="a10-24g"), GRAPHS)


def test_kill_by_the_kernel_is_lack_of_memory(tuning, monkeypatch):
    monkeypatch.setattr("tuner.engine.kernel_kills.oom_kills", itertools.count(8).__next__)
    assert_named(play(tuning, BY_KERNEL), BY_KERNEL)


def test_start_that_stands_still_is_ended_in_its_stage(tuning):
    trials = play(tuning, HANGS, server={"startup_timeout": "4s"})
    assert_named(trials, HANGS)
    for trial in trials.values():
        assert 4.0 <= trial["duration_s"] < 30.0


def test_fault_under_load_is_named_and_the_next_trial_is_fine(tuning):
    trials = play(tuning, LOADS)
    assert_named(trials, LOADS)
    for trial in trials.values():
        assert trial["failure_facts"]["memory"]["kv_cache_tokens"] == 4096


def test_engine_that_stands_still_under_load_is_a_hang(tuning):
    fault = "hang_load after=8"
    trials = play(tuning, [fault], server={"hang_timeout": "1s"})
    assert_named(trials, {fault: Named("hang", "load", (None,))})


def test_failure_of_the_environment_is_tried_again_then_stops_the_study_which_goes_on(
    tuning, monkeypatch
):
    async def at_once(*_):
        """In place of the wait between two attempts."""

    monkeypatch.setattr(Attempts, "wait", at_once)
    counted = {
        f"{cause} once={tuning.folder / cause} first={expected.attempts}": cause
        for cause, expected in ENVIRONMENT.items()
    }
    study = {"search_space": {KNOB: list(counted)}, "trials": len(counted) + 1}
    stops = 0
    while (code := tuning.run(**study)) != 0:
        assert code == 3
        assert_consistent(DATABASE, waiting=1)
        stops += 1
        assert stops <= len(counted)
    assert stops == len(counted)
    assert_consistent(DATABASE)
    trials = tuning.trials()
    aborted = {
        counted[t["params"][KNOB]]: t["failure_facts"] for t in trials if t["state"] == "aborted"
    }
    assert {cause: (f["cause"], f["stage"]) for cause, f in aborted.items()} == {
        cause: (cause, expected.stage) for cause, expected in ENVIRONMENT.items()
    }
    mended = [t["params"][KNOB] for t in trials if t["state"] == "measured" and t["params"]]
    assert sorted(mended) == sorted(counted), "each configuration is measured in the end, once"
    launches = {cause: (tuning.folder / cause).stat().st_size for cause in ENVIRONMENT}
    assert launches == {cause: e.attempts + 1 for cause, e in ENVIRONMENT.items()}


@pytest.mark.parametrize("cause", ["port_in_use", "nccl", "compile_cache", "unknown", "crash"])
def test_failure_that_passes_is_tried_again_and_measured(tuning, monkeypatch, cause):
    async def at_once(*_):
        """In place of the wait between two attempts."""

    monkeypatch.setattr(Attempts, "wait", at_once)
    assert tuning.once(cause, trials=1) == 0
    assert cause in tuning.said()
    assert_consistent(DATABASE)
    assert [t["state"] for t in tuning.trials()] == ["measured"]
    assert (tuning.folder / "launches").stat().st_size == 2


def test_study_whose_starts_all_fail_ends_with_a_diagnosis(tuning):
    study = {"search_space": {"max-num-seqs": {"low": 4, "high": 64}}, "first": FAILURES_AT_FIRST}
    assert tuning.once("unsupported", trials=30, **study) == 4
    assert "unsupported" in tuning.said()
    assert_consistent(DATABASE)
    assert tuning.status()["finished_trials"] == FAILURES_AT_FIRST
    mended = tuning.once("unsupported", trials=FAILURES_AT_FIRST + 1, **study)
    assert mended == 0, "it goes on"


def test_table_has_every_cause():
    starts = (*STARTS.values(), *GRAPHS.values(), *HANGS.values(), *LOADS.values())
    starts += tuple(BY_KERNEL.values())
    covered = {FailureCause(named.cause) for named in starts}
    covered |= {FailureCause(cause) for cause in ENVIRONMENT}
    assert covered == set(FailureCause) - {FailureCause.NONE}
