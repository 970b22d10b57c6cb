"""A whole log and an exit code: cause, blame, numbers, advice; never an exception."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.engine.diagnosis import Diagnosis, diagnose
from tuner.engine.log_settings import HEAD_BYTES, settings_of
from tuner.types import Blame, FailureCause, Stage

LOGS = Path(__file__).parent / "data" / "logs"
START = "INFO 12-01 06:13:32 [api_utils.py:286] vLLM API server version 0.11.0"
LOADING = "(EngineCore pid=1) INFO 12-01 06:13:32 [gpu_model_runner.py:9] Starting to load model x"
CAPTURE = (
    "INFO 12-01 06:14:00 [kv_cache_utils.py:8] GPU KV cache size: 40,000 tokens\n"
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/67"
)
READY = "(APIServer pid=1) INFO:     Application startup complete."
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total "
    "capacity of 23.57 GiB of which 154.88 MiB is free."
)


def diagnosed(*lines: str, exit_code: int | None = None) -> Diagnosis:
    return diagnose(["\n".join(lines).encode()], exit_code)


def test_out_of_memory_at_capture_is_told_with_all_that_is_known():
    settings_line = (
        "INFO 12-01 06:13:32 [utils.py:3] non-default args: {'gpu_memory_utilization': 0.95}"
    )
    found = diagnosed(START, settings_line, LOADING, CAPTURE, OOM)
    assert (found.cause, found.stage) == (FailureCause.OOM_GRAPH_CAPTURE, Stage.GRAPH_CAPTURE)
    assert (found.blame, found.retry) == (Blame.CONFIGURATION, False)
    assert found.vllm_version == "0.11.0"
    assert found.line == OOM
    assert found.numbers["tried_to_allocate_gib"] == 0.5
    assert found.numbers["total_gib"] == 23.57
    assert found.advice[0].startswith("lower gpu-memory-utilization from 0.95 to 0.92")
    assert LOADING in found.excerpt


def test_pieces_of_any_size_give_the_same():
    data = (LOGS / "cpu_0.32_kv_too_small.log").read_bytes()
    whole = diagnose([data])
    assert whole.cause is FailureCause.KV_TOO_SMALL
    assert "at most 224" in whole.advice[0]
    for size in (1, 37, 4096):
        assert diagnose(data[i : i + size] for i in range(0, len(data), size)) == whole


# --- no failure ------------------------------------------------------------------------


def test_healthy_log_has_no_failure():
    found = diagnose([(LOGS / "cpu_0.32_ok.log").read_bytes()])
    assert (found.cause, found.blame, found.retry) == (FailureCause.NONE, Blame.NONE, False)
    assert found.line == "no failure in it; it ends while serving"
    assert found.advice == ()


def test_log_that_ends_while_loading_says_so():
    found = diagnosed(START, LOADING)
    assert (found.cause, found.stage) == (FailureCause.NONE, Stage.LOADING)
    assert found.line == "no failure in it; it ends while loading the weights"


def test_part_of_a_log_does_not_claim_to_know_the_start():
    found = diagnosed("INFO 12-01 06:14:00 [loggers.py:1] Engine 000: Running: 3 reqs, tokens/s")
    assert found.cause is FailureCause.NONE
    assert found.line == "no failure in it; it does not tell the start"


@pytest.mark.parametrize("chunks", [[], [b""], [b"\n", b" \r\n"]])
def test_empty_log_is_told_as_such(chunks):
    found = diagnose(chunks)
    assert (found.cause, found.line) == (FailureCause.UNKNOWN, "the log is empty")
    assert any("kubectl logs --previous" in step for step in found.advice)


def test_log_of_something_else_is_unknown():
    found = diagnosed("Jan 1 sshd: accepted", "Jan 1 cron: ran")
    assert found.cause is FailureCause.UNKNOWN
    assert "is it the right log?" in found.line
    assert "cron" in found.excerpt


# --- exit codes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit_code", "cause"),
    [
        (None, FailureCause.NONE),
        (0, FailureCause.NONE),
        (1, FailureCause.UNKNOWN),
        (2, FailureCause.BAD_CONFIG),
        (-9, FailureCause.HOST_OOM),
        (137, FailureCause.HOST_OOM),
        (139, FailureCause.CRASH),
    ],
)
def test_exit_code_decides_where_the_log_says_nothing(exit_code, cause):
    found = diagnosed(START, LOADING, exit_code=exit_code)
    assert (found.cause, found.exit_code) == (cause, exit_code)


@pytest.mark.parametrize("exit_code", [None, 0, 1, 2, -9, 137])
def test_exit_code_does_not_decide_where_a_line_does(exit_code):
    found = diagnosed(START, LOADING, OOM, exit_code=exit_code)
    assert found.cause is FailureCause.OOM_LOAD


def test_exit_code_alone_is_enough():
    assert diagnose([], 137).cause is FailureCause.HOST_OOM


# --- what nobody has a name for --------------------------------------------------------

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "serve.py", line 3, in start',
    "    raise WeirdError(",
    "weird.WeirdError: the flux is not aligned",
)


def test_unnamed_exception_is_unknown_with_its_line_and_the_lines_around():
    found = diagnosed(START, LOADING, *TRACEBACK)
    assert (found.cause, found.blame) == (FailureCause.UNKNOWN, Blame.UNKNOWN)
    assert found.line == TRACEBACK[-1]
    assert TRACEBACK[1] in found.excerpt


@pytest.mark.parametrize("later", [CAPTURE, READY])
def test_exception_that_the_start_survived_is_no_failure(later):
    assert diagnosed(START, LOADING, *TRACEBACK, later).cause is FailureCause.NONE


# --- settings of the start -------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "args"),
    [
        (
            "non-default args: {'model_tag': 'm', 'max_num_seqs': 64, 'enforce_eager': True, "
            "'kv_cache_dtype': 'fp8', 'gpu_memory_utilization': 0.85}",
            {
                "max-num-seqs": 64,
                "enforce-eager": True,
                "kv-cache-dtype": "fp8",
                "gpu-memory-utilization": 0.85,
            },
        ),
        (
            "args: Namespace(host=None, swap_space=4.0, max_num_seqs=256, quantization=None, "
            "enforce_eager=False, tensor_parallel_size=2)",
            {
                "swap-space": 4.0,
                "max-num-seqs": 256,
                "enforce-eager": False,
                "tensor-parallel-size": 2,
            },
        ),
    ],
)
def test_settings_are_read_by_name(line, args):
    found = settings_of(f"{START}\nINFO [x.py:1] {line}\nmax_num_seqs=1\n".encode())
    assert found is not None
    assert found.args == args


def test_settings_are_not_known_where_the_log_does_not_list_them():
    assert settings_of(f"{START}\nmax_num_seqs=1\n".encode()) is None


def test_settings_far_down_a_long_log_are_not_looked_for():
    late = b"non-default args: {'max_num_seqs': 2}\n"
    long = (b"vllm" + b"x" * 995 + b"\n") * (HEAD_BYTES // 1000 + 1)
    found = diagnose([long, late, OOM.encode()])
    assert found.cause is FailureCause.OOM_LOAD
    assert not any("from 2" in step for step in found.advice)


# --- any bytes -------------------------------------------------------------------------

_HOSTILE = st.one_of(
    st.binary(max_size=80),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [START, LOADING, CAPTURE, OOM, READY, *TRACEBACK, "non-default args: {'max_num_seqs': 9"]
    ).map(str.encode),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_HOSTILE, max_size=12), st.none() | st.integers(-200, 300))
def test_diagnose_never_raises(chunks, exit_code):
    found = diagnose(chunks, exit_code)
    assert found.blame is found.cause.blame
    assert found.retry is found.cause.retry
    assert bool(found.advice) is (found.cause is not FailureCause.NONE)
