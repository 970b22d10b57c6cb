"""What the stand-in does wrong besides failing, through the whole tuner: survived, nothing left.

Failures by cause and stage are in `test_fault_table`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faulty_studies import Tuning, call, clean_up_checked

from tuner import evaluate


@pytest.fixture
def tuning(in_tmp, capsys, monkeypatch):
    """See `Tuning`; nothing may be left of its servers in the end."""
    with clean_up_checked(in_tmp, monkeypatch):
        yield Tuning(in_tmp, capsys)


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


def test_server_of_somebody_else_on_the_port_is_not_measured(tuning):
    assert tuning.once("other_server seconds=0.5") == 0
    assert "port_in_use while launch: " in tuning.said()
    trial = tuning.trials()[0]
    assert trial["state"] == "measured"
    assert trial["measurement"]["memory"]["max_model_len_tokens"] == 512  # not the impostor's
    assert "already in use" in Path(trial["log"]).with_name("server.1.log").read_text()


# --- answers, and what the server says of itself -------------------------------------------


def test_answers_that_are_none_count_as_failed(tuning, monkeypatch):
    monkeypatch.setattr(evaluate, "DEATH_NOTICE_S", 0.5)  # nothing dies here
    errors = {
        "http_500": "HTTP 500",
        "http_429": "HTTP 429",
        "cut_stream": "the server closed the connection",
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
    slow = "slow_start seconds=0.5"
    faults = ["ignore_term", "leave_engine", "not_yet", "garbage_log", "huge_log mib=4", slow]
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
        assert f"{note}, and its time passed 8 times as fast." in " ".join(tuning.said().split())
    assert tuning.status()["trials"][0]["simulated"] is True
    assert json.loads(json.dumps(tuning.trials()[0]))["simulated"] is True
    assert Path("studies/faulty/best.yaml").read_text().startswith(f"# {note}")
