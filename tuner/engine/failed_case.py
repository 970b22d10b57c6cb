"""A failure beside the settings it came with, in the words that advice needs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tuner.types import EngineConfig, Failure, JsonValue

HIGHEST_UTILIZATION = 0.95
"""Above it, public reports of start-up and run-time memory failures outnumber the gains."""

_LOWEST_UTILIZATION = 0.5
"""Below it something else is wrong than the share of the device."""

_USUAL_STEP = 0.05
_LARGEST_STEP = 0.2
_EAGER = "enforce-eager"


@dataclass(frozen=True, slots=True)
class Case:
    """A failure, and the configuration where it is known."""

    failure: Failure
    config: EngineConfig | None = None

    @property
    def line(self) -> str:
        """The decisive line."""
        return self.failure.line

    def number(self, name: str) -> float | None:
        """A finite number of the decisive line."""
        value = self.failure.numbers.get(name)
        return value if value is not None and math.isfinite(value) else None

    def whole(self, name: str) -> int | None:
        """A number of the decisive line that counts something: 1 or more, and no nonsense."""
        value = self.number(name)
        return int(value) if value is not None and 1 <= value < 1e12 else None

    def setting(self, flag: str) -> JsonValue:
        """The value of a flag; None where it is not set or not known."""
        return self.config.args.get(flag) if self.config else None

    def amount(self, flag: str) -> float | None:
        """The value of a flag that is a number above 0."""
        value = self.setting(flag)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number and value > 0 else None  # type: ignore[arg-type, operator]

    def variable(self, name: str) -> str | None:
        """The value of an environment variable, where it is known to be set."""
        return (self.config.env.get(name) or None) if self.config else None

    @property
    def eager(self) -> bool:
        """Whether it is known to run without CUDA graphs."""
        return self.setting(_EAGER) is True

    @property
    def one_device(self) -> bool:
        """Whether it is known to use one device only."""
        sizes = (self.amount(f"{kind}-parallel-size") for kind in ("tensor", "pipeline", "data"))
        return self.config is not None and all(size is None or size <= 1 for size in sizes)

    def is_before(self, *release: int) -> bool:
        """Whether the server's vLLM is known to be older than this."""
        return self._release is not None and self._release < release

    def is_from(self, *release: int) -> bool:
        """Whether the server's vLLM is known to be this or newer."""
        return self._release is not None and self._release >= release

    @property
    def _release(self) -> tuple[int, int] | None:
        match = re.match(r"(\d{1,4})\.(\d{1,4})", self.failure.memory.vllm_version or "")
        return (int(match[1]), int(match[2])) if match else None

    @property
    def utilization(self) -> float | None:
        """The share of the device in effect, from the line or the configuration."""
        value = self.number("utilization") or self.amount("gpu-memory-utilization")
        return value if value is not None and value <= 1 else None


Rule: TypeAlias = Callable[[Case], Iterator[str]]


def more_memory(case: Case) -> Iterator[str]:
    """A larger KV cache out of the same device."""
    if size := case.setting("kv-cache-memory-bytes"):
        yield (
            f"raise kv-cache-memory-bytes above {size}: while it is set, it alone sizes the KV "
            "cache and gpu-memory-utilization has no effect"
        )
        return
    if space := case.variable("VLLM_CPU_KVCACHE_SPACE"):
        yield f"raise env.VLLM_CPU_KVCACHE_SPACE above {space} (GiB): it sizes the KV cache"
        return
    known = case.utilization
    if known is None:
        yield f"raise gpu-memory-utilization, to {HIGHEST_UTILIZATION} at most"
    elif known < HIGHEST_UTILIZATION:
        yield f"raise gpu-memory-utilization from {known:g}, to {HIGHEST_UTILIZATION} at most"


def less_memory(case: Case, *, reason: str = "", least: float = 0.01) -> Iterator[str]:
    """A smaller share of the device for weights and KV cache, so that the rest has room.

    Args:
        least: the smallest step down that makes sense.
    """
    reason = f": {reason}" if reason else ""
    if size := case.setting("kv-cache-memory-bytes"):
        yield f"lower kv-cache-memory-bytes below {size}{reason}"
        return
    step, known = _step_down(case, least), case.utilization
    if known is None:
        yield f"lower gpu-memory-utilization by {step:.2f}{reason}"
    elif known - step >= _LOWEST_UTILIZATION:
        yield f"lower gpu-memory-utilization from {known:g} to {known - step:.2f}{reason}"


def _step_down(case: Case, least: float) -> float:
    """What was missing as a share of the device, and one per cent of room."""
    tried, free = case.number("tried_to_allocate_gib"), case.number("free_gib")
    total = case.number("total_gib")
    if tried is None or not total or total <= 0:
        return max(_USUAL_STEP, least)
    missing = max(0.0, tried - (free or 0.0)) / total
    return min(_LARGEST_STEP, max(least, math.ceil(100 * missing) / 100 + 0.01))


def halved(case: Case, flag: str, reason: str, *, at_least: int = 1) -> Iterator[str]:
    """Half of a whole number; nothing where it is known to be as small as `at_least`."""
    known = case.amount(flag)
    if known is None:
        yield f"lower {flag}, by half: {reason}"
    elif known // 2 >= at_least:
        yield f"lower {flag} from {known:.0f} to {known // 2:.0f}: {reason}"


def raised(case: Case, flag: str, reason: str) -> Iterator[str]:
    """More devices."""
    known = case.amount(flag)
    yield f"raise {flag}{f' above {known:.0f}' if known else ''}: {reason}"


def without_graphs(case: Case, reason: str) -> Iterator[str]:
    """No CUDA graphs, unless that is so already."""
    if not case.eager:
        yield f"set {_EAGER}: {reason}"


def quoted(case: Case, pattern: str) -> str:
    """What a pattern's first group finds in the decisive line, shortened; else empty."""
    match = re.search(pattern, case.line)
    return match[1][:100] if match else ""
