"""A whole log and an exit code: cause, blame, numbers, advice; never an exception."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.engine.diagnosis import Diagnosis, diagnose
from tuner.engine.log_settings import HEAD_BYTES, settings_of
from tuner.retries import Retry, decide
from tuner.types import Blame, Failure, FailureCause, Stage

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


# --- a text that is no log of vLLM -----------------------------------------------------

NOTES = (
    "# Serving with vLLM",
    "If you see `torch.OutOfMemoryError: CUDA out of memory`, lower the share of the device.",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
)


@pytest.mark.parametrize("exit_code", [None, 1, 137, 139])
@pytest.mark.parametrize(
    "lines",
    [
        NOTES,
        NOTES[:1],
        ("step 3: loss 2.1", OOM),
        ("train.py: Connection closed", "Segmentation fault (core dumped)"),
    ],
)
def test_text_that_only_speaks_of_failures_is_unknown(lines, exit_code):
    found = diagnosed(*lines, exit_code=exit_code)
    assert (found.cause, found.blame) == (FailureCause.UNKNOWN, Blame.UNKNOWN)
    assert "is it the right log?" in found.line
    assert (f"exit code {exit_code} alone" in found.line) is (exit_code is not None)
    assert "the vLLM server itself" in found.advice[0]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("Out of memory: Killed process 42 (VLLM::EngineCor)", FailureCause.HOST_OOM),
        ("Available: vllm-0 OOMKilled", FailureCause.HOST_OOM),
        (
            "ValueError: No available memory for the cache blocks. Try increasing "
            "gpu_memory_utilization",
            FailureCause.KV_NO_BLOCKS,
        ),
        ("vllm: error: unrecognized arguments: --nope", FailureCause.BAD_CONFIG),
    ],
)
def test_single_line_about_vllm_is_enough(line, cause):
    assert diagnosed(line).cause is cause


# --- a log without its beginning -------------------------------------------------------

RUNTIME = sorted((LOGS / "corpus").glob("oom_runtime_*.log"))


@pytest.mark.parametrize("lines", [15, 20])
@pytest.mark.parametrize("log", RUNTIME, ids=lambda log: log.stem)
def test_tail_of_a_server_that_served_is_out_of_memory_at_run_time(log, lines):
    found = diagnosed(*log.read_text(encoding="utf-8").splitlines()[-lines:])
    assert (found.cause, found.stage) == (FailureCause.OOM_RUNTIME, Stage.READY)
    assert any("lower gpu-memory-utilization" in step for step in found.advice)
    assert not any("tensor-parallel-size" in step for step in found.advice)


@pytest.mark.parametrize(
    "later",
    [
        'INFO:     10.0.0.7:41234 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error',
        'INFO:     10.0.0.7:41234 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        "INFO:     Shutting down",
        "INFO 12-01 06:13:32 [async_llm.py:300] Added request chatcmpl-1.",
        "INFO 12-01 06:13:32 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s",
    ],
)
def test_line_of_a_serving_server_after_the_error_tells_the_phase(later):
    found = diagnosed(f"(EngineCore pid=1) ERROR 12-01 06:13:32 [core.py:1] {OOM}", later)
    assert (found.cause, found.stage) == (FailureCause.OOM_RUNTIME, Stage.READY)
    assert found.phase_known


def test_part_that_does_not_tell_the_phase_claims_none():
    found = diagnosed(f"(EngineCore pid=1) ERROR 12-01 06:13:32 [core.py:1] {OOM}")
    assert not found.phase_known
    assert (found.stage, found.blame) == (Stage.LAUNCH, Blame.CONFIGURATION)
    assert found.cause in (FailureCause.OOM_RUNTIME, FailureCause.OOM_PROFILE)
    assert found.advice[0].startswith("give the whole log")
    assert any(step.startswith("lower gpu-memory-utilization") for step in found.advice)
    assert found.advice[-1].startswith("if it happened while the weights were loading")


@pytest.mark.parametrize(
    ("frame", "cause", "stage"),
    [
        ("load_model", FailureCause.OOM_LOAD, Stage.LOADING),
        ("profile_run", FailureCause.OOM_PROFILE, Stage.PROFILING),
        ("capture_model", FailureCause.OOM_GRAPH_CAPTURE, Stage.GRAPH_CAPTURE),
    ],
)
def test_traceback_tells_the_phase_of_a_part(frame, cause, stage):
    stamp = "(EngineCore pid=1) ERROR 12-01 06:13:32 [core.py:1] "
    lines = ("Traceback (most recent call last):", f'  File "/x/vllm/a.py", line 1, in {frame}')
    found = diagnosed(*(stamp + line for line in (*lines, OOM)))
    assert (found.cause, found.stage, found.phase_known) == (cause, stage, True)


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
    found = diagnose([], 137)
    assert found.cause is FailureCause.HOST_OOM
    assert found.line.endswith("the log is empty and does not say")


@pytest.mark.parametrize("lines", [(START, LOADING), (START, READY)])
@pytest.mark.parametrize("exit_code", [-9, 137])
def test_kill_without_a_word_is_likely_and_not_surely_memory(lines, exit_code):
    found = diagnosed(*lines, exit_code=exit_code)
    assert (found.cause, found.blame) == (FailureCause.HOST_OOM, Blame.UNKNOWN)
    assert found.retry
    assert found.line.startswith(f"exit code {exit_code} (SIGKILL): likely")
    assert "OOMKilled" in found.advice[0]
    assert "liveness probe" in found.advice[1]
    assert "docker stop" in found.advice[1]


def test_kill_after_an_order_to_stop_is_no_failure():
    found = diagnosed(START, READY, "INFO:     Shutting down", exit_code=137)
    assert found.cause is FailureCause.NONE
    assert found.line.endswith("it was told to stop before exit code 137")


def test_kill_beside_an_exception_without_a_name_shows_both():
    found = diagnosed(START, LOADING, *TRACEBACK, exit_code=137)
    assert (found.cause, found.blame) == (FailureCause.HOST_OOM, Blame.UNKNOWN)
    assert found.line == TRACEBACK[-1]
    assert found.exit_note.startswith("exit code 137 (SIGKILL): likely")


@pytest.mark.parametrize("lines", [(START, LOADING), (START, READY)])
def test_exit_code_1_beside_no_failure_asks_for_the_whole_log(lines):
    found = diagnosed(*lines, exit_code=1)
    assert (found.cause, found.blame) == (FailureCause.UNKNOWN, Blame.UNKNOWN)
    assert found.line == "exit code 1, and no failure in this log: is it complete?"
    assert "complete" in found.advice[0]


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [(0, "; exit code 0 tells of none"), (143, "; exit code 143: somebody stopped it")],
)
def test_exit_code_of_a_healthy_server_is_told(exit_code, words):
    found = diagnosed(START, READY, exit_code=exit_code)
    assert found.cause is FailureCause.NONE
    assert found.line.endswith(words)


def test_order_to_stop_while_loading_is_told_first():
    found = diagnosed(START, LOADING, exit_code=143)
    assert found.line == "exit code 143: ended by SIGTERM; no failure in this log"
    assert found.advice[0].startswith("it was told to stop")


def test_exit_code_that_is_not_needed_is_told():
    found = diagnosed(START, LOADING, OOM, exit_code=137)
    assert found.exit_note == "exit code 137: not needed, the log says why"


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
    found = diagnose([f"{START}\n{LOADING}\n".encode(), long, late, OOM.encode()])
    assert found.cause is FailureCause.OOM_LOAD
    assert not any("from 2" in step for step in found.advice)


@pytest.mark.parametrize(
    ("line", "retry"),
    [
        ("OSError: We couldn't connect to 'https://huggingface.co' to load the files", True),
        ("OSError: org/nope is not a local folder and is not a valid model identifier", False),
    ],
)
def test_diagnose_says_of_a_retry_what_the_tuner_does(line, retry):
    raw = f"INFO 08-21 07:23:34 [__init__.py:1] vLLM API server version 0.32.0\n{line}\n"
    found = diagnose([raw.encode()], 1)
    assert (found.cause, found.retry) == (FailureCause.MODEL_NOT_FOUND, retry)
    failure = Failure(found.cause, found.stage, found.line, excerpt=found.excerpt)
    assert isinstance(decide(failure), Retry) is retry


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
    if found.cause is FailureCause.HOST_OOM:  # may be a guess
        assert found.blame in (Blame.CONFIGURATION, Blame.UNKNOWN)
    else:
        assert found.blame is found.cause.blame
    if found.cause not in (FailureCause.MODEL_NOT_FOUND, FailureCause.HOST_OOM):
        assert found.retry is found.cause.retry
    assert bool(found.advice) is (found.cause is not FailureCause.NONE)
