"""Flag tables for tests: excerpts of a recent and an old vLLM's."""

from __future__ import annotations

from tuner.engine.flags import Flag, FlagKind, FlagTable
from tuner.types import JsonValue


def flag(
    name: str,
    kind: FlagKind,
    *aliases: str,
    default: JsonValue = None,
    choices: tuple[JsonValue, ...] | None = None,
    nargs: str | int | None = None,
    optional_value: bool = False,
    repeats: bool = False,
) -> Flag:
    return Flag(
        name=name,
        dest=name.replace("-", "_"),
        aliases=aliases,
        kind=kind,
        default=default,
        choices=choices,
        nargs=nargs,
        optional_value=optional_value,
        repeats=repeats,
    )


def table(version: str, *flags: Flag, env_names: tuple[str, ...] = ()) -> FlagTable:
    return FlagTable(version, {flag.name: flag for flag in flags}, frozenset(env_names))


_BOTH = (
    flag("max-num-seqs", FlagKind.INT),
    flag("gpu-memory-utilization", FlagKind.FLOAT, "device-memory-utilization", default=0.92),
    flag("kv-cache-dtype", FlagKind.STR, default="auto", choices=("auto", "fp8", "fp8_e4m3")),
    flag("tensor-parallel-size", FlagKind.INT, "tp", default=1),
    flag("enforce-eager", FlagKind.BOOL, default=False),
    flag("enable-prefix-caching", FlagKind.BOOL),
    flag("headless", FlagKind.SWITCH, default=False),
    flag("compilation-config", FlagKind.JSON, "cc"),
    flag("lora-modules", FlagKind.STR, nargs="+"),
    flag("middleware", FlagKind.STR, repeats=True),
    flag("max-lora-rank", FlagKind.INT, choices=(1, 8, 16), default=16),
)

MODERN = table(
    "0.32.0",
    *_BOTH,
    flag("max-num-batched-tokens", FlagKind.SIZE),
    flag("max-model-len", FlagKind.SIZE),
    flag("kv-cache-memory-bytes", FlagKind.SIZE),
    flag("kv-offloading-size", FlagKind.FLOAT),
    flag("kv-offloading-backend", FlagKind.STR, default="native", choices=("native", "lmcache")),
    flag("cudagraph-capture-sizes", FlagKind.INT, nargs="+"),
    flag("hf-token", FlagKind.STR, nargs="?", optional_value=True),
    flag("hf-overrides", FlagKind.ANY),
    flag("allowed-origins", FlagKind.JSON),
    flag("disable-uvicorn-access-log", FlagKind.BOOL, default=False),
    env_names=("VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL"),
)
"""Like vLLM 0.32."""

OLD = table(
    "0.10.2",
    *_BOTH,
    flag("max-num-batched-tokens", FlagKind.INT),
    flag("max-model-len", FlagKind.INT),
    flag("swap-space", FlagKind.FLOAT, default=4),
)
"""Like vLLM 0.10."""
