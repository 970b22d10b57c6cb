"""Messages without their prefixes, and the facts in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engine.log_lines import clean
from tuner.engine.logs import LogReader
from tuner.types import MemoryFacts


def read(*lines: str) -> LogReader:
    reader = LogReader()
    reader.feed("\n".join(lines) + "\n")
    return reader


@pytest.mark.parametrize(
    ("raw", "text", "level"),
    [
        ("INFO 08-21 07:23:34 gpu_executor.py:122] # GPU blocks: 7", "# GPU blocks: 7", "INFO"),
        ("ERROR 04-30 10:20:35 [core.py:396] boom", "boom", "ERROR"),
        ("(EngineCore_DP0 pid=1) INFO 01-02 03:04:05 [v1/engine/core.py:1] x", "x", "INFO"),
        ("(VllmWorker rank=7 pid=1) ERROR 01-02 03:04:05 [w.py:1]   File", "  File", "ERROR"),
        ("(Worker_TP0_EP0 pid=3) x", "x", ""),
        ("(RayWorkerWrapper pid=3, ip=10.0.0.1) x", "x", ""),
        ("(VllmWorkerProcess pid=3) ERROR 01-02 03:04:05 w.py:1] x", "x", "ERROR"),
        ("[rank0]: Traceback (most recent call last):", "Traceback (most recent call last):", ""),
        ("[rank0]:   File", "  File", ""),
        ("vllm-1  | INFO 01-02 03:04:05 [w.py:1] x", "x", "INFO"),
        ("2025-05-16T13:08:58.09Z INFO 01-02 03:04:05 [w.py:1] x", "x", "INFO"),
        ("2025-05-16T13:08:58.097+02:00 stderr F x", "x", ""),
        (
            "INFO 2025-05-16T13:08:58Z [resource.labels.containerName: vllm] "
            "ERROR 01-02 03:04:05 [w.py:1] x",
            "x",
            "ERROR",
        ),
        ("\x1b[1;36m(APIServer pid=1)\x1b[0;0m INFO:     Started server", "Started server", "INFO"),
        ("[Error] (Process) (EngineCore pid=3043) ERROR 01-02 03:04:05 [w.py:1] x", "x", "ERROR"),
        ("│ x", "x", ""),
        ("plain text | with a bar", "plain text | with a bar", ""),
    ],
)
def test_clean_takes_off_what_stands_before_a_message(raw: str, text: str, level: str) -> None:
    line = clean(raw)
    assert (line.text, line.level) == (text, level)


@given(st.text())
def test_clean_never_fails(raw: str) -> None:
    clean(raw)


@pytest.mark.parametrize(
    ("lines", "facts"),
    [
        (
            [
                "INFO 04-30 10:20:35 [api_server.py:1034] vLLM API server version 0.8.5",
                "Model loading took 14.24 GB and 3.2 seconds",
                "Available KV cache memory: 57.50 GiB",
                "GPU KV cache size: 1,076,864 tokens",
                "Maximum concurrency for 32,768 tokens per request: 32.86x",
                "Graph capturing finished in 17 secs, took 0.55 GiB",
            ],
            MemoryFacts(
                vllm_version="0.8.5",
                weights_gib=14.24,
                kv_cache_gib=57.5,
                kv_cache_tokens=1_076_864,
                max_concurrency=32.86,
                max_model_len_tokens=32_768,
                graph_gib=0.55,
            ),
        ),
        (
            [
                "Initializing an LLM engine (v0.6.3.post1) with config: model='x'",
                "Loading model weights took 7.5122 GB",
                "the rest of the memory reserved for KV Cache is 3.25GiB.",
                "Maximum concurrency for 2048 tokens per request: 11.10x",
                "Graph capturing finished in 20 secs.",
            ],
            MemoryFacts(
                vllm_version="0.6.3.post1",
                weights_gib=7.5122,
                kv_cache_gib=3.25,
                max_concurrency=11.1,
                max_model_len_tokens=2048,
            ),
        ),
        (
            [
                "Model loading took 35.1 GiB memory and 9.1 seconds",
                "Model loading took 35.3 GiB memory and 9.2 seconds",
                "Available KV cache memory: -0.19 GiB",
                "Available KV cache memory: 1.20 GiB",
                "Auto-fit max_model_len: reduced from 8192 to 3968 to fit in available KV cache",
                "Graph capturing finished in 3 secs, took -0.19 GiB",
            ],
            MemoryFacts(
                weights_gib=35.3, kv_cache_gib=-0.19, max_model_len_tokens=3968, graph_gib=-0.19
            ),
        ),
        (
            ["XPU KV cache size: 512 tokens, Maximum concurrency for 256 tokens per request: 2.0x"],
            MemoryFacts(kv_cache_tokens=512, max_concurrency=2.0, max_model_len_tokens=256),
        ),
    ],
)
def test_log_reader_collects_memory_facts(lines: list[str], facts: MemoryFacts) -> None:
    assert read(*lines).memory == facts
