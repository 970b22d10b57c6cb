"""Processes of the stand-in that are killed: what it says, what is left of it."""

from __future__ import annotations

import http.client
import signal

import pytest
from stand_in import StandIn, is_engine, is_named, until

SMALL = ("--kv-cache-memory-bytes", "16777216", "--max-model-len", "512")
KILLED = -signal.SIGKILL


def living(server):
    """Which of its processes live on: once that is so for good."""
    pids = server.members()
    return {
        "server": server.process.pid in pids,
        "engine": any(map(is_engine, pids)),
        "tracker": any(is_named(pid, "tracker") for pid in pids),
    }


NOBODY = {"server": False, "engine": False, "tracker": False}
ORPHANS = {"server": False, "engine": True, "tracker": True}


@pytest.mark.parametrize("when", ["stage=loading", "after=1"])
@pytest.mark.parametrize(
    ("fault", "left"),
    [
        ("engine_killed", NOBODY),
        ("worker_killed", NOBODY),
        ("server_killed", ORPHANS),
        ("all_killed", NOBODY),
        ("group_killed", NOBODY),
    ],
)
def test_kill_strikes_in_the_start_or_under_load(fault, when, left):
    with StandIn(*SMALL, SIMULATED_FAULT=f"{fault} {when}") as server:
        if when == "after=1":
            server.ready()
            try:
                server.ask("POST", "/v1/completions", {"prompt": "a"})
            except (OSError, http.client.HTTPException):
                assert fault not in ("engine_killed", "worker_killed")
        code = server.process.wait(20)
        own_end = 1 if when == "stage=loading" else 0
        assert code == (own_end if fault in ("engine_killed", "worker_killed") else KILLED)
        until(lambda: True if living(server) == left else None)
        assert bool(server.blocks()) == (fault in ("server_killed", "group_killed"))


def test_kill_of_the_engine_in_the_start_is_told_by_the_server():
    with StandIn(*SMALL, SIMULATED_FAULT="engine_killed stage=profiling") as server:
        server.process.wait(20)
        assert "Failed core proc(s): {'EngineCore': -9}" in server.log
        assert "Starting to load model" in server.log
        assert "Application startup complete" not in server.log


def test_kill_of_a_worker_is_told_by_the_engine():
    with StandIn(*SMALL, SIMULATED_FAULT="worker_killed after=1").ready() as server:
        assert any(is_named(pid, "VLLM::Worker") for pid in server.members())
        server.post("/v1/completions", prompt="a")
        assert server.process.wait(20) == 0
        assert "died unexpectedly (exit code: -9)" in server.log
        assert "RuntimeError: Executor failed." in server.log


def test_shared_memory_is_removed_once_the_server_has_ended():
    with StandIn(*SMALL).ready() as server:
        assert len(server.blocks()) == 1
        server.process.terminate()
        server.process.wait(20)
        until(lambda: True if living(server) == NOBODY else None)
        assert server.blocks() == []
