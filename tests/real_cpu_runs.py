"""What the real engine did: vLLM 0.32's CPU build with the tiny model of `real/prepare_vllm.py`.

On two shared cores, by `tuner.evaluate`'s own client; times are rough (other load on the
machine), counts repeat by one or two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from builders import measurement
from simulated_builders import flags, load

from tuner.engine.simulated.calibrate import CalibrationPoint
from tuner.types import EngineConfig, LengthSpec, Percentiles, WorkloadSpec

DECODES = load()
"""Short prompts, long answers, all at once."""
PROMPTS = load(48, prompt=LengthSpec(300, 60), output=LengthSpec(48), concurrency=24)
"""Long prompts, short answers."""


@dataclass(frozen=True)
class RealRun:
    """One configuration under one load.

    Attributes:
        kv: `kv-cache-memory-bytes`; seqs, length, tokens, dtype: `max-num-seqs`,
            `max-model-len`, `max-num-batched-tokens`, `kv-cache-dtype`.
        throughput: output tokens a second.
        ttft_s, tpot_ms: means.
    """

    workload: WorkloadSpec
    kv: str
    seqs: int
    length: int
    tokens: int
    dtype: str
    throughput: float
    preemptions: int
    ttft_s: float
    tpot_ms: float

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            flags(
                enforce_eager=True,
                block_size=32,
                kv_cache_memory_bytes=self.kv,
                max_num_seqs=self.seqs,
                max_model_len=self.length,
                max_num_batched_tokens=self.tokens,
                kv_cache_dtype=self.dtype,
            )
        )

    @property
    def point(self) -> CalibrationPoint:
        found = replace(
            measurement(throughput=self.throughput, preemptions=self.preemptions),
            ttft_s=_all_alike(self.ttft_s),
            tpot_s=_all_alike(self.tpot_ms / 1000),
        )
        return CalibrationPoint(self.config, self.workload, found)

    def __str__(self) -> str:
        kind = "decodes" if self.workload is DECODES else "prompts"
        return f"{kind}-{self.kv}-{self.seqs}-{self.length}-{self.tokens}-{self.dtype}"


def _all_alike(mean_s: float) -> Percentiles:
    return Percentiles(mean_s, mean_s, mean_s, mean_s)


RUNS = [
    RealRun(DECODES, "16M", 128, 512, 2048, "auto", 1590, 21, 0.350, 11.6),
    RealRun(DECODES, "16M", 16, 512, 2048, "auto", 1891, 3, 0.922, 6.3),
    RealRun(DECODES, "16M", 4, 512, 2048, "auto", 996, 0, 3.422, 3.3),
    RealRun(DECODES, "8M", 8, 512, 2048, "auto", 1279, 4, 1.974, 5.2),
    RealRun(DECODES, "8M", 16, 512, 2048, "auto", 1168, 51, 1.580, 9.6),
    RealRun(DECODES, "8M", 128, 512, 2048, "auto", 1165, 51, 1.365, 10.8),
    RealRun(DECODES, "32M", 32, 1024, 2048, "auto", 1839, 0, 0.393, 11.4),
    RealRun(DECODES, "64M", 64, 2048, 2048, "auto", 1801, 0, 0.416, 11.6),
    RealRun(DECODES, "4M", 16, 512, 2048, "auto", 678, 66, 3.585, 14.2),
    RealRun(DECODES, "16M", 16, 512, 64, "auto", 1572, 2, 1.041, 7.5),
    RealRun(DECODES, "16M", 32, 512, 128, "auto", 1710, 24, 0.237, 11.7),
    RealRun(DECODES, "16M", 32, 512, 2048, "fp8", 2190, 0, 0.380, 8.9),
    RealRun(DECODES, "32M", 8, 2048, 2048, "auto", 1339, 0, 1.878, 5.2),
    RealRun(PROMPTS, "16M", 32, 512, 2048, "auto", 575, 7, 1.080, 13.5),
    RealRun(PROMPTS, "16M", 32, 512, 128, "auto", 585, 2, 0.959, 16.2),
    RealRun(PROMPTS, "16M", 32, 512, 32, "auto", 498, 0, 1.444, 8.4),
    RealRun(PROMPTS, "8M", 32, 512, 512, "auto", 497, 7, 1.424, 9.4),
]
