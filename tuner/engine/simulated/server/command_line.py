"""`vllm serve`'s command line: an argparse parser with vLLM's flags, and what it says."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tuner.engine.flags import Flag, FlagKind
from tuner.engine.simulated.server.argument_words import prepared
from tuner.engine.simulated.server.value_types import type_of
from tuner.engine.simulated.server.vllm_flags import known_flags, option_strings
from tuner.types import JsonValue

_DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
"""vLLM's, where none is named."""


class RefusedArguments(Exception):
    """argparse refuses; its exit code is 2.

    Attributes:
        usage: what it prints before the message.
        line: `vllm: error: ...`.
    """

    def __init__(self, usage: str, line: str) -> None:
        super().__init__(line)
        self.usage = usage
        self.line = line


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """A parsed `vllm serve`.

    Attributes:
        args: every flag that was given, by its name with hyphens; None is vLLM's default.
    """

    model: str
    args: Mapping[str, JsonValue] = field(default_factory=dict)

    def value(self, name: str) -> JsonValue:
        """Of a flag: what was given, else its default."""
        given = self.args.get(name)
        return known_flags().flags[name].default if given is None else given

    @property
    def host(self) -> str:
        """Where to listen; all interfaces where it is not set, as vLLM does."""
        return str(self.value("host") or "0.0.0.0")

    @property
    def port(self) -> int:
        """Where to listen."""
        return int(str(self.value("port")))

    @property
    def served_names(self) -> tuple[str, ...]:
        """What requests may call the model; the first is the one that answers name."""
        names = self.value("served-model-name")
        return tuple(map(str, names)) if isinstance(names, list) and names else (self.model,)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """One of which requests must show; empty for none."""
        keys = self.value("api-key")
        return tuple(map(str, keys)) if isinstance(keys, list) else ()


def read_command(words: Sequence[str], *, version: str, help_text: str = "") -> ServeCommand:
    """Read the words after the program's name.

    Raises:
        RefusedArguments: argparse does not take them.
        UnreadableArguments: vLLM fails on them before argparse.
        SystemExit: `--help` or `--version`, after printing it.
    """
    top, flags = _parsers(version, help_text)
    parsed = vars(top.parse_args(prepared(words)))
    if parsed.pop("command", None) is None:
        top.print_help()
        raise SystemExit(0)
    model = parsed.pop("model_tag", None) or parsed.pop("model", None) or _DEFAULT_MODEL
    return ServeCommand(str(model), {flags[dest].name: value for dest, value in parsed.items()})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedArguments(self.format_usage(), f"{self.prog}: error: {message}")


def _parsers(version: str, help_text: str) -> tuple[argparse.ArgumentParser, dict[str, Flag]]:
    top = _Parser(
        prog="vllm",
        description=help_text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("-v", "--version", action="version", version=version)
    commands = top.add_subparsers(dest="command", required=False, parser_class=_Parser)
    serve = commands.add_parser(
        "serve",
        prog="vllm serve",
        usage="vllm serve [model_tag] [options]",
        argument_default=argparse.SUPPRESS,
    )
    serve.add_argument("model_tag", nargs="?", default=None)
    table = known_flags()
    for flag in table.flags.values():
        _add(serve, flag)
    return top, {flag.dest: flag for flag in table.flags.values()}


def _add(serve: argparse.ArgumentParser, flag: Flag) -> None:
    strings = option_strings(flag.name, flag.aliases)
    if flag.kind is FlagKind.BOOL:
        serve.add_argument(*strings, dest=flag.dest, action=argparse.BooleanOptionalAction)
    elif flag.kind is FlagKind.SWITCH:
        serve.add_argument(*strings, dest=flag.dest, action="store_true")
    elif flag.repeats:
        serve.add_argument(*strings, dest=flag.dest, action="append")
    else:
        serve.add_argument(
            *strings,
            dest=flag.dest,
            type=type_of(flag),
            choices=flag.choices,
            nargs=flag.nargs,
            const=True if flag.optional_value else None,
        )
