"""A study on a real vLLM that is stopped in the middle, politely and not, and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
from leftovers import descendants, of_server, shared_memory, wait_until_gone
from serving import START_DEADLINE_S
from tuning import Json, Workplace, cpu_tiny, finished_rows, server_process

from tuner.errors import ExitCode

SPACE = {
    "study": "stopped",
    "search_space": {"max-num-seqs": [1]},  # slow: its load lasts while a test looks on
    "constraints": [],
    "reference": {},
    "server_args": {"kv-cache-memory-bytes": "16MiB", "max-model-len": 512},
    "budget": {"trials": 2},
}


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def status(workplace: Workplace) -> Json:
    return workplace.tuner("status", "stopped", "--json").json()


def states(study: Json) -> list[str]:
    return [trial["state"] for trial in study["trials"]]


def test_ctrl_c_in_a_start_marks_the_trial_and_leaves_nothing(workplace, prepared_vllm, tiny_model):
    """With the plain vLLM, which swallows TERM while it starts."""
    space = workplace.write_space(cpu_tiny(prepared_vllm.command, tiny_model, **SPACE))
    with workplace.started("run", space) as tuner:
        tuner.wait_for("starting")
        eventually(lambda: shared_memory(descendants(tuner.process.pid)))
        record = server_process(workplace.study("stopped"))
        server = of_server(record["pgid"], record["tmpdir"])
        processes = {*server, *descendants(tuner.process.pid)}
        blocks = shared_memory(server)
        assert blocks
        tuner.press_ctrl_c()
        assert tuner.returncode() == ExitCode.INTERRUPTED
        assert "measuring" not in tuner.said()
        assert "Traceback" not in tuner.said()
    assert of_server(record["pgid"], record["tmpdir"]) == []
    wait_until_gone(processes)
    assert not any(block.exists() for block in blocks)
    assert not Path(record["tmpdir"]).exists()
    study = status(workplace)
    assert study["state"] == "stopped"
    assert states(study) == ["interrupted", "waiting"]
    assert study["best"] is None


def test_ctrl_c_under_load_prints_the_best_and_the_study_goes_on(
    workplace, fork_server, tiny_model
):
    document = cpu_tiny(fork_server.command, tiny_model, **SPACE)
    document["workload"]["output_tokens"] = 400  # some twenty seconds: longer than a look at it
    space = workplace.write_space(document)
    with workplace.started("run", space) as tuner:
        tuner.wait_for("measuring", times=2)
        processes = descendants(fork_server.pid) + descendants(tuner.process.pid)
        blocks = shared_memory(processes)
        assert blocks
        running = status(workplace)
        tuner.press_ctrl_c()
        assert tuner.returncode() == ExitCode.INTERRUPTED
        said = tuner.said()
    wait_until_gone(processes)
    assert not any(block.exists() for block in blocks)
    assert running["state"] == "running"
    assert states(running) == ["measured", "running"]
    stopped = status(workplace)
    assert stopped["state"] == "stopped"
    assert states(stopped) == ["measured", "interrupted", "waiting"]
    assert f"{stopped['best']['score']:.1f}" in said.partition("stopping")[2]
    assert f"tuner run {space}" in said
    rows = finished_rows(workplace.study("stopped"))

    assert workplace.tuner("run", space).code == ExitCode.OK
    done = status(workplace)
    assert done["state"] == "finished"
    assert states(done) == ["measured", "interrupted", "measured"]
    assert done["trials"][2]["params"] == done["trials"][1]["params"]
    assert rows < finished_rows(workplace.study("stopped"))


def test_kill_of_the_tuner_ends_the_plain_vllm(workplace, prepared_vllm, forked_vllm, tiny_model):
    """The finished trial and the resumed one are run by the quick command behind the same name."""
    vllm = workplace.folder / "vllm"
    vllm.symlink_to(forked_vllm)
    space = workplace.write_space(cpu_tiny("./vllm", tiny_model, **SPACE))
    folder = workplace.study("stopped")
    assert workplace.tuner("run", space, "--trials", "1").code == ExitCode.OK
    rows = finished_rows(folder)

    vllm.unlink()
    vllm.symlink_to(prepared_vllm.command)
    with workplace.started("run", space) as tuner:
        tuner.wait_for("measuring")
        record = server_process(folder)
        server = of_server(record["pgid"], record["tmpdir"])
        assert {"VLLM::EngineCore", "VLLM::Worker"} <= {process.name() for process in server}
        assert psutil.Process(record["pid"]) in server, "the supervisor"
        processes = {*server, *descendants(tuner.process.pid)}
        blocks = shared_memory(server)
        assert blocks
        tuner.kill()
    wait_until_gone(processes)
    assert of_server(record["pgid"], record["tmpdir"]) == []
    assert not any(block.exists() for block in blocks)
    assert not Path(record["tmpdir"]).exists()
    assert status(workplace)["state"] == "stopped"

    vllm.unlink()
    vllm.symlink_to(forked_vllm)
    again = workplace.tuner("run", space)
    assert again.code == ExitCode.OK
    assert "trial 1 was interrupted; it is run again" in again.out
    done = status(workplace)
    assert states(done) == ["measured", "interrupted", "measured"]
    assert done["trials"][2]["params"] == done["trials"][1]["params"]
    assert rows < finished_rows(folder)
