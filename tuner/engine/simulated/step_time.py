"""How long a step takes: a roofline of its real work, and the host's overheads.

Per device, with `P` parameters that a token is multiplied with, `T` tokens in the step, and
context lengths `c` of its sequences:

- matrices: max(2 P T / FLOP rate, bytes of P / bandwidth);
- attention: max(4 layers heads head_size sum of pairs / FLOP rate, KV bytes read / bandwidth),
  separately for prefill and decode, whose kernels differ;
- all-reduce: 2 per layer of T x hidden values over the peer link, for tensor parallelism.

What the device does is compared with the time the host needs to launch it (no CUDA graph for
the step's size) and with what comes over the host link in the meantime: the slowest counts.
On top, `step_overhead_s` and `sequence_overhead_s` for scheduling and handling outputs.
"""

from __future__ import annotations

from tuner.engine.simulated.memory_needs import kv_bytes_per_token
from tuner.engine.simulated.scheduler import Batch
from tuner.engine.simulated.settings import EngineSettings

_GB = 1e9

_ALL_REDUCE_LATENCY_S = 12e-6
"""Of one all-reduce of a few KB over NVLink; NCCL's and vLLM's own kernels need some 10-15 us."""

_ALL_REDUCES_PER_LAYER = 2
"""After attention and after the feed-forward layer (Megatron's scheme)."""


class StepTimes:
    """Durations without noise, seconds."""

    def __init__(self, settings: EngineSettings) -> None:
        device, model = settings.device, settings.model
        ranks = settings.tensor_parallel_size
        rate, bandwidth = device.flops_per_s, device.bandwidth_gb_per_s * _GB
        head_matrix = model.vocab * model.hidden
        layer_matrices = model.matrix_parameters - head_matrix
        weights = model.matrix_parameters * model.dtype_bytes
        self._weights_s = weights / ranks / bandwidth
        self._flops_s_per_token = 2 * layer_matrices / ranks / rate
        self._flops_s_per_row = 2 * head_matrix / ranks / rate
        kv_bytes = kv_bytes_per_token(settings)
        self._kv_s_per_token = kv_bytes / bandwidth
        self._pair_s = 4 * model.layers * model.heads * model.head_size / ranks / rate
        self._attention_slope_s = max(self._pair_s, self._kv_s_per_token)  # when decoding
        self._reduce_s = 0.0
        self._reduce_s_per_token = 0.0
        if ranks > 1:
            count = _ALL_REDUCES_PER_LAYER * model.layers
            values = model.hidden * model.dtype_bytes * 2 * (ranks - 1) / ranks
            self._reduce_s = count * _ALL_REDUCE_LATENCY_S
            self._reduce_s_per_token = count * values / (device.peer_link_gb_per_s * _GB)
        self._launch_s = device.launch_overhead_s * model.layers
        self._largest_graph = max(settings.cudagraph_capture_sizes, default=0)
        self._link_s_per_block = kv_bytes * settings.block_size / (device.host_link_gb_per_s * _GB)
        self._step_overhead_s = device.step_overhead_s
        self._sequence_overhead_s = device.sequence_overhead_s

    def of(self, batch: Batch) -> float:
        """Duration of one step."""
        attention_s = self._attention_slope_s * batch.decode_context + max(
            batch.prefill_pairs * self._pair_s, batch.prefill_context * self._kv_s_per_token
        )
        return self._total_s(
            batch.tokens,
            len(batch.requests),
            attention_s,
            batch.link_blocks * self._link_s_per_block,
        )

    def of_decodes(self, requests: int, context: int, steps: int) -> list[float]:
        """Durations of `steps` steps in which each request gets one token.

        Args:
            context: tokens that the first step attends to; each further one has `requests` more.
        """
        host_s = self._launch_s if requests > self._largest_graph else 0.0
        overhead_s = self._overhead_s(requests)
        matrices_s = self._matrices_s(requests, requests)
        slope_s = self._attention_slope_s
        return [
            max(matrices_s + slope_s * read, host_s) + overhead_s
            for read in range(context, context + steps * requests, requests)
        ]

    def _total_s(self, tokens: int, requests: int, attention_s: float, link_s: float) -> float:
        device_s = self._matrices_s(tokens, requests) + attention_s
        host_s = self._launch_s if tokens > self._largest_graph else 0.0
        return max(device_s, host_s, link_s) + self._overhead_s(requests)

    def _matrices_s(self, tokens: int, requests: int) -> float:
        flops_s = tokens * self._flops_s_per_token + requests * self._flops_s_per_row
        reduce_s = self._reduce_s + tokens * self._reduce_s_per_token
        return max(flops_s, self._weights_s) + reduce_s

    def _overhead_s(self, requests: int) -> float:
        return self._step_overhead_s + requests * self._sequence_overhead_s
