"""Who killed a server: the kernel for memory, or somebody."""

from __future__ import annotations

import pytest

from tuner.engine import kernel_kills
from tuner.engine.kernel_kills import oom_kills, with_killer
from tuner.engine.log_exit import cause_of_exit
from tuner.types import Failure, FailureCause, Stage


def failure(line: str, cause: FailureCause = FailureCause.HOST_OOM) -> Failure:
    return Failure(cause, Stage.LOADING, line, exit_code=-9)


BY_EXIT = cause_of_exit(-9, Stage.LOADING)[1]


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """Sets what the kernel counts; None removes it."""
    path = tmp_path / "vmstat"
    monkeypatch.setattr(kernel_kills, "_COUNTERS", path)

    def count(kills: int | None) -> None:
        path.write_text("nr_free_pages 5\n" + (f"oom_kill {kills}\n" if kills is not None else ""))

    return count


def test_oom_kills_reads_the_kernel_s_counter(counters):
    assert oom_kills() is None
    counters(None)
    assert oom_kills() is None
    counters(3)
    assert oom_kills() == 3


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (BY_EXIT, "killed with SIGKILL by somebody, not by the kernel for memory"),
        (
            "RuntimeError: Engine core initialization failed. Failed core proc(s): {'E': -9}",
            "RuntimeError: Engine core initialization failed. Failed core proc(s): {'E': -9} "
            "(by somebody, not by the kernel for memory)",
        ),
    ],
)
def test_with_killer_takes_a_kill_that_the_kernel_knows_nothing_of_for_a_crash(
    counters, line, told
):
    counters(3)
    found = with_killer(failure(line), 3)
    assert (found.cause, found.line) == (FailureCause.CRASH, told)


@pytest.mark.parametrize(("before", "after"), [(3, 4), (None, 4), (3, None), (None, None)])
def test_with_killer_leaves_the_verdict_where_it_may_have_been_the_kernel(counters, before, after):
    counters(after)
    assert with_killer(failure(BY_EXIT), before) == failure(BY_EXIT)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("DefaultCPUAllocator: can't allocate memory", FailureCause.HOST_OOM),
        ("Out of memory: Killed process 12 (VLLM::Worker)", FailureCause.HOST_OOM),
        ("Failed core proc(s): {'EngineCore': -9}", FailureCause.OOM_LOAD),
    ],
)
def test_with_killer_leaves_what_the_log_knows_better(counters, line, cause):
    counters(3)
    assert with_killer(failure(line, cause), 3) == failure(line, cause)
