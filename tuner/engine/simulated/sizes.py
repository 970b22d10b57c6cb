"""Sizes as vLLM and torch write them, and the numbers that a reader gets back from that."""

from __future__ import annotations

from tuner.units import GIB

_MIB = 2**20
_KIB = 2**10


def said_gib(size_bytes: float) -> float:
    """What vLLM's `format_gib` says: GiB with two digits."""
    return round(size_bytes / GIB, 2)


def torch_size(size_gib: float) -> str:
    """A size as torch's allocator says it: `232.00 MiB`, `1.25 GiB`."""
    size_bytes = size_gib * GIB
    if size_bytes <= _MIB:
        return f"{size_bytes / _KIB:.2f} KiB"
    if size_bytes <= GIB:
        return f"{size_bytes / _MIB:.2f} MiB"
    return f"{size_bytes / GIB:.2f} GiB"


def torch_gib(size_bytes: float) -> float:
    """The GiB that a reader takes from `torch_size`."""
    number, unit = torch_size(max(0.0, size_bytes) / GIB).split()
    return float(number) * {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}[unit]


def out_of_memory_numbers(
    tried_bytes: float, free_bytes: float, total_bytes: float
) -> dict[str, float]:
    """Of torch's message that an allocation failed, as `Failure.numbers` has them."""
    return {
        "tried_to_allocate_gib": torch_gib(tried_bytes),
        "total_gib": torch_gib(total_bytes),
        "free_gib": torch_gib(free_bytes),
    }
