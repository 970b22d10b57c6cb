"""Holds a space file against the flags of the vLLM that will run it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from tuner.engine.arguments import (
    KV_OFFLOADING,
    KV_OFFLOADING_BACKEND,
    SWAP_SPACE,
    adapt,
    host_memory_flag,
    positive_name,
)
from tuner.engine.flags import Flag, FlagKind, FlagTable, value_problem
from tuner.errors import InputError
from tuner.types import ENV_PREFIX, Choice, FloatRange, JsonValue, Knob, StudySpec

_REPLACED = {
    "disable-log-requests": "It is `enable-log-requests: false` now, which is the default.",
    "num-scheduler-steps": "It was removed in vLLM 0.10.1.",
    "preemption-mode": "It went with the V0 engine; vLLM recomputes.",
    "use-v2-block-manager": "It went with the V0 engine.",
    "scheduler-delay-factor": "It went with the V0 engine.",
    "cuda-graph-sizes": "It is `cudagraph-capture-sizes` since vLLM 0.11.1.",
    "max-seq-len-to-capture": "See `max-cudagraph-capture-size`.",
    "max-num-partial-prefills": "It was removed in 2026.",
    "enable-reasoning": "`reasoning-parser` alone is enough.",
    "task": "It is `runner` and `convert` now.",
}
"""Flags that vLLM once had, and what became of them."""


def check_flags(spec: StudySpec, table: FlagTable) -> list[str]:
    """Check names and values of fixed, searched and reference flags.

    Returns:
        What is allowed but may not be meant, a sentence each.

    Raises:
        InputError: vLLM has no such flag, or it does not take the value.
    """
    for section, name, values in _settings(spec):
        if not name.startswith(ENV_PREFIX):
            _check_flag(spec, table, section, name, values)
    for knob in spec.search_space:
        if not knob.name.startswith(ENV_PREFIX):
            _check_range(spec, table, knob)
    # Refuses two names for one flag.
    adapt(
        {**spec.server.args, **_flags_only({knob.name: None for knob in spec.search_space})}, table
    )
    adapt({**spec.server.args, **_flags_only(spec.reference)}, table)
    return [*_unknown_variables(spec, table), *_deprecated(spec, table)]


def _settings(spec: StudySpec) -> Iterator[tuple[str, str, list[JsonValue]]]:
    """Section, name and values of everything that is set or searched."""
    for name, value in spec.server.args.items():
        yield "server.args", name, [value]
    for knob in spec.search_space:
        yield "search_space", knob.name, _values(knob)
    for name, value in spec.reference.items():
        yield "reference", name, [value]


def _flags_only(settings: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {n: value for n, value in settings.items() if not n.startswith(ENV_PREFIX)}


def _values(knob: Knob) -> list[JsonValue]:
    if isinstance(knob, Choice):
        return list(knob.choices)
    # Between two whole numbers 0.5 apart lies half of one: the ends alone would not show it.
    step = [knob.low + knob.step] if isinstance(knob, FloatRange) and knob.step else []
    return [knob.low, knob.high, *step]


# --- one flag --------------------------------------------------------------------------


def _check_flag(
    spec: StudySpec, table: FlagTable, section: str, name: str, values: list[JsonValue]
) -> None:
    head, dot, _ = name.partition(".")
    flag = _find(table, head)
    if flag is None:
        if _is_host_memory(head, values, table):
            return
        raise _unknown(spec, table, section, name)
    if dot:
        if flag.kind not in (FlagKind.JSON, FlagKind.ANY):
            raise InputError(
                f"{_place(spec, name)}{section}: `{flag.name}` has no keys, so that `{name}` "
                "cannot be set",
                f"Write `{flag.name}`.",
            )
        return
    for value in values:
        if problem := value_problem(flag, value):
            raise InputError(f"{_place(spec, name)}{section}: `{name}` {problem}")


def _find(table: FlagTable, head: str) -> Flag | None:
    flag = table.find(head)
    if flag is None and head.startswith("no-"):
        flag = table.find(positive_name(head, table))
        return flag if flag is not None and flag.kind is FlagKind.BOOL else None
    return flag


def _is_host_memory(head: str, values: list[JsonValue], table: FlagTable) -> bool:
    """Whether this vLLM has another flag for it; also true where it is only switched off."""
    if head == KV_OFFLOADING_BACKEND:
        return True
    if head not in (KV_OFFLOADING, SWAP_SPACE):
        return False
    return host_memory_flag(head, table) is not None or not any(values)


def _unknown(spec: StudySpec, table: FlagTable, section: str, name: str) -> InputError:
    head = name.partition(".")[0]
    message = f"{_place(spec, name)}{section}: vLLM {table.version} has no flag `{head}`"
    if head in (KV_OFFLOADING, SWAP_SPACE):
        other = SWAP_SPACE if head == KV_OFFLOADING else KV_OFFLOADING
        return InputError(f"{message}, nor `{other}`", f"Remove `{name}`.")
    if head in _REPLACED:
        return InputError(message, _REPLACED[head])
    close = table.suggest(head)
    if close:
        return InputError(message, f"Did you mean {' or '.join(f'`{c}`' for c in close)}?")
    return InputError(message, "`vllm serve --help=all` lists them.")


def _check_range(spec: StudySpec, table: FlagTable, knob: Knob) -> None:
    """A range needs a flag that takes numbers."""
    if isinstance(knob, Choice) or "." in knob.name:
        return
    flag = _find(table, knob.name)
    if flag is None:
        return
    place = f"{_place(spec, knob.name)}search_space: `{knob.name}`"
    if flag.kind in (FlagKind.BOOL, FlagKind.SWITCH):
        raise InputError(f"{place} is true or false", "Write [true, false].")
    whole = flag.kind in (FlagKind.INT, FlagKind.SIZE)
    if whole and isinstance(knob, FloatRange) and knob.step is None:
        raise InputError(f"{place} takes whole numbers", "Write low and high without a point.")
    if flag.choices is not None:
        raise InputError(f"{place} takes only certain values", "Write those to try as a list.")


# --- notices ---------------------------------------------------------------------------


def _unknown_variables(spec: StudySpec, table: FlagTable) -> Iterator[str]:
    """vLLM ignores a VLLM_ variable that it does not know, without a word."""
    if not table.env_names:
        return
    named: dict[str, None] = dict.fromkeys(spec.server.env)
    for _, name, _ in _settings(spec):
        if name.startswith(ENV_PREFIX):
            named[name.removeprefix(ENV_PREFIX)] = None
    for name in named:
        if name.startswith("VLLM_") and name not in table.env_names:
            close = difflib.get_close_matches(name, table.env_names, n=1, cutoff=0.8)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"vLLM {table.version} does not know the environment variable {name}{hint}"


def _deprecated(spec: StudySpec, table: FlagTable) -> Iterator[str]:
    for section, name, _ in _settings(spec):
        flag = None if name.startswith(ENV_PREFIX) else _find(table, name.partition(".")[0])
        if flag is not None and flag.deprecated:
            yield f"{section}: vLLM {table.version} calls `{flag.name}` deprecated"


# --- where -----------------------------------------------------------------------------


def _place(spec: StudySpec, name: str) -> str:
    """`FILE:LINE: ` of where `name` is a key; without the line if that cannot be told."""
    line = line_of(spec.text, name)
    return f"{spec.path}:{line}: " if line else f"{spec.path}: "


def line_of(text: str, name: str) -> int | None:
    """The line of a YAML text that has `name` for a key, in either spelling.

    None where it is there more than once or not at all.
    """
    spelled = "[-_]".join(re.escape(part) for part in re.split("[-_]", name))
    key = re.compile(rf"(?:^|[{{,\s])[\"']?(?:--)?{spelled}[\"']?\s*:(?:\s|$)")
    lines = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if not line.lstrip().startswith("#") and key.search(line.partition(" #")[0])
    ]
    return lines[0] if len(lines) == 1 else None
