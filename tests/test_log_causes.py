"""Which cause a line of the log names; lines from the sources and reports of vLLM 0.4 to 0.33."""

from __future__ import annotations

import pytest

from tuner.engine.log_causes import classify
from tuner.types import FailureCause

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 232.00 MiB. GPU 2 has a total "
    "capacity of 23.57 GiB of which 154.88 MiB is free. Including non-PyTorch memory, this process"
)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ValueError: No available memory for the cache blocks. Try", FailureCause.KV_NO_BLOCKS),
        (
            "RuntimeError: Failed to load model - not enough GPU memory. Try lowering",
            FailureCause.OOM_LOAD,
        ),
        ("ValueError: Cannot auto-fit max_model_len: not enough GPU", FailureCause.KV_TOO_SMALL),
        ("(1) The process is killed by SIGKILL by OOM killer", FailureCause.HOST_OOM),
        ("Killed", FailureCause.HOST_OOM),
        ("RuntimeError: Failed core proc(s): {'EngineCore': -9}", FailureCause.HOST_OOM),
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
            "allocate memory: you tried to allocate 3221225472 bytes. Error code 12",
            FailureCause.HOST_OOM,
        ),
        ("RuntimeError: NCCL error: unhandled system error (run with", FailureCause.NCCL),
        ("torch.distributed.DistBackendError: NCCL error in: /opt", FailureCause.NCCL),
        ("Error while creating shared memory segment /dev/shm/nccl-x", FailureCause.NCCL),
        ("RuntimeError: Failed to infer device type", FailureCause.DEVICE_BUSY),
        ("OSError: [Errno 98] Address already in use", FailureCause.PORT_IN_USE),
        (
            "[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): "
            "address already in use",
            FailureCause.PORT_IN_USE,
        ),
        ("OSError: [Errno 28] No space left on device", FailureCause.DISK_FULL),
        (
            "RuntimeError: Insufficient space in /dev/shm for the ring: 240 MiB required",
            FailureCause.DISK_FULL,
        ),
        (
            "huggingface_hub.errors.GatedRepoError: 401 Client Error.",
            FailureCause.MODEL_ACCESS,
        ),
        (
            "OSError: x is not a local folder and is not a valid model identifier listed on",
            FailureCause.MODEL_NOT_FOUND,
        ),
        (
            "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: 1)",
            FailureCause.MODEL_NOT_FOUND,
        ),
        (
            "vllm serve: error: argument --max-num-seqs: invalid int value: 'abc'",
            FailureCause.BAD_CONFIG,
        ),
        (
            "ValueError: Total number of attention heads (40) must be divisible by tensor parallel "
            "size (3).",
            FailureCause.BAD_CONFIG,
        ),
        (
            "ValueError: fp8_e5m2 kv-cache is not supported with fp8 checkpoints.",
            FailureCause.UNSUPPORTED,
        ),
        (
            "ValueError: The quantization method fp8 is not supported for the current GPU. Minimum",
            FailureCause.UNSUPPORTED,
        ),
        ("RuntimeError: vLLM failed to compile the model. The most", FailureCause.COMPILE_CACHE),
        ("RuntimeError: CUDA error: an illegal memory access was", FailureCause.CRASH),
        ("TimeoutError: RPC call to sample_tokens timed out.", FailureCause.HANG),
        (
            "AssertionError: Error in memory profiling. Initial free memory 78.2 GiB, current free "
            "memory 79.1 GiB.",
            FailureCause.MEMORY_BASELINE_MOVED,
        ),
    ],
)
def test_classify_names_the_cause(line: str, cause: FailureCause) -> None:
    found = classify(line)
    assert found is not None
    assert found.cause is cause


@pytest.mark.parametrize(
    ("line", "cause", "numbers"),
    [
        (
            "To serve at least one request with the models's max seq len (32768), (0.95 "
            "GiB KV cache is needed, which is larger than the available KV cache memory (0.93 "
            "GiB). Try increasing",
            FailureCause.KV_TOO_SMALL,
            {"max_model_len_tokens": 32768, "needed_gib": 0.95, "available_gib": 0.93},
        ),
        (
            "To serve at least one request with the models's max seq len (131072), (24.00 "
            "GB KV cache isneeded, which is larger than the available KV cache memory (3.18 GB).",
            FailureCause.KV_TOO_SMALL,
            {"max_model_len_tokens": 131072, "needed_gib": 24, "available_gib": 3.18},
        ),
        (
            "The model's max seq len (32768) is larger than the maximum number of tokens "
            "that can be stored in KV cache (7344). Try increasing",
            FailureCause.KV_TOO_SMALL,
            {"max_model_len_tokens": 32768, "estimated_max_model_len_tokens": 7344},
        ),
        (
            "RuntimeError: max_num_seqs (1024) exceeds available Mamba cache blocks (512). Each",
            FailureCause.STATE_BLOCKS,
            {"max_num_seqs": 1024, "available_blocks": 512, "max_num_seqs_limit": 512},
        ),
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy "
            "requests. Please try lowering",
            FailureCause.OOM_WARMUP,
            {"requests": 1024},
        ),
        (
            "Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU "
            "memory utilization (0.95, 45.01 GiB). Decrease",
            FailureCause.DEVICE_BUSY,
            {"free_gib": 31.44, "total_gib": 47.38, "utilization": 0.95, "wanted_gib": 45.01},
        ),
        (
            "ValueError: Free memory on device cuda:0 (78.57/79.15 GiB) on startup is less than "
            "desired GPU memory utilization (0.999, 79.07 GiB).",
            FailureCause.BAD_CONFIG,
            {
                "free_gib": 78.57,
                "total_gib": 79.15,
                "utilization": 0.999,
                "wanted_gib": 79.07,
                "device_index": 0,
            },
        ),
        (
            "Available memory on node 0 (11.11/12.46 GiB) on kv cache allocation is less "
            "than requested memory for kv (-0.36/0.25 GiB). Reduce CPU memory",
            FailureCause.KV_NO_BLOCKS,
            {"available_gib": 11.11, "total_gib": 12.46, "wanted_gib": -0.36},
        ),
        (
            OOM,
            FailureCause.OOM_LOAD,
            {
                "tried_to_allocate_gib": 232 / 1024,
                "device_index": 2,
                "total_gib": 23.57,
                "free_gib": 154.88 / 1024,
            },
        ),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 642.00 MiB. GPU",
            FailureCause.OOM_LOAD,
            {"tried_to_allocate_gib": 642 / 1024},
        ),
    ],
)
def test_classify_reads_the_numbers(
    line: str, cause: FailureCause, numbers: dict[str, float]
) -> None:
    found = classify(line)
    assert found is not None
    assert found.cause is cause
    assert dict(found.numbers) == pytest.approx(numbers)


@pytest.mark.parametrize(
    "line",
    [
        "[Autotuner]: OOM detected, falling back to default tactic",
        "CUDA graphs can take additional 1~3 GiB memory per GPU. If you are running out of memory,",
        "If out-of-memory error occurs during cudagraph capture, consider decreasing",
        "Possibly too large swap space. 4.00 GiB out of the 7.75 GiB total CPU memory",
        "Token indices sequence length is longer than the specified maximum",
        "Free memory on device (78.5/79.1 GiB) on startup. Desired GPU memory utilization is (0.9,",
        'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 400 Bad Request',
        "resource_tracker: There appear to be 2 leaked shared_memory objects to clean up",
        "destroy_process_group() was not called before program exit",
        "OSError: [Errno 24] Too many open files",
        "GPU KV cache size: 25,638 tokens",
    ],
)
def test_classify_leaves_harmless_lines_alone(line: str) -> None:
    assert classify(line) is None
