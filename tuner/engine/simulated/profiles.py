"""Devices and models that the simulated engine can be.

Datasheets give peaks; what a model's layers reach of them is `_FLOPS_REACHED` and
`_BANDWIDTH_REACHED`. A real machine replaces the guesses by a fit: `calibrate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tuner.errors import InputError


class Platform(StrEnum):
    """What vLLM was built for: some defaults, checks and wordings depend on it."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device; tensor parallelism uses several equal ones.

    Attributes:
        count: how many of them the machine has.
        total_gib: memory as the driver reports it.
        free_gib: of it, free when the server starts.
        bandwidth_gb_per_s: effective, 10^9 bytes a second.
        flops_per_s: effective, dense 16-bit matrix products.
        host_link_gb_per_s: host to device, one direction, effective.
        peer_link_gb_per_s: device to device, for tensor parallelism's all-reduce.
        host_gib: memory of the host, of which a KV tier may take a part.
        context_gib: driver context and communication buffers that no allocator sees.
        step_overhead_s: host work of one engine step, whatever is in it.
        sequence_overhead_s: host work of one sequence in one step.
        launch_overhead_s: host time to launch one model layer without a CUDA graph.
        front_latency_s: from a client's send to the engine's queue.
        step_noise: standard deviation of a step's duration, relative.
        launch_noise: standard deviation between launches, relative.
    """

    name: str
    platform: Platform
    count: int
    total_gib: float
    free_gib: float
    bandwidth_gb_per_s: float
    flops_per_s: float
    host_link_gb_per_s: float
    peer_link_gb_per_s: float
    host_gib: float
    context_gib: float
    step_overhead_s: float
    sequence_overhead_s: float
    launch_overhead_s: float
    front_latency_s: float
    step_noise: float
    launch_noise: float


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A dense decoder with grouped-query attention and a gated feed-forward layer.

    Attributes:
        parameters: all of them, embeddings included; a tied embedding counts once.
        heads, kv_heads: of the attention; `head_size` is the width of one.
        dtype_bytes: of a weight, and of a KV value where `kv-cache-dtype` is `auto`.
        max_position_embeddings: the longest context, vLLM's derived `max-model-len`.
    """

    name: str
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    intermediate: int
    vocab: int
    dtype_bytes: int
    max_position_embeddings: int

    @property
    def matrix_parameters(self) -> int:
        """Those that a token is multiplied with: all but a look-up of the embedding.

        The output matrix is one of them, also where it is the embedding itself (tied).
        """
        embedding = self.vocab * self.hidden
        layers = self.layers * (
            self.hidden * (self.heads + 2 * self.kv_heads) * self.head_size
            + self.heads * self.head_size * self.hidden
            + 3 * self.hidden * self.intermediate
        )
        return layers + embedding


# --- devices ---------------------------------------------------------------------------

_FLOPS_REACHED = 0.6
"""Of the dense bf16 peak, over all layers of a prefill. An 8192^3 bf16 product on an H200 was
measured at 0.78-0.81 of it; the smaller products, norms and gaps of a model cost the rest."""

_BANDWIDTH_REACHED = 0.85
"""Of the peak, over all layers of a decode step; a plain copy on an H200 was measured at 0.90."""

_PCIE4_GB_PER_S = 25.0
"""PCIe 4.0 x16: 31.5 GB/s a direction by the standard, some 25 with its packet overhead."""

_PCIE5_GB_PER_S = 50.0
"""PCIe 5.0 x16: twice that."""

_NVLINK4_GB_PER_S = 450.0 * 0.7
"""Hopper datasheets: 900 GB/s both ways together; all-reduce reaches some 0.7 of one way."""

# Host times are of the order of what vLLM's V1 engine shows in public profiles with
# asynchronous scheduling: fractions of a millisecond a step, microseconds a sequence; some
# 60 us to launch the kernels of a layer without a graph.
_GPU_STEP_OVERHEAD_S = 0.6e-3
_GPU_SEQUENCE_OVERHEAD_S = 6e-6
_GPU_LAUNCH_OVERHEAD_S = 60e-6
_GPU_FRONT_LATENCY_S = 1.5e-3
_GPU_STEP_NOISE = 0.03
_GPU_LAUNCH_NOISE = 0.01

_CONTEXT_GIB = 0.45
"""A CUDA context with its modules: 0.3 to 0.6 GiB before the first tensor."""

_A10 = DeviceProfile(
    name="a10-24g",
    platform=Platform.CUDA,
    count=4,
    # A10 datasheet: 24 GB GDDR6 (here 24 GiB less the sixteenth that inline ECC takes),
    # 600 GB/s, 125 TFLOP/s dense bf16, PCIe 4.0 x16.
    total_gib=22.5,
    free_gib=22.5,
    bandwidth_gb_per_s=600.0 * _BANDWIDTH_REACHED,
    flops_per_s=125e12 * _FLOPS_REACHED,
    host_link_gb_per_s=_PCIE4_GB_PER_S,
    peer_link_gb_per_s=_PCIE4_GB_PER_S * 0.7,
    host_gib=180.0,
    context_gib=_CONTEXT_GIB,
    step_overhead_s=_GPU_STEP_OVERHEAD_S,
    sequence_overhead_s=_GPU_SEQUENCE_OVERHEAD_S,
    launch_overhead_s=_GPU_LAUNCH_OVERHEAD_S,
    front_latency_s=_GPU_FRONT_LATENCY_S,
    step_noise=_GPU_STEP_NOISE,
    launch_noise=_GPU_LAUNCH_NOISE,
)

_H100 = DeviceProfile(
    name="h100-80g",
    platform=Platform.CUDA,
    count=8,
    # H100 SXM datasheet: 80 GB HBM3, 3.35 TB/s, 989 TFLOP/s dense bf16, NVLink, PCIe 5.0.
    # Total as in vLLM's own message in a public report (ovg-project/kvcached#29).
    total_gib=79.15,
    free_gib=79.15,
    bandwidth_gb_per_s=3350.0 * _BANDWIDTH_REACHED,
    flops_per_s=989e12 * _FLOPS_REACHED,
    host_link_gb_per_s=_PCIE5_GB_PER_S,
    peer_link_gb_per_s=_NVLINK4_GB_PER_S,
    host_gib=1024.0,
    context_gib=_CONTEXT_GIB,
    step_overhead_s=_GPU_STEP_OVERHEAD_S,
    sequence_overhead_s=_GPU_SEQUENCE_OVERHEAD_S,
    launch_overhead_s=_GPU_LAUNCH_OVERHEAD_S,
    front_latency_s=_GPU_FRONT_LATENCY_S,
    step_noise=_GPU_STEP_NOISE,
    launch_noise=_GPU_LAUNCH_NOISE,
)

_H200 = DeviceProfile(
    name="h200-141g",
    platform=Platform.CUDA,
    count=8,
    # H200 SXM datasheet: 141 GB HBM3e, 4.8 TB/s, else an H100. nvidia-smi reports
    # 143771 MiB (140.4 GiB), of which a process sees some 0.6 GiB less.
    total_gib=139.8,
    free_gib=139.8,
    bandwidth_gb_per_s=4800.0 * _BANDWIDTH_REACHED,
    flops_per_s=989e12 * _FLOPS_REACHED,
    host_link_gb_per_s=_PCIE5_GB_PER_S,
    peer_link_gb_per_s=_NVLINK4_GB_PER_S,
    host_gib=1536.0,
    context_gib=_CONTEXT_GIB,
    step_overhead_s=_GPU_STEP_OVERHEAD_S,
    sequence_overhead_s=_GPU_SEQUENCE_OVERHEAD_S,
    launch_overhead_s=_GPU_LAUNCH_OVERHEAD_S,
    front_latency_s=_GPU_FRONT_LATENCY_S,
    step_noise=_GPU_STEP_NOISE,
    launch_noise=_GPU_LAUNCH_NOISE,
)

_CPU = DeviceProfile(
    name="cpu",
    platform=Platform.CPU,
    count=1,
    # Two cores of a shared x86 server with vLLM 0.32's CPU build and the tiny model. Memory as
    # its log told (`cpu_worker.py`); speeds fitted to what was measured there: some 100 tokens/s
    # for one request, 800 for 16 at once, 2,300 of a prompt. Another hour, or machine, has twice
    # that: `calibrate`.
    total_gib=10.6,
    free_gib=9.25,
    bandwidth_gb_per_s=12.0,
    flops_per_s=160e9,
    host_link_gb_per_s=10.0,
    peer_link_gb_per_s=10.0,
    host_gib=10.6,
    context_gib=0.61,  # the worker process: Python, torch, vLLM
    step_overhead_s=3.0e-3,
    sequence_overhead_s=0.2e-3,
    launch_overhead_s=0.0,
    front_latency_s=3.0e-3,
    step_noise=0.05,
    launch_noise=0.04,
)

DEVICES: dict[str, DeviceProfile] = {device.name: device for device in (_A10, _H100, _H200, _CPU)}
"""By name: `a10-24g`, `h100-80g`, `h200-141g`, `cpu`."""

# --- models ----------------------------------------------------------------------------

# Shapes: each model's config.json. Parameters: the checkpoints' own counts; the tests
# compare them with `matrix_parameters`.
_MODELS = (
    ModelProfile(
        name="qwen2.5-1.5b",
        parameters=1_543_714_304,
        layers=28,
        heads=12,
        kv_heads=2,
        head_size=128,
        hidden=1536,
        intermediate=8960,
        vocab=151_936,
        dtype_bytes=2,
        max_position_embeddings=32_768,
    ),
    ModelProfile(
        name="llama-3.1-8b",
        parameters=8_030_261_248,
        layers=32,
        heads=32,
        kv_heads=8,
        head_size=128,
        hidden=4096,
        intermediate=14_336,
        vocab=128_256,
        dtype_bytes=2,
        max_position_embeddings=131_072,
    ),
    ModelProfile(
        name="llama-3.1-70b",
        parameters=70_553_706_496,
        layers=80,
        heads=64,
        kv_heads=8,
        head_size=128,
        hidden=8192,
        intermediate=28_672,
        vocab=128_256,
        dtype_bytes=2,
        max_position_embeddings=131_072,
    ),
    ModelProfile(
        # The random-weight model of the real-engine tests: 4,096 bytes of KV cache a token.
        name="tiny",
        parameters=35_660_800,
        layers=2,
        heads=16,
        kv_heads=8,
        head_size=64,
        hidden=1024,
        intermediate=4096,
        vocab=2048,
        dtype_bytes=2,
        max_position_embeddings=8192,
    ),
)

MODELS: dict[str, ModelProfile] = {model.name: model for model in _MODELS}
"""By name: `qwen2.5-1.5b`, `llama-3.1-8b`, `llama-3.1-70b`, `tiny`."""


def device_named(name: str) -> DeviceProfile:
    """The device of that name.

    Raises:
        InputError: there is none.
    """
    try:
        return DEVICES[name]
    except KeyError:
        raise InputError(
            f"There is no simulated device `{name}`.", f"Choose one of {', '.join(DEVICES)}."
        ) from None


def model_named(name: str) -> ModelProfile:
    """The model of that name; a folder or hub id counts by its last part, in any case.

    So `meta-llama/Llama-3.1-70B-Instruct` is `llama-3.1-70b`, `./models/tiny` is `tiny`.

    Raises:
        InputError: there is none.
    """
    short = name.rstrip("/").rpartition("/")[2].lower().removesuffix("-instruct")
    if short not in MODELS:
        raise InputError(
            f"There is no simulated model like `{name}`.", f"Choose one of {', '.join(MODELS)}."
        )
    return MODELS[short]
