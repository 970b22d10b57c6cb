"""Each fault of the stand-in through the whole tuner: named, survived, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from stand_in import COMMAND, FAST, processes_in

from tuner import evaluate
from tuner.cli import main
from tuner.types import FailureCause

SPACE = {
    "study": "faulty",
    "server": {
        "command": COMMAND,
        "model": "tiny",
        "args": {"max-model-len": 512, "kv-cache-memory-bytes": "16MiB"},
        "startup_timeout": "20s",
    },
    "search_space": {"max-num-seqs": {"low": 4, "high": 64, "log": True}},
    "workload": {
        "kind": "synthetic",
        "input_tokens": 32,
        "output_tokens": 24,
        "requests": 16,
        "concurrency": 8,
        "warmup": 2,
        "request_timeout": "3s",
    },
    "budget": {"trials": 2},
}


class Tuning:
    """Runs studies on the stand-in in this process and reads what came out."""

    def __init__(self, folder, capsys):
        self.folder = folder
        self._capsys = capsys

    def run(self, *, search_space=None, trials=2, server=None, **env):
        """`tuner run`; its exit code."""
        document = {
            **SPACE,
            "server": {**SPACE["server"], "env": {**FAST, **env}, **(server or {})},
            "search_space": search_space or SPACE["search_space"],
            "budget": {"trials": trials},
        }
        Path("space.yaml").write_text(yaml.safe_dump(document))
        return call("run", "space.yaml")

    def once(self, fault, *, first=1, **more):
        """The same with a fault in the first launches alone."""
        counted = f"{fault} once={self.folder / 'launches'} first={first}"
        return self.run(SIMULATED_FAULT=counted, **more)

    def said(self):
        """What was printed since the last time."""
        captured = self._capsys.readouterr()
        return captured.out + captured.err

    def trials(self):
        """All trials as `tuner show --json` has them."""
        return [self._json("show", "faulty", str(t["number"])) for t in self.status()["trials"]]

    def status(self):
        return self._json("status", "faulty")

    def _json(self, *arguments):
        self._capsys.readouterr()
        assert call(*arguments, "--json") == 0
        return json.loads(self._capsys.readouterr().out)


def call(*arguments):
    try:
        main(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


@pytest.fixture
def tuning(in_tmp, capsys, monkeypatch):
    """See `Tuning`; nothing may be left of its servers in the end."""
    base = tempfile.mkdtemp(prefix="f", dir="/tmp")  # short, for the tuner to use it
    monkeypatch.setattr(tempfile, "tempdir", base)
    monkeypatch.setenv("TMPDIR", base)
    yield Tuning(in_tmp, capsys)
    assert processes_in(in_tmp) == []
    assert os.listdir(base) == []
    shutil.rmtree(base)


def outcomes(tuning, faults, trials=None):
    """Run one study that has each of `faults` in one trial; trial by fault.

    The faults are what is searched, so that every trial after a failed one has to start well.
    """
    space = {"env.SIMULATED_FAULT": faults}
    assert tuning.run(search_space=space, trials=len(faults) + 1) == 0
    document = tuning.status()
    assert document["state"] == "finished"
    assert document["simulated"]
    by_fault = {t["params"].get("env.SIMULATED_FAULT"): t for t in tuning.trials()}
    assert by_fault[None]["state"] == "measured"  # the reference
    assert by_fault.keys() == {*faults, None}
    for trial in by_fault.values():
        assert trial["state"] in ("measured", "infeasible")
        assert Path(trial["log"]).is_file()
    return by_fault


# --- starts --------------------------------------------------------------------------------

STARTS = {
    "oom_load": ("oom_load", "loading", 1),
    "oom_profile": ("oom_profile", "profiling", 1),
    "oom_kv_alloc": ("oom_kv_alloc", "kv_allocation", 1),
    "oom_warmup": ("oom_warmup", "warmup", 1),
    "host_oom": ("host_oom", "loading", 1),
    "host_oom stage=kv_allocation exit=-9": ("host_oom", "kv_allocation", -9),
    "kv_no_blocks": ("kv_no_blocks", "kv_allocation", 1),
    "kv_too_small": ("kv_too_small", "kv_allocation", 1),
    "state_blocks": ("state_blocks", "kv_allocation", 1),
    "startup_timeout": ("startup_timeout", "loading", 1),
    "crash": ("crash", "profiling", 1),
    "crash stage=loading exit=-11": ("crash", "loading", -11),
    "bad_config exit=1": ("bad_config", "launch", 1),
    "unsupported": ("unsupported", "kv_allocation", 1),
    "unknown": ("unknown", "loading", 1),
}


def test_start_that_fails_is_named_and_the_next_one_works(tuning):
    found = outcomes(tuning, [*STARTS, "slow_start seconds=0.5"])
    named = {
        fault: (f["cause"], f["stage"], f["exit_code"])
        for fault in STARTS
        if (f := found[fault]["failure_facts"])
    }
    assert named == STARTS
    assert found["slow_start seconds=0.5"]["state"] == "measured"
    for fault in STARTS:
        assert (found[fault]["score"], found[fault]["state"]) == (0.0, "infeasible")


def test_start_on_a_gpu_fails_where_only_a_gpu_does(tuning):
    gpu = {"model": "qwen2.5-1.5b", "args": {"max-model-len": 512}}
    assert tuning.once("oom_graph_capture", server=gpu, SIMULATED_DEVICE="a10-24g") == 0
    failed, worked = tuning.trials()
    assert failed["failure_facts"]["cause"] == "oom_graph_capture"
    assert failed["failure_facts"]["stage"] == "graph_capture"
    assert failed["failure_facts"]["memory"]["weights_gib"] == pytest.approx(2.88, abs=0.01)
    assert worked["state"] == "measured"


def test_start_that_hangs_is_ended_at_the_time_limit(tuning):
    assert tuning.once("hang_start stage=loading", server={"startup_timeout": "3s"}) == 0
    hung, worked = tuning.trials()
    assert hung["failure"] == "startup_timeout"
    assert "loading the weights" in hung["failure_facts"]["line"]
    assert worked["state"] == "measured"


@pytest.mark.parametrize("fault", ["port_in_use", "memory_baseline_moved"])
def test_start_that_fails_by_chance_is_tried_again(tuning, fault):
    assert tuning.once(fault) == 0
    assert f"{fault}: " in tuning.said()
    first, second = tuning.trials()
    assert (first["state"], second["state"]) == ("measured", "measured")
    assert (first["number"], second["number"]) == (0, 1)


@pytest.mark.parametrize(
    ("fault", "cause", "launches"),
    [
        ("device_busy", "device_busy", 2),
        ("nccl", "nccl", 1),
        ("model_not_found", "model_not_found", 1),
        ("model_access", "model_access", 1),
        ("compile_cache", "compile_cache", 1),
        ("disk_full", "disk_full", 1),
        ("bad_config", "bad_config", 1),
    ],
)
def test_failure_of_the_environment_stops_the_study_which_goes_on_when_mended(
    tuning, fault, cause, launches
):
    assert tuning.once(fault, first=launches) == 3
    assert f"the server cannot run here ({cause})" in tuning.said()
    stopped = tuning.status()
    assert (stopped["finished_trials"], stopped["best"]) == (0, None)
    assert tuning.once(fault, first=launches, trials=1) == 0
    finished = [t for t in tuning.trials() if t["state"] == "measured"]
    assert [t["reference"] for t in finished] == [True]
    assert len((tuning.folder / "launches").read_text()) == launches + 1


def test_server_of_somebody_else_on_the_port_is_not_measured(tuning):
    assert tuning.once("other_server seconds=0.5") == 0
    assert "port_in_use: " in tuning.said()
    trial = tuning.trials()[0]
    assert trial["state"] == "measured"
    assert trial["measurement"]["memory"]["max_model_len_tokens"] == 512  # not the impostor's
    assert "already in use" in Path(trial["log"]).with_name("server.1.log").read_text()


def test_every_cause_is_tried():
    covered = {FailureCause(cause) for cause, _, _ in STARTS.values()}
    covered |= {FailureCause(cause) for cause in LOADS.values()}
    covered |= {FailureCause.OOM_GRAPH_CAPTURE, FailureCause.MEMORY_BASELINE_MOVED}
    covered |= {FailureCause.PORT_IN_USE, FailureCause.DEVICE_BUSY, FailureCause.NCCL}
    covered |= {FailureCause.MODEL_NOT_FOUND, FailureCause.MODEL_ACCESS}
    covered |= {FailureCause.COMPILE_CACHE, FailureCause.DISK_FULL}
    assert covered == set(FailureCause) - {FailureCause.NONE}


# --- under load ----------------------------------------------------------------------------

LOADS = {
    "oom_runtime": "oom_runtime",
    "hang": "hang",
    "crash stage=load": "crash",
    "crash stage=load exit=-6": "crash",
    "host_oom stage=load": "host_oom",
    "engine_killed": "crash",
    "server_killed": "host_oom",
    "all_killed": "host_oom",
    "engine_dead": "crash",
}


def test_server_that_dies_under_load_is_named_and_the_next_one_works(tuning):
    found = outcomes(tuning, list(LOADS))
    assert {fault: found[fault]["failure"] for fault in LOADS} == LOADS
    for fault in LOADS:
        facts = found[fault]["failure_facts"]
        assert facts["stage"] == "load"
        assert facts["memory"]["kv_cache_tokens"] == 4096
        signal_code = int(fault.partition("exit=")[2] or 0)
        killed = -9 if fault in ("server_killed", "all_killed") else signal_code
        # Whether the engine's words or the process' end are seen first is chance.
        assert facts["exit_code"] in (killed, None)


def test_engine_that_hangs_under_load_loses_its_requests(tuning):
    assert tuning.once("hang_load after=8") == 0
    hung, worked = tuning.trials()
    lost = hung["failure"] == "hang" or hung["measurement"]["failed"] == 8
    assert lost
    assert hung["score"] < worked["score"] / 10


# --- answers, and what the server says of itself -------------------------------------------


def test_answers_that_are_none_count_as_failed(tuning, monkeypatch):
    monkeypatch.setattr(evaluate, "DEATH_NOTICE_S", 0.5)  # nothing dies here
    errors = {
        "http_500": "HTTP 500",
        "http_429": "HTTP 429",
        "cut_stream": "ClientPayloadError",
        "no_usage": "without usage",
        "wrong_usage": "without usage",
    }
    now_and_then = "http_500 every=2"
    found = outcomes(tuning, [*errors, now_and_then])
    assert found[now_and_then]["state"] == "measured"
    assert found[now_and_then]["measurement"]["served"] == 8
    for fault, told in errors.items():
        trial = found[fault]
        assert (trial["state"], trial["score"]) == ("infeasible", 0.0)
        assert trial["measurement"]["served"] == 0
        assert told in trial["measurement"]["first_error"]
    assert found["http_429"]["measurement"]["rejected"] == 16
    assert found["http_500"]["measurement"]["failed"] == 16


def test_metrics_that_cannot_be_trusted_void_the_measurement(tuning, monkeypatch):
    monkeypatch.setattr(evaluate, "DEATH_NOTICE_S", 0.5)
    expected = {
        "bad_metrics": ("unknown", "/metrics is malformed"),
        "no_metrics": ("unknown", "HTTP 404"),
        "counters_reset": ("crash", "the engine restarted under the load"),
    }
    found = outcomes(tuning, list(expected))
    for fault, (cause, told) in expected.items():
        assert found[fault]["failure"] == cause
        assert told in found[fault]["failure_facts"]["line"]


def test_server_that_only_behaves_badly_is_measured_and_ended(tuning):
    faults = ["ignore_term", "leave_engine", "not_yet", "garbage_log", "huge_log mib=4"]
    found = outcomes(tuning, faults)
    for fault in faults:
        assert found[fault]["failure"] is None, fault
        assert found[fault]["measurement"]["served"] == 16
        assert found[fault]["measurement"]["memory"]["kv_cache_tokens"] == 4096


# --- some configurations alone ---------------------------------------------------------------


def test_fault_of_some_configurations_spares_the_others(tuning):
    space = {"max-num-seqs": [4, 16, 64]}
    fault = "oom_runtime after=8 when='max-num-seqs > 16'"
    assert tuning.run(search_space=space, trials=4, SIMULATED_FAULT=fault) == 0
    trials = {t["params"].get("max-num-seqs"): t["failure"] for t in tuning.trials()}
    assert trials == {
        None: "oom_runtime",  # the default, 128
        4: None,
        16: None,
        64: "oom_runtime",
    }
    assert tuning.status()["best"]["params"]["max-num-seqs"] <= 16


def test_replayed_log_is_read_as_the_server_s_own(tuning):
    log = Path(__file__).parent / "data" / "logs" / "cpu_0.32_kv_too_small.log"
    assert tuning.once(f"replay file={log}") == 0
    assert [t["failure"] for t in tuning.trials()] == ["kv_too_small", None]


# --- reports -------------------------------------------------------------------------------


def test_reports_say_that_figures_are_simulated(tuning):
    assert tuning.run(trials=1) == 0
    note = "SIMULATED: measured on a stand-in for vLLM; no figure is of a real device"
    assert note in tuning.said()
    for arguments in (("status", "faulty"), ("show", "faulty", "0"), ("export", "faulty")):
        assert call(*arguments) == 0
        assert f"{note}, and its time passed 50 times as fast." in " ".join(tuning.said().split())
    assert tuning.status()["trials"][0]["simulated"] is True
    assert json.loads(json.dumps(tuning.trials()[0]))["simulated"] is True
    assert Path("studies/faulty/best.yaml").read_text().startswith(f"# {note}")
