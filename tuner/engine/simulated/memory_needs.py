"""What weights, activations, CUDA graphs and the KV cache take on one device, in bytes."""

from __future__ import annotations

from tuner.engine.simulated.settings import EngineSettings
from tuner.units import GIB

_LOGITS_BYTES = 10
"""Of one vocabulary entry of one sequence while sampling: the logit as the model's 16 bits,
as float32, and its probability as float32."""

_GRAPH_BYTES_PER_LAYER = 0.2 * 2**20
"""Of one captured size. Assumed; it makes half a GiB of 51 sizes and 32 layers, as vLLM's
`Graph capturing finished ..., took` says of 8 B models."""

_GRAPH_ESTIMATE_SHARE = 0.9
"""What the estimate from a few trial captures finds of what capturing takes in the end: since
0.21 the estimate is taken off the budget, and starts still ran out of memory by a few MiB
while capturing (vLLM pull request 57595)."""

_LIBRARY_BYTES = 0.1 * GIB
"""Workspaces of cuBLAS and attention kernels, allocated beside torch. Assumed."""

_COLLECTIVES_BYTES = 0.25 * GIB
"""NCCL's and the custom all-reduce's buffers. Assumed."""


def kv_bytes_per_token(settings: EngineSettings) -> int:
    """KV cache of one token over all layers; a rank has at least one KV head."""
    model = settings.model
    heads = max(1, model.kv_heads // settings.tensor_parallel_size)
    vector = round(model.head_size * settings.kv_dtype_bytes) + settings.kv_scale_bytes
    return 2 * model.layers * heads * vector


def weight_bytes(settings: EngineSettings) -> int:
    """This device's share of the model; vLLM splits embeddings and all matrices."""
    model = settings.model
    return model.parameters * model.dtype_bytes // settings.tensor_parallel_size


def forward_bytes(settings: EngineSettings, tokens: int) -> int:
    """Peak of a forward pass: residual and hidden state, and the widest layer's tensors.

    That is the gated feed-forward layer (gate, up, product) or the attention (queries, keys,
    values, output).
    """
    model, ranks = settings.model, settings.tensor_parallel_size
    attention = (2 * model.heads + 2 * model.kv_heads) * model.head_size // ranks
    feed_forward = 3 * model.intermediate // ranks
    return tokens * (2 * model.hidden + max(attention, feed_forward)) * model.dtype_bytes


def sampler_bytes(settings: EngineSettings, sequences: int) -> int:
    """Peak of sampling one token for each sequence; every rank has all logits."""
    return sequences * settings.model.vocab * _LOGITS_BYTES


def profile_sequences(settings: EngineSettings) -> int:
    """How many sequences the profile run and the sampler's warm-up pretend to have."""
    return min(settings.max_num_seqs, settings.max_num_batched_tokens)


def activation_bytes(settings: EngineSettings) -> int:
    """Peak of the profile run: the forward pass of a full batch, then sampling.

    The last hidden states outlive the forward pass.
    """
    tokens = settings.max_num_batched_tokens
    kept = tokens * settings.model.hidden * settings.model.dtype_bytes
    return max(
        forward_bytes(settings, tokens),
        kept + sampler_bytes(settings, profile_sequences(settings)),
    )


def graph_bytes(settings: EngineSettings) -> int:
    """What capturing takes: something for each size and layer, and the largest size's tensors."""
    sizes = settings.cudagraph_capture_sizes
    if not sizes:
        return 0
    graphs = len(sizes) * settings.model.layers * _GRAPH_BYTES_PER_LAYER
    return int(graphs) + forward_bytes(settings, max(sizes))


def graph_estimate_bytes(settings: EngineSettings) -> int:
    """What vLLM takes off the budget for CUDA graphs before it captures them."""
    return int(graph_bytes(settings) * _GRAPH_ESTIMATE_SHARE) if settings.estimate_graphs else 0


def context_bytes(settings: EngineSettings) -> int:
    """What is gone before vLLM looks at the free memory: the context, and NCCL's buffers."""
    collectives = _COLLECTIVES_BYTES if settings.tensor_parallel_size > 1 else 0.0
    return int(settings.device.context_gib * GIB + collectives)


def library_bytes() -> int:
    """What the profile run finds to be allocated beside torch."""
    return int(_LIBRARY_BYTES)
