"""/metrics: vLLM 0.32's names and labels, in prometheus_client's text format.

Written by hand: the library would need a collector for the engine's counters, and importing it
takes longer than all else of a start.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.engine.simulated.counters import EngineCounters
from tuner.engine.simulated.memory_plan import MemoryPlan
from tuner.engine.simulated.settings import EngineSettings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's buckets (vllm/v1/metrics/buckets.py).
_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


def _token_buckets(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 and so on, up to the context."""
    series = (digit * 10.0**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(bound for bound in series if bound <= most)


MALFORMED = 'vllm:num_preemptions_total{engine="0",model_name= twelve\n'

Sample = tuple[str, Mapping[str, str], float]
"""Name, labels beside the common ones, value."""


class Histogram:
    """Counts of values by bucket."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Take the same value `count` times."""
        self._counts[bisect_left(self._buckets, value)] += count
        self._sum += value * count

    def samples(self, name: str) -> Iterator[Sample]:
        """As the page has them."""
        total = 0
        for bucket, count in zip((*self._buckets, float("inf")), self._counts, strict=True):
            total += count
            shown = "+Inf" if bucket == float("inf") else repr(bucket)
            yield f"{name}_bucket", {"le": shown}, float(total)
        yield f"{name}_count", {}, float(total)
        yield f"{name}_sum", {}, self._sum


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    kind: str
    text: str
    samples: tuple[Sample, ...]


class Metrics:
    """What the API process counts, and the page of that and of the engine's counters.

    Attributes:
        finished: requests by vLLM's `finished_reason`.
    """

    def __init__(self, model_name: str, settings: EngineSettings, plan: MemoryPlan) -> None:
        self.ttft_s = Histogram(_TTFT_BUCKETS_S)
        self.itl_s = Histogram(_ITL_BUCKETS_S)
        self.tpot_s = Histogram(_ITL_BUCKETS_S)
        self.e2e_s = Histogram(_E2E_BUCKETS_S)
        self.request_prompt_tokens = Histogram(_token_buckets(plan.max_model_len))
        self.request_generation_tokens = Histogram(_token_buckets(plan.max_model_len))
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._labels = {"engine": "0", "model_name": model_name}
        self._info = _cache_info(settings, plan)
        self._started_s = time.time()
        self._base = EngineCounters()

    def begin_again(self, counters: EngineCounters) -> None:
        """As if the server had been restarted now."""
        self._base, self._started_s = counters, time.time()

    def page(self, counters: EngineCounters, only: Collection[str] = ()) -> str:
        """The text; with `only` as prometheus_client restricts it to names of samples."""
        lines: list[str] = []
        for family in self._families(counters):
            samples = [s for s in family.samples if not only or s[0] in only]
            if not samples:
                continue
            name = f"{family.name}_total" if family.kind == "counter" else family.name
            lines += [f"# HELP {name} {family.text}", f"# TYPE {name} {family.kind}"]
            common = self._labels if family.name.startswith("vllm:") else {}
            lines += [_line(name, {**common, **more}, value) for name, more, value in samples]
        return "\n".join(lines) + "\n"

    def _families(self, now: EngineCounters) -> Iterator[_Family]:
        base = self._base
        yield _plain("process_start_time_seconds", "gauge", "Start time.", self._started_s)
        yield _plain("vllm:num_requests_running", "gauge", _RUNNING, now.running)
        yield _plain("vllm:num_requests_waiting", "gauge", _WAITING, now.waiting)
        yield _plain("vllm:kv_cache_usage_perc", "gauge", _USAGE, now.kv_usage)
        for name, attribute, text in _COUNTERS:
            value = getattr(now, attribute) - getattr(base, attribute)
            yield _plain(f"vllm:{name}", "counter", text, value)
        success = "vllm:request_success"
        reasons = tuple(
            (f"{success}_total", {"finished_reason": reason}, float(count))
            for reason, count in self.finished.items()
        )
        yield _Family(success, "counter", "Count of successfully processed requests.", reasons)
        tokens = "vllm:iteration_tokens_total"
        iterations = float(now.iterations - base.iterations)
        sums: tuple[Sample, ...] = (
            (f"{tokens}_bucket", {"le": "+Inf"}, iterations),
            (f"{tokens}_count", {}, iterations),
            (f"{tokens}_sum", {}, float(now.iteration_tokens - base.iteration_tokens)),
        )
        yield _Family(tokens, "histogram", "Number of tokens per engine step.", sums)
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "Time to first token.", self.ttft_s),
            ("vllm:inter_token_latency_seconds", "Inter-token latency.", self.itl_s),
            ("vllm:request_time_per_output_token_seconds", _TPOT, self.tpot_s),
            ("vllm:e2e_request_latency_seconds", "End to end latency.", self.e2e_s),
            ("vllm:request_prompt_tokens", _PROMPTS, self.request_prompt_tokens),
            ("vllm:request_generation_tokens", _ANSWERS, self.request_generation_tokens),
        ):
            yield _Family(name, "histogram", text, tuple(histogram.samples(name)))
        info = "vllm:cache_config_info"
        yield _Family(info, "gauge", "Information of the cache config.", ((info, self._info, 1.0),))


_RUNNING = "Number of requests in model execution batches."
_WAITING = "Number of requests waiting to be processed."
_TPOT = "Time per output token, of a request."
_PROMPTS = "Number of prefill tokens processed, of a request."
_ANSWERS = "Number of generation tokens processed, of a request."
_USAGE = "KV-cache usage. 1 means 100 percent usage."

_COUNTERS = (
    ("num_preemptions", "preemptions", "Cumulative number of preemption from the engine."),
    ("prompt_tokens", "prompt_tokens", "Number of prefill tokens processed."),
    ("generation_tokens", "generation_tokens", "Number of generation tokens processed."),
    ("prefix_cache_queries", "prefix_queries_tokens", "Prefix cache queries, in tokens."),
    ("prefix_cache_hits", "prefix_hits_tokens", "Prefix cache hits, in tokens."),
    ("external_prefix_cache_queries", "host_queries_tokens", "External queries, in tokens."),
    ("external_prefix_cache_hits", "host_hits_tokens", "External hits, in tokens."),
)


def _plain(name: str, kind: str, text: str, value: float) -> _Family:
    sample = f"{name}_total" if kind == "counter" else name
    return _Family(name, kind, text, ((sample, {}, float(value)),))


def _cache_info(settings: EngineSettings, plan: MemoryPlan) -> dict[str, str]:
    """The labels that `vllm:cache_config_info` has of what is simulated."""
    values = {
        "block_size": plan.block_size,
        "cache_dtype": settings.kv_cache_dtype,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_max_concurrency": plan.max_concurrency,
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "kv_cache_size_tokens": plan.kv_cache_tokens,
        "kv_offloading_size": settings.kv_offloading_gib or None,
        "num_gpu_blocks": plan.num_blocks,
        "num_gpu_blocks_override": settings.num_gpu_blocks_override,
    }
    return {name: str(value) for name, value in values.items()}


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in sorted(labels.items()))
    return f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
