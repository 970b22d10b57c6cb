"""What the user names: flags and environment variables with their values.

A value is JSON, with sizes as people write them: a text that is wholly a number with a unit
becomes the number that vLLM wants under that name, GiB for `kv-offloading-size`, `swap-space`,
`VLLM_CPU_KVCACHE_SPACE` and what ends in `-gb`, plain bytes or counts elsewhere. Values inside
lists and mappings, and other environment variables, are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.names import canonical, check_name, is_gib, reserved
from tuner.space import env_text
from tuner.spec.document import Document, Node, kind_of
from tuner.types import ENV_PREFIX, JsonValue
from tuner.units import parse_gib, parse_whole

SHARES = frozenset({"gpu-memory-utilization", "device-memory-utilization"})
"""Flags that take a share of a device's memory."""


def named(document: Document, section: Node, prefix: str = "") -> list[tuple[str, Node]]:
    """The entries of a section by canonical name, in the file's order.

    Args:
        prefix: put before each name; `env.` for the section `server.env`.

    Raises:
        InputError: not a name, or one that the user cannot set.
    """
    entries = []
    for written, node in section.items.items():
        name = prefix + written if prefix else canonical(written)
        try:
            check_name(name)
        except ValueError as error:
            hint = "Write it as for `vllm serve --config`, such as `max-num-seqs`."
            if name.startswith(ENV_PREFIX):
                hint = "Environment variables have letters, digits and `_` only."
            raise document.error(node, str(error), hint) from None
        if (reason := reserved(name)) is not None:
            raise document.error(node, f"`{name}` cannot be set here: {reason}", "Delete it.")
        entries.append((name, node))
    return entries


def fixed_arguments(document: Document, section: Node) -> dict[str, JsonValue]:
    """Values of `server.args` by canonical name; null, vLLM's default, is left out.

    Raises:
        InputError: a bad name or value, or a name that is written twice.
    """
    for written, node in section.items.items():
        if written.strip().startswith(ENV_PREFIX):
            variable = written.strip().removeprefix(ENV_PREFIX)
            message = f"`{written}` is no flag"
            raise document.error(node, message, f"Write `{variable}` under `server.env`.")
    values = reference_values(document, section)
    return {name: value for name, value in values.items() if value is not None}


def reference_values(document: Document, section: Node) -> dict[str, JsonValue]:
    """Values of `reference` by canonical name; null stands for vLLM's default.

    Raises:
        InputError: a bad name or value, or a name that is written twice.
    """
    values: dict[str, JsonValue] = {}
    lines: dict[str, int] = {}
    for written, node in named(document, section):
        value = read_value(document, written, node)
        refuse_percent(document, written, node, [value])
        name = positive_name(written, [value])
        refuse_twice(document, name, node, lines)
        values[name] = value if name == written or value is None else not value
    return values


def environment(document: Document, section: Node) -> dict[str, str]:
    """Values of `server.env`, as texts: true and false become 1 and 0.

    Raises:
        InputError: a bad name, or a value that is no text, number or boolean.
    """
    values: dict[str, str] = {}
    for name, node in named(document, section, ENV_PREFIX):
        if node.value is None:
            variable = name.removeprefix(ENV_PREFIX)
            raise document.error(
                node, f"`{variable}` has no value", 'Write one (`""` for an empty text).'
            )
        value = read_value(document, name, node)
        as_written = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        values[name.removeprefix(ENV_PREFIX)] = node.written if as_written else env_text(value)
    return values


def read_value(document: Document, name: str, node: Node) -> JsonValue:
    """The value of `node` as vLLM wants it under `name`.

    Raises:
        InputError: a size that is not whole, or a list or mapping for an environment variable.
    """
    value = node.plain()
    if name.startswith(ENV_PREFIX) and isinstance(value, list | dict):
        raise document.error(
            node,
            f"`{name}` must be a text or a number, not {kind_of(value)}",
            "Put JSON into quotes.",
        )
    if isinstance(value, str):
        if "\0" in value:
            raise document.error(node, f"`{name}` holds a NUL character", "Delete it.")
        try:
            return with_unit(name, value)
        except ValueError as error:
            raise document.error(node, f"`{name}`: {error}", "Write a whole number.") from None
    return value


def refuse_percent(document: Document, name: str, node: Node, values: Sequence[JsonValue]) -> None:
    """Refuse 80 where 0.80 is meant.

    Raises:
        InputError: `name` is a share of something, and one of `values` is above 1.
    """
    if name not in SHARES:
        return
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if not any(number > 1 for number in numbers):
        return
    meant = " to ".join(f"{number / 100 if number > 1 else number:.2f}" for number in numbers)
    hint = f"Write {meant}." if max(numbers) <= 100 else "Write a number of at most 1."
    shown = " to ".join(f"{number:g}" for number in numbers)
    raise document.error(node, f"`{name}` is a share, at most 1, not {shown}", hint)


def with_unit(name: str, text: str) -> int | float | str:
    """`text` as the number that vLLM wants under `name`; unchanged if it is no size.

    Raises:
        ValueError: a size that is not a whole number where it must be.
    """
    if is_gib(name):
        gib = parse_gib(text)
        return text if gib is None else gib
    if name.startswith(ENV_PREFIX):
        return text
    whole = parse_whole(text)
    return text if whole is None else whole


def positive_name(name: str, values: list[JsonValue]) -> str:
    """`enable-prefix-caching` for `no-enable-prefix-caching` with booleans (or null) only.

    The caller turns the values round where the name has changed.
    """
    switches = all(value is None or isinstance(value, bool) for value in values)
    return name.removeprefix("no-") if switches and name.startswith("no-") else name


def refuse_twice(document: Document, name: str, node: Node, lines: dict[str, int]) -> None:
    """Note that `name` stands at `node`, and refuse a second one.

    Raises:
        InputError: `name` is in `lines` already.
    """
    if name in lines:
        raise document.error(
            node,
            f"`{name}` is written twice (first in line {lines[name]}); hyphens and underscores "
            "are the same name, and `no-x` is `x` turned round",
            "Delete one of the two.",
        )
    lines[name] = node.line
