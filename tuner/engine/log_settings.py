"""What a server was started with, as the beginning of its log tells.

vLLM lists what differs from its defaults (`non-default args: {...}`); before 0.9 it lists
everything (`args: Namespace(...)`). Only what advice asks for is read, by name; nothing is
evaluated.
"""

from __future__ import annotations

import re

from tuner.types import EngineConfig, JsonValue

HEAD_BYTES = 1 << 20
"""So much of a log is looked at: the settings are among the first lines."""

_MARK = re.compile(r"non-default args: ?\{|\bargs: Namespace\(")
_LONGEST = 16384

_FLAGS = (
    "cpu_offload_gb",
    "data_parallel_size",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "kv_offloading_size",
    "max_cudagraph_capture_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "pipeline_parallel_size",
    "quantization",
    "swap_space",
    "tensor_parallel_size",
)
_SETTING = re.compile(
    rf"(?<![\w.])['\"]?({'|'.join(_FLAGS)})['\"]?(?:=|: )"
    r"(?:(True|False|None)\b|'([\w.-]{1,40})'|(-?\d{1,15}(?:\.\d{1,9})?)(?![\w.]))"
)


def settings_of(head: bytes) -> EngineConfig | None:
    """Flags of the first start in a log; None where it does not list them.

    Args:
        head: the beginning of the log, `HEAD_BYTES` of it.
    """
    text = head.decode("utf-8", "replace")
    mark = _MARK.search(text)
    if mark is None:
        return None
    listed, _, _ = text[mark.end() : mark.end() + _LONGEST].partition("\n")
    args: dict[str, JsonValue] = {}
    for match in _SETTING.finditer(listed):
        if match[2] != "None":
            args.setdefault(match[1].replace("_", "-"), _value(match))
    return EngineConfig(args)


def _value(match: re.Match[str]) -> JsonValue:
    _, word, text, number = match.groups()
    if word is not None:
        return bool(word == "True")
    if text is not None:
        return str(text)
    return float(number) if "." in number else int(number)
