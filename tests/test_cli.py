"""The whole program on a stand-in server: commands, output, exit codes, Ctrl-C and kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from stand_in import COMMAND, FAST, MODULE, until, write_tiny_model
from test_spec import BAD

from tuner.cli import main
from tuner.storage import StudyStore

SPACE = {
    "study": "fake",
    "server": {
        "command": COMMAND,
        "model": "./model",
        "args": {"block-size": 32},
        "env": FAST,
    },
    "search_space": {
        "kv-cache-memory-bytes": ["1MiB", "4MiB"],
        "max-num-seqs": {"low": 2, "high": 64, "log": True},
        "max-model-len": [256, 512],
    },
    "reference": {"kv-cache-memory-bytes": "4MiB", "max-model-len": 512},
    "workload": {
        "kind": "synthetic",
        "input_tokens": 32,
        "output_tokens": {"mean": 40, "stdev": 10, "min": 8, "max": 80},
        "requests": 20,
        "concurrency": 20,
        "warmup": 2,
    },
    "budget": {"trials": 5},
}


@pytest.fixture
def space(in_tmp):
    """A function that writes a space file with some sections changed."""
    write_tiny_model(in_tmp / "model")

    def write(**changes):
        document = {**SPACE, **changes}
        Path("space.yaml").write_text(yaml.safe_dump(document))
        return "space.yaml"

    return write


def call(*arguments):
    """Run a command in this process; its exit code."""
    try:
        main(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def server(**env):
    return {**SPACE["server"], "env": {**FAST, **env}}


def status(study, capsys):
    capsys.readouterr()
    assert call("status", study, "--json") == 0
    return json.loads(capsys.readouterr().out)


def start(*arguments):
    """Run a command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tuner.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def servers(model):
    """Processes of servers on this test's model."""
    found = []
    for process in psutil.process_iter():
        try:
            if MODULE in process.cmdline() and process.cwd() == str(Path(model).resolve().parent):
                found.append(process)
        except psutil.Error:
            continue
    return found


# --- a study from beginning to end -------------------------------------------------------


def test_run_ends_with_a_configuration_to_deploy(space, capsys):
    assert call("run", space()) == 0
    out = capsys.readouterr().out
    assert "trial 1/5" in out
    assert "reference" in out
    assert "best.yaml" in out
    document = status("fake", capsys)
    assert document["state"] == "finished"
    assert len(document["trials"]) == 5
    assert document["default"]["number"] == 0
    assert document["best"]["score"] == max(t["score"] for t in document["trials"])
    gain = document["best"]["score"] / document["default"]["score"] - 1
    assert document["gain"] == pytest.approx(gain)
    best = yaml.safe_load(Path("studies/fake/best.yaml").read_text())
    assert best["model"] == "./model"
    for name, value in document["best"]["params"].items():
        assert best[name] == value


def test_run_gives_every_trial_a_score_or_a_named_failure(space, capsys):
    # Slow enough for all requests to be there before the first has its answer.
    assert call("run", space(server=server(SIMULATED_SPEED="2")), "--trials", "8") == 0
    trials = status("fake", capsys)["trials"]
    failed = [t for t in trials if t["failure"]]
    assert {t["failure"] for t in failed} == {"kv_too_small"}
    assert all(t["state"] == "infeasible" and t["score"] == 0 for t in failed)
    assert all(t["output_throughput"] > 0 for t in trials if not t["failure"])
    assert any(t["preemptions"] > 0 for t in trials if not t["failure"])


def test_run_again_goes_on_and_measures_nothing_twice(space, capsys):
    assert call("run", space(), "--trials", "3") == 0
    first = status("fake", capsys)["trials"]
    assert call("run", space(), "--trials", "6") == 0
    second = status("fake", capsys)["trials"]
    assert second[:3] == first
    assert len(second) == 6
    params = [json.dumps(t["params"], sort_keys=True) for t in second]
    assert len(set(params)) == 6


def test_run_keeps_within_its_time(space, capsys):
    assert call("run", space(), "--trials", "500", "--time-budget", "2s") == 0
    document = status("fake", capsys)
    assert 1 <= document["finished_trials"] < 20
    assert document["budget"]["time_spent_s"] < 10


def test_run_writes_into_another_database_and_study(space, capsys):
    url = f"sqlite:///{Path('elsewhere.db').resolve()}"
    assert call("run", space(), "--trials", "2", "--study", "mine", "--storage", url) == 0
    assert status(url, capsys)["study"] == "mine"
    assert call("run", space(), "--trials", "1", "--study", "second", "--storage", url) == 0
    assert call("status", url) == 2
    assert "--study" in capsys.readouterr().err
    assert call("status", url, "--study", "mine") == 0


def test_run_refuses_to_mix_what_cannot_be_compared(space, capsys):
    assert call("run", space(), "--trials", "1") == 0
    changed = {**SPACE["workload"], "requests": 21}
    assert call("run", space(workload=changed), "--trials", "2") == 2
    error = capsys.readouterr().err
    assert "workload.requests: 20 -> 21" in error
    assert "--study" in error
    assert call("run", space(budget={"trials": 2}, search={"sampler": "random"})) == 0


def test_run_again_after_the_best_file_was_lost_writes_it_again(space):
    assert call("run", space(), "--trials", "2") == 0
    Path("studies/fake/best.yaml").unlink()
    assert call("run", space(), "--trials", "2") == 0
    assert Path("studies/fake/best.yaml").is_file()


# --- what can go wrong -------------------------------------------------------------------


def test_run_with_nothing_that_works_is_exit_4(space, capsys):
    tight = {"max-model-len": [512], "kv-cache-memory-bytes": ["1MiB"]}
    reference = {"max-model-len": 512, "kv-cache-memory-bytes": "1MiB"}
    assert call("run", space(search_space=tight, reference=reference)) == 4
    captured = capsys.readouterr()
    assert "no configuration" in captured.err
    assert status("fake", capsys)["best"] is None
    assert call("export", "fake") == 4


def test_run_survives_a_server_that_dies_under_load(space, capsys):
    assert call("run", space(server=server(SIMULATED_FAULT="oom_runtime"))) == 4
    trials = status("fake", capsys)["trials"]
    assert {t["failure"] for t in trials} <= {"oom_runtime", "kv_too_small"}
    assert trials[0]["failure"] == "oom_runtime"
    assert servers("model") == []


def test_run_survives_a_server_that_ignores_term(space, capsys):
    faulty = server(SIMULATED_FAULT="ignore_term; leave_engine")
    started = time.monotonic()
    assert call("run", space(server=faulty), "--trials", "1") == 0
    assert time.monotonic() - started < 30
    assert servers("model") == []


def test_run_stops_at_a_failure_of_the_environment_and_goes_on_when_mended(space, capsys):
    assert call("run", space(server=server(SIMULATED_FAULT="model_not_found"))) == 3
    assert "model_not_found" in capsys.readouterr().err
    assert status("fake", capsys)["finished_trials"] == 0
    assert call("run", space()) == 0


def test_run_ends_a_start_that_takes_too_long(space, capsys):
    hanging = {**server(SIMULATED_FAULT="hang_start"), "startup_timeout": "2s"}
    assert call("run", space(server=hanging), "--trials", "1") == 4
    assert status("fake", capsys)["trials"][0]["failure"] == "startup_timeout"
    assert servers("model") == []


def test_run_counts_requests_that_are_too_long_as_lost(space, capsys):
    long_outputs = {**SPACE["workload"], "output_tokens": 240}
    knobs = {"max-model-len": [256], "max-num-seqs": {"low": 2, "high": 64}}
    reference = {"max-model-len": 512}
    file = space(
        workload=long_outputs,
        search_space=knobs,
        reference=reference,
        server={**SPACE["server"], "args": {"kv-cache-memory-bytes": "16MiB"}},
    )
    assert call("check", file) == 0
    assert "20 of 20 requests are longer" in capsys.readouterr().out
    assert call("run", file, "--trials", "2") == 0
    document = status("fake", capsys)
    assert document["best"]["reference"]
    assert document["trials"][1]["state"] == "infeasible"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["run", "missing.yaml"], 2, "missing.yaml"),
        (["run", "."], 2, "."),
        (["check", "missing.yaml"], 2, "missing.yaml"),
        (["status", "nothing"], 2, "nothing"),
        (["status", "sqlite:///missing.db"], 2, "missing.db"),
        (["export", "nothing"], 2, "nothing"),
        (["show", "nothing", "1"], 2, "nothing"),
        (["run", "space.yaml", "--trials", "0"], 2, "--trials"),
        (["run", "space.yaml", "--time-budget", "soon"], 2, "soon"),
        (["run", "space.yaml", "--time-budget", "0s"], 2, "no time"),
        (["run", "space.yaml", "--study", "../up"], 2, "../up"),
        (["run", "space.yaml", "--storage", "nonsense"], 2, "nonsense"),
        (["run", "space.yaml", "--seed", "-1"], 2, "--seed"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(space, capsys, arguments, code, told):
    space()
    assert call(*arguments) == code
    captured = capsys.readouterr()
    assert told in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("name", BAD)
def test_malformed_space_file_is_one_message_and_exit_2(in_tmp, capsys, name):
    text, _, _ = BAD[name]
    Path("space.yaml").write_text(text)
    for command in ("check", "run"):
        assert call(command, "space.yaml") == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: space.yaml")
        assert "Traceback" not in captured.err
    assert not Path("studies").exists()


def test_run_without_vllm_is_exit_3_and_check_says_what_it_could_not_do(space, capsys):
    no_vllm = {"command": ["no-such-vllm", "serve"], "model": "./model"}
    file = space(server=no_vllm)
    assert call("run", file) == 3
    assert "no-such-vllm" in capsys.readouterr().err
    assert call("check", file, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["checked_against_vllm"] is False
    assert "no-such-vllm" in document["unchecked_because"]
    assert document["points"] == 2 * 63 * 2


# --- stopping and resuming ---------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_stopped_by_a_signal_keeps_what_it_has(space, capsys, number):
    slow = server(SIMULATED_SPEED="0.05", SIMULATED_FAULT="leave_engine")
    slow["args"] = {"max-num-seqs": 64, "block-size": 32}
    knobs = {"kv-cache-memory-bytes": ["1MiB", "4MiB"], "max-model-len": [256, 512]}
    tuner = start("run", space(server=slow, search_space=knobs))
    until(lambda: servers("model") or None)
    time.sleep(1.0)
    tuner.send_signal(number)
    out, _ = tuner.communicate(timeout=60)
    assert tuner.returncode == 130, out
    assert "Traceback" not in out
    assert servers("model") == []
    document = status("fake", capsys)
    assert document["state"] == "stopped"
    assert [t["state"] for t in document["trials"]][-2:] == ["interrupted", "waiting"]


def test_run_killed_leaves_no_server_and_resumes(space, capsys):
    stubborn = "ignore_term once=first; leave_engine once=second"
    slow = server(SIMULATED_SPEED="0.4", SIMULATED_FAULT=stubborn)
    file = space(server=slow, search_space={"max-num-seqs": [32, 64]})
    tuner = start("run", file, "--trials", "3")
    until(lambda: servers("model") or None)
    time.sleep(1.0)
    tuner.kill()
    tuner.wait(30)
    until(lambda: True if not servers("model") else None)
    before = status("fake", capsys)
    assert before["state"] == "stopped"
    assert before["trials"][-1]["state"] == "running"
    assert call("run", file, "--trials", "2") == 0
    after = status("fake", capsys)
    states = [t["state"] for t in after["trials"]]
    assert states.count("interrupted") == 1
    assert after["finished_trials"] == 2
    assert "running" not in states


def test_run_goes_on_when_the_reader_of_its_output_is_gone(space, capsys):
    file = space()
    script = f"set -o pipefail; {sys.executable} -m tuner.cli run {file} --trials 2 | head -1"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0
    assert "Traceback" not in ran.stderr
    assert status("fake", capsys)["finished_trials"] == 2


def test_run_stopped_with_its_terminal_gone_is_still_130(space, capsys):
    file = space(server=server(SIMULATED_SPEED="0.05"))
    reading, writing = os.pipe()
    tuner = subprocess.Popen(
        [sys.executable, "-m", "tuner.cli", "run", file], stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    until(lambda: servers("model") or None)
    os.close(reading)
    tuner.send_signal(signal.SIGINT)
    _, errors = tuner.communicate(timeout=60)
    assert tuner.returncode == 130, errors
    assert b"Traceback" not in errors
    assert servers("model") == []


def test_output_on_a_full_disk_is_one_message_and_exit_3(space):
    assert call("run", space(), "--trials", "1") == 0
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "tuner.cli", "status", "fake", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ran.returncode == 3
    assert ran.stderr.startswith("error: the output cannot be written")
    assert "Traceback" not in ran.stderr


def test_output_that_is_not_utf8_loses_a_character_and_no_study(space):
    tight = {"max-model-len": [512], "kv-cache-memory-bytes": ["1MiB"]}
    file = space(search_space=tight)
    ran = subprocess.run(
        [sys.executable, "-m", "tuner.cli", "run", file, "--trials", "2"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert b"kv_too_small" in ran.stdout


def test_run_without_enough_open_files_is_exit_3_before_any_start(space):
    many = {**SPACE["workload"], "requests": 5000, "concurrency": 5000}
    file = space(workload=many)
    script = f"ulimit -n 256; exec {sys.executable} -m tuner.cli run {file}"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert ran.returncode == 3
    assert "open files" in ran.stderr
    assert not Path("studies").exists()


def test_run_of_a_command_that_is_no_vllm_is_exit_3(space, capsys):
    file = space(server={"command": ["/bin/false"], "model": "./model"})
    assert call("run", file) == 3
    assert "exit code 1" in capsys.readouterr().err
    assert status("fake", capsys)["finished_trials"] == 0


def test_run_of_a_flag_that_vllm_has_not_leaves_no_study_behind(space, capsys):
    file = space(server={**SPACE["server"], "args": {"max-num-sequences": 8}})
    assert call("run", file) == 2
    assert "max-num-seqs" in capsys.readouterr().err
    assert not Path("studies").exists()


def test_second_tuner_on_one_study_is_turned_away(space, capsys):
    file = space(server=server(SIMULATED_SPEED="0.05"))
    first = start("run", file)
    try:
        until(lambda: servers("model") or None)
        assert call("run", file) == 3
        assert f"process {first.pid}" in capsys.readouterr().err
        assert status("fake", capsys)["state"] == "running"
    finally:
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)


# --- the other commands ------------------------------------------------------------------


def test_show_tells_all_of_a_trial(space, capsys):
    assert call("run", space(), "--trials", "3") == 0
    capsys.readouterr()
    assert call("show", "fake", "0") == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("parameters", "command", "TTFT", "preemptions", "KV cache tokens", "server.log"):
        assert words in out
    assert call("show", "fake", "0", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["measurement"]["served"] == 20
    assert document["measurement"]["memory"]["kv_cache_tokens"] > 0
    assert Path(document["log"]).is_file()
    assert call("show", "fake", "99") == 2


def test_reading_commands_close_the_database(space, capsys, monkeypatch):
    assert call("run", space(), "--trials", "1") == 0
    closed = []
    close = StudyStore.close
    monkeypatch.setattr(StudyStore, "close", lambda store: (closed.append(1), close(store)))
    for number, words in enumerate((["status", "fake"], ["show", "fake", "0"]), 1):
        assert call(*words) == 0
        assert len(closed) == number
    monkeypatch.setattr(StudyStore, "read", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["status", "fake"])
    assert len(closed) == 3


def test_status_of_a_failed_trial_names_its_cause(space, capsys):
    assert call("run", space(), "--trials", "8") == 0
    document = status("fake", capsys)
    failed = next(t for t in document["trials"] if t["failure"])
    assert call("status", "fake") == 0
    assert "kv_too_small" in capsys.readouterr().out
    assert call("show", "fake", str(failed["number"])) == 0
    assert "To serve at least one request" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("form", ["yaml", "shell", "json"])
def test_export_writes_a_file_or_stdout(space, capsys, form):
    assert call("run", space(), "--trials", "2") == 0
    capsys.readouterr()
    assert call("export", "fake", "--format", form) == 0
    text = capsys.readouterr().out
    assert call("export", "fake", "--format", form, "-o", "out.txt") == 0
    assert Path("out.txt").read_text() == text
    assert "max-num-seqs" in text or "reference" in text


def test_export_into_a_missing_folder_is_exit_3(space, capsys):
    assert call("run", space(), "--trials", "1") == 0
    assert call("export", "fake", "-o", "no/such/folder/x") == 3
    assert "no/such/folder/x" in capsys.readouterr().err


def test_secrets_are_written_nowhere(space, capsys):
    secret = "hf_abcdefghijklmnopqrstuvwxyzabcdefgh"
    assert call("run", space(server=server(HF_TOKEN=secret)), "--trials", "2") == 0
    capsys.readouterr()
    for arguments in (["status", "fake", "--json"], ["show", "fake", "0"], ["export", "fake"]):
        assert call(*arguments) == 0
        assert secret not in capsys.readouterr().out
    for path in Path("studies").rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path


def test_version_names_what_matters(capsys):
    assert call("version") == 0
    out = capsys.readouterr().out
    assert "tuner " in out
    assert "optuna 5" in out


def test_output_cut_off_by_its_reader_is_no_error(space):
    assert call("run", space(), "--trials", "1") == 0
    script = f"{sys.executable} -m tuner.cli status fake --json | head -c 1 > /dev/null"
    ran = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"], capture_output=True, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert "Traceback" not in ran.stderr
