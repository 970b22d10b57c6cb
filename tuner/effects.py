"""Parameters that were accepted and changed nothing, as far as that is certain.

vLLM takes many settings without a word that another setting, the device or the model then
overrides. Three things give it away: the values that its own configuration check resolves, the
sizes that the server tells, and another trial that differs in nothing else. Where none of them
is proof, nothing is claimed: that two values measured alike may be chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tuner.records import TrialRecord
from tuner.types import EngineConfig, JsonValue, MemoryFacts
from tuner.units import GIB, parse_whole

_UTILIZATION = "gpu-memory-utilization"
_KV_BYTES = "kv-cache-memory-bytes"
_KV_BLOCKS = "num-gpu-blocks-override"
_KV_DTYPE = "kv-cache-dtype"
_CONTEXT = "max-model-len"
_CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""GiB of KV cache on vLLM's CPU build, where it goes before `kv-cache-memory-bytes`; read
nowhere else."""

_SAID_GIB = 0.011
"""vLLM says sizes in GiB with two decimals."""
_SIZE_SHARE = 0.05
"""Sizes further apart are not the same: whole blocks take less than that."""


@dataclass(frozen=True, slots=True)
class NoEffect:
    """One parameter of one trial that changed nothing.

    Attributes:
        parameter: a flag, or `env.NAME`.
        why: the same for all values, such as "kv-cache-memory-bytes sizes the KV cache".
        text: a sentence with this trial's values.
    """

    parameter: str
    why: str
    text: str

    @property
    def key(self) -> tuple[str, str]:
        """Equal for what need not be told twice."""
        return self.parameter, self.why


def no_effects(trial: TrialRecord, trials: Iterable[TrialRecord]) -> list[NoEffect]:
    """What had no effect in `trial`.

    Args:
        trials: of the same study, to compare with; `trial` itself may be among them.
    """
    if trial.config is None:
        return []
    found = [*_overridden(trial.config, trial.effective)]
    if trial.outcome is not None:
        memory = trial.outcome.memory
        told = {effect.parameter for effect in found}
        found += [e for e in _context(trial.config, memory) if e.parameter not in told]
        found += _sizes(trial.config, memory)
        found += _dtype(trial, trials)
    else:
        found += _sizes(trial.config, MemoryFacts())
    return found


# --- what vLLM's configuration check resolves --------------------------------------------


def _overridden(config: EngineConfig, effective: Mapping[str, JsonValue]) -> Iterator[NoEffect]:
    for name, asked in config.args.items():
        if name not in effective or _leaves_it_to_vllm(asked):
            continue
        resolved = effective[name]
        if not _same(asked, resolved):
            yield NoEffect(
                name,
                "vLLM takes a value of its own instead",
                f"{name}={_shown(asked)} has no effect: vLLM takes {_shown(resolved)} instead",
            )


def _leaves_it_to_vllm(asked: JsonValue) -> bool:
    return asked is None or asked == -1 or asked in ("auto", "-1")


def _same(asked: JsonValue, resolved: JsonValue) -> bool:
    one, other = _plain(asked), _plain(resolved)
    if not one and not other:  # 0, false, nothing: off
        return True
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9)
    if isinstance(one, str) and isinstance(other, str):
        return other.startswith(one) or one.startswith(other)  # fp8 is fp8_e4m3
    if isinstance(one, list) and isinstance(other, list):
        return bool(other)  # vLLM sorts and cuts lists; only an empty one is another
    # Of other lists and mappings nothing can be told.
    return isinstance(one, list | dict) or isinstance(other, list | dict)


_SPELLINGS = {"half": "float16", "float": "float32"}


def _plain(value: JsonValue) -> JsonValue:
    """A value as vLLM understands it: `8K` is a number, `half` is float16."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    try:
        whole = parse_whole(value)
        return float(text) if whole is None else whole
    except ValueError:
        return _SPELLINGS.get(text, text)


# --- what the server tells ---------------------------------------------------------------


def _context(config: EngineConfig, memory: MemoryFacts) -> Iterator[NoEffect]:
    asked, serves = config.args.get(_CONTEXT), memory.max_model_len_tokens
    if serves is None or _leaves_it_to_vllm(asked) or _same(asked, serves):
        return
    yield NoEffect(
        _CONTEXT,
        "the server serves another length",
        f"{_CONTEXT}={_shown(asked)} has no effect: the server serves {serves} tokens",
    )


def _sizes(config: EngineConfig, memory: MemoryFacts) -> Iterator[NoEffect]:
    """Of the settings that give the KV cache its size, those that another one overrides."""
    given = [*_given_sizes(config)]
    told_gib, asked_gib = memory.kv_cache_gib, _bytes_gib(config)
    space, space_gib = f"env.{_CPU_SPACE}", _cpu_space_gib(config)
    if space_gib and told_gib is not None:
        met = _same_size(space_gib, told_gib)
        if met and not (asked_gib is not None and _same_size(asked_gib, told_gib)):
            given.insert(0, space)
        elif not met:
            yield NoEffect(
                space,
                "it does not size the KV cache here",
                f"{space}={space_gib:g} has no effect: the KV cache has {told_gib:.2f} GiB",
            )
    sizing = given[0] if given else None
    for name in given[1:]:
        value = _shown(config.args[name])
        yield NoEffect(
            name,
            f"{sizing} sizes the KV cache instead",
            f"{name}={value} does not size the KV cache: {sizing} does",
        )
    unmet = asked_gib is not None and told_gib is not None and not _same_size(asked_gib, told_gib)
    if sizing == _KV_BYTES and unmet:
        yield NoEffect(
            _KV_BYTES,
            "the KV cache has another size",
            f"{_KV_BYTES}={_shown(config.args[_KV_BYTES])} ({asked_gib:.2f} GiB) has no effect: "
            f"the KV cache has {told_gib:.2f} GiB",
        )


def _given_sizes(config: EngineConfig) -> Iterator[str]:
    """Settings of the size that are set, the one that vLLM follows first."""
    for name in (_KV_BLOCKS, _KV_BYTES, _UTILIZATION):
        if config.args.get(name) is not None:
            yield name


def _bytes_gib(config: EngineConfig) -> float | None:
    value = _plain(config.args.get(_KV_BYTES))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) / GIB if is_number else None  # type: ignore[arg-type]


def _same_size(one_gib: float, other_gib: float) -> bool:
    return math.isclose(one_gib, other_gib, rel_tol=_SIZE_SHARE, abs_tol=_SAID_GIB)


def _cpu_space_gib(config: EngineConfig) -> float | None:
    """What the environment gives the CPU build; None where something else may go before it."""
    shared = config.args.get("tensor-parallel-size") not in (None, 1)
    if shared or config.args.get(_KV_BLOCKS) is not None:
        return None
    try:
        return float(config.env.get(_CPU_SPACE, ""))
    except ValueError:
        return None


# --- what another trial shows --------------------------------------------------------------

_SCHEDULING = frozenset(
    {
        "async-scheduling",
        "enable-chunked-prefill",
        "long-prefill-token-threshold",
        "max-num-active-seqs",
        "max-num-batched-tokens",
        "max-num-seqs",
        "scheduling-policy",
        "stream-interval",
        "watermark",
    }
)
"""What does not say how many tokens a GiB of KV cache holds."""

_BITS = {"fp8": 8, "int8": 8, "nvfp4": 4, "int4": 4}
_USUAL_BITS = 16


def _dtype(trial: TrialRecord, trials: Iterable[TrialRecord]) -> Iterator[NoEffect]:
    """A KV cache of narrower values that holds no more tokens in as much memory."""
    bits = _kv_bits(trial)
    if bits is None or bits >= _USUAL_BITS or trial.config is None:
        return
    size = _kv_size(trial)
    for other in trials:
        if size is None or _kv_size(other) != size or other.config is None:
            continue
        other_bits = _kv_bits(other)
        if other_bits is None or other_bits <= bits or not _alike(trial.config, other.config):
            continue
        asked = _shown(trial.config.args[_KV_DTYPE])
        yield NoEffect(
            _KV_DTYPE,
            "narrower values save no KV cache memory",
            f"{_KV_DTYPE}={asked} has no effect: the KV cache holds {size[0]} tokens in "
            f"{size[1]:.2f} GiB, as with {_shown(other.config.args.get(_KV_DTYPE, 'auto'))} "
            f"(trial {other.number})",
        )
        return


def _kv_size(trial: TrialRecord) -> tuple[int, float] | None:
    """Tokens and GiB, where the server told both."""
    memory = trial.outcome.memory if trial.outcome is not None else MemoryFacts()
    if not memory.kv_cache_tokens or not memory.kv_cache_gib:
        return None
    return memory.kv_cache_tokens, memory.kv_cache_gib


def _kv_bits(trial: TrialRecord) -> int | None:
    """Of a value in the KV cache as it was asked for; None where that is not known."""
    asked = trial.config.args.get(_KV_DTYPE) if trial.config is not None else None
    name = str(trial.effective.get(_KV_DTYPE) or "auto") if asked is None else str(asked)
    if name in ("auto", "float16", "bfloat16"):
        return _USUAL_BITS
    return next((bits for start, bits in _BITS.items() if name.startswith(start)), None)


def _alike(one: EngineConfig, other: EngineConfig) -> bool:
    """Whether both hold as many tokens in a GiB, but for the type of the KV cache."""
    return _storing(one) == _storing(other) and dict(one.env) == dict(other.env)


def _storing(config: EngineConfig) -> dict[str, JsonValue]:
    passed = {*_SCHEDULING, _KV_DTYPE, _KV_BYTES, _UTILIZATION}
    return {n: v for n, v in config.args.items() if n not in passed and v is not None}


def _shown(value: JsonValue) -> str:
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else str(value)
