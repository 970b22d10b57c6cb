"""Every log of the corpus, bare and as other programs show it; and what is no failure."""

from __future__ import annotations

from collections import Counter

import pytest
from log_corpus import CASES, CORPUS, WRAPPINGS, Case, expected, read, verdict

from tuner.engine.log_causes import classify
from tuner.engine.log_interest import is_dull_while_serving
from tuner.engine.log_lines import messages
from tuner.types import FailureCause, Stage


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_log_reader_reads_the_corpus(case: Case) -> None:
    assert verdict(case.text, case.exit_code) == expected(case)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_log_reader_reads_the_corpus_through(wrapping: str) -> None:
    change = WRAPPINGS[wrapping]
    wrong = {
        case.name: found
        for case in CASES
        if (found := verdict(change(case.text), case.exit_code)) != expected(case)
    }
    assert wrong == {}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_log_reader_reads_the_corpus_in_another_encoding(encoding: str) -> None:
    wrong = [
        case.name
        for case in CASES
        if verdict(case.text.encode(encoding), case.exit_code) != expected(case)
    ]
    assert wrong == []


def test_corpus_has_every_cause_and_age() -> None:
    assert {path.stem for path in CORPUS.glob("*.log")} == {case.name for case in CASES}
    causes = Counter(case.cause for case in CASES)
    assert set(causes) == {str(cause) for cause in FailureCause}
    assert min(causes.values()) >= 3
    minors = {int(c.vllm_version.split(".")[1]) for c in CASES if c.vllm_version}
    assert minors >= {4, 5, 6, 7, 8, 9, 10, 11, 13, 17, 21, 25, 29, 33}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_line_that_tells_something_is_dull(case: Case) -> None:
    for raw in case.text.splitlines():
        for line in messages(raw):
            found = classify(line.text, Stage.READY) if line.may_tell_of_failure else None
            if found is not None and found.also_serving:
                assert not is_dull_while_serving(raw), raw


def test_log_reader_shows_the_lines_round_an_unknown_failure() -> None:
    case = next(c for c in CASES if c.name == "unknown_0.8.5")
    _, failure = read(case.text, 1)
    assert failure is not None
    shown = failure.excerpt.splitlines()
    assert 10 < len(shown) <= 41
    assert any("EngineCore failed to start" in line for line in shown)
    assert "object has no attribute 'shape'" in failure.line


# --- what is no failure ----------------------------------------------------------------

STAMP = "(EngineCore_DP0 pid=7) {} 10-02 09:00:00 [x.py:1] "

HARMLESS = [
    "[Autotuner]: OOM detected, falling back to default tactic",
    "[AutoTuner]: Failed when profiling tactic 3: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "CUDA graphs can take additional 1~3 GiB memory per GPU. If you are running out of memory, "
    "consider decreasing `gpu_memory_utilization` or enforcing eager mode.",
    "If out-of-memory error occurs during cudagraph capture, consider decreasing "
    "`gpu_memory_utilization` or switching to eager mode.",
    "manual control of KV cache memory size. If OOM'ed, check the difference of initial free "
    "memory between the current run and the previous run",
    "Possibly too large swap space. 4.00 GiB out of the 7.75 GiB total CPU memory is allocated "
    "for the swap space.",
    "Token indices sequence length is longer than the specified maximum sequence length for this "
    "model (9000 > 8192). Running this sequence through the model will result in indexing errors",
    "Free memory on device (78.50/79.10 GiB) on startup. Desired GPU memory utilization is "
    "(0.9, 71.19 GiB). Actual usage is 14.27 GiB for weight, 1.41 GiB for peak activation",
    "Free memory on device cuda:0 (78.50/79.10 GiB) on startup. Desired GPU memory utilization is "
    "(0.92, 72.77 GiB).",
    "resource_tracker: There appear to be 2 leaked shared_memory objects to clean up at shutdown",
    "resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown",
    "WARNING: destroy_process_group() was not called before program exit, which can leak resources",
    "nanobind: leaked 3 instances!",
    "Found ulimit of 20000 and failed to automatically increase with error current limit exceeds "
    "maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`",
    "Sequence group chat-7e is preempted by PreemptionMode.RECOMPUTE mode because there is not "
    "enough KV cache space. total_num_cumulative_preemption=51",
    "Preemptions detected: 24. KV Cache size likely needs to be increased.",
    'INFO:     127.0.0.1:1 - "POST /v1/completions?CUDA%20out%20of%20memory HTTP/1.1" 400 Bad',
    "Received request cmpl-1: prompt: 'torch.OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 2.00 GiB', params: SamplingParams(n=1), prompt_token_ids: None.",
    "Received request cmpl-2: prompt: 'OOMKilled\\nTraceback (most recent call last):\\n  File "
    '"x.py", line 1, in f\\nRuntimeError: NCCL error\', params: SamplingParams(n=1)',
    "Generated response cmpl-1: output: 'No available memory for the cache blocks', finished",
    "RuntimeError: cancelled",
    "asyncio.exceptions.CancelledError",
    "GPU KV cache size: 25,638 tokens",
    "Available KV cache memory: 5.41 GiB",
    "non-default args: {'model': 'x', 'served_model_name': ['CUDA out of memory']}",
    "No available shared memory broadcast block found in 60 seconds. This typically happens when "
    "some processes are hanging or doing some time-consuming work (e.g. compilation).",
    "Waiting for 1 local, 0 remote core engine proc(s) to start.",
    "vLLM is using nccl==2.21.5",
    "NCCL version 2.21.5+cuda12.4",
    "Skipping tactic 4 because of: CUDA out of memory",
    "UserWarning: Overwriting previous error handler of the OOM callback",
    "[W1201 06:14:46.769733780 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy",
    "Defaulting to the slow tokenizer, which may fail with MemoryError on large inputs",
]


@pytest.mark.parametrize("line", HARMLESS)
@pytest.mark.parametrize("stamp", ["", STAMP.format("INFO"), STAMP.format("WARNING")])
@pytest.mark.parametrize("after", ["", "INFO:     Application startup complete.\n"])
def test_log_reader_leaves_harmless_lines_alone(line: str, stamp: str, after: str) -> None:
    _, failure = read(after + stamp + line + "\n")
    assert failure is None
    _, failure = read(after.join(["", stamp + line + "\n", "INFO:     Uvicorn running on x\n"]))
    assert failure is None
