"""A log of several starts: the last one counts, and nothing of one is taken for another's."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_corpus import CASES, WRAPPINGS

from tuner.engine.diagnosis import Diagnosis, diagnose
from tuner.types import FailureCause, Stage

LOGS = Path(__file__).parent / "data" / "logs"
REAL = {path.stem: path.read_bytes() for path in sorted(LOGS.glob("cpu_0.32_*.log"))}

# The two without a line of their start are no start.
WHOLE = [c for c in CASES if c.name not in ("oom_runtime_tail_only", "oom_runtime_traceback_only")]
ANY = st.sampled_from(WHOLE)


def told(found: Diagnosis) -> tuple[object, ...]:
    """What belongs to one start alone."""
    numbers = dict(found.numbers)
    return found.cause, found.stage, found.line, numbers, found.vllm_version, found.advice


# --- one after another -----------------------------------------------------------------


def test_last_of_two_real_starts_counts():
    alone = {name: diagnose([data]) for name, data in REAL.items()}
    for (first, one), (second, two) in itertools.permutations(REAL.items(), 2):
        found = diagnose([one + two])
        assert told(found) == told(alone[second]), (first, second)
        assert (found.starts, found.earlier) == (2, (alone[first].cause,)), (first, second)


@pytest.mark.parametrize("name", sorted(REAL))
def test_single_start_is_one(name):
    found = diagnose([REAL[name]])
    assert (found.starts, found.earlier) == (1, ())


@pytest.mark.parametrize("wrapping", [None, *WRAPPINGS])
def test_corpus_is_one_start_each(wrapping):
    change = WRAPPINGS[wrapping] if wrapping else str
    found = {c.name: diagnose([change(c.text).encode()], c.exit_code) for c in CASES}
    assert {name: d.starts for name, d in found.items() if d.starts != 1} == {}
    wrong = {c.name: found[c.name].cause for c in CASES if found[c.name].cause != c.cause}
    assert wrong == {}


@given(cases=st.lists(ANY, min_size=2, max_size=4), outer=st.sampled_from(["", *WRAPPINGS]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_last_of_several_starts_counts(cases, outer):
    change = WRAPPINGS[outer] if outer else str
    texts = [change(case.text) for case in cases]
    found = diagnose(["".join(texts).encode()], cases[-1].exit_code)
    assert told(found) == told(diagnose([texts[-1].encode()], cases[-1].exit_code))
    assert found.starts == len(cases)


@given(cuts=st.lists(st.integers(0, 80_000), max_size=8), case=ANY)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_pieces_of_any_size_hold_the_same_starts(cuts, case):
    data = REAL["cpu_0.32_kv_too_small"] + case.text.encode() + REAL["cpu_0.32_ok"]
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    pieces = [data[begin:end] for begin, end in itertools.pairwise(edges)]
    assert diagnose(pieces) == diagnose([data])


def test_start_that_said_nothing_of_its_end_is_unknown():
    text = next(c for c in CASES if c.name == "host_oom_0.7.3_no_word").text
    start = "\n".join(text.splitlines()[:4]) + "\n"
    found = diagnose([start.encode() + REAL["cpu_0.32_ok"]])
    assert found.starts == 2
    assert found.earlier in ((FailureCause.UNKNOWN,), (FailureCause.NONE,))


def test_utf_16_is_cut_too():
    text = (REAL["cpu_0.32_kv_too_small"] + REAL["cpu_0.32_port_in_use"]).decode()
    found = diagnose([text.encode("utf-16")])
    assert (found.starts, found.cause) == (2, FailureCause.PORT_IN_USE)


def test_many_restarts_are_counted():
    data = REAL["cpu_0.32_bad_value"]
    found = diagnose(itertools.repeat(data, 50))
    assert (found.starts, set(found.earlier)) == (50, {FailureCause.BAD_CONFIG})


# --- side by side ----------------------------------------------------------------------

VERSION = "(APIServer pid={}) INFO 10-02 09:{}:00 [api_server.py:1822] vLLM API server version 0.11"
LOADING = "(EngineCore_DP{} pid={}) INFO 10-02 09:01:00 [gpu.py:9] Starting to load model x"
READY = "(APIServer pid={}) INFO:     Application startup complete."
ENDED = (
    "(EngineCore_DP1 pid=12) ERROR 10-02 09:02:00 [core.py:7] torch.OutOfMemoryError: CUDA out of "
    "memory. Tried to allocate 2.00 GiB."
)


def diagnosed(*lines: str) -> Diagnosis:
    return diagnose(["\n".join(lines).encode()])


def test_engines_and_servers_of_one_start_are_not_cut_apart():
    found = diagnosed(
        VERSION.format(1, "00"),
        VERSION.format(2, "00"),
        LOADING.format(0, 11),
        LOADING.format(1, 12),
        "(ApiServer_0 pid=31) INFO 10-02 09:00:30 [x.py:1] vLLM API server version 0.11",
        "(ApiServer_1 pid=32) INFO 10-02 09:00:30 [x.py:1] vLLM API server version 0.11",
        ENDED,
        "(APIServer pid=1) INFO 10-02 09:03:00 [x.py:1] cleaning up",
        "(APIServer pid=2) INFO 10-02 09:03:00 [x.py:1] cleaning up",
    )
    assert (found.starts, found.cause) == (1, FailureCause.OOM_LOAD)


def test_another_process_much_later_is_a_restart():
    found = diagnosed(VERSION.format(1, "00"), VERSION.format(2, "05"))
    assert (found.starts, found.stage) == (2, Stage.LAUNCH)


def test_another_process_after_a_failure_is_a_restart_without_a_version():
    found = diagnosed(
        VERSION.format(1, "00"),
        LOADING.format(0, 11),
        ENDED,
        "(APIServer pid=77) ERROR 10-02 09:04:00 [x.py:1] OSError: [Errno 98] Address already in "
        "use",
    )
    assert (found.starts, found.earlier) == (2, (FailureCause.OOM_LOAD,))
    assert found.cause is FailureCause.PORT_IN_USE


def test_request_that_holds_a_log_begins_no_start():
    quoted = (
        "INFO 10-02 09:05:00 [logger.py:43] Received request cmpl-1: prompt: 'vLLM API server "
        "version 0.4.3', params: SamplingParams(n=1)"
    )
    found = diagnosed(VERSION.format(1, "00"), READY.format(1), quoted)
    assert (found.starts, found.vllm_version) == (1, "0.11")
