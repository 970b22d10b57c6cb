"""Searched parameters and what they make: a server's configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

JsonValue: TypeAlias = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None

ENV_PREFIX = "env."
"""A searched or reference name `env.X` is the server's environment variable X."""


@dataclass(frozen=True, slots=True)
class IntRange:
    """Integers `low..high`, both included. `step` is 1 where `log` is set."""

    name: str
    low: int
    high: int
    step: int = 1
    log: bool = False


@dataclass(frozen=True, slots=True)
class FloatRange:
    """Real numbers `low..high`; with `step`, the grid `low + k·step`."""

    name: str
    low: float
    high: float
    step: float | None = None
    log: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the listed JSON values; `None` means "leave it at vLLM's default"."""

    name: str
    choices: tuple[JsonValue, ...]


Knob: TypeAlias = IntRange | FloatRange | Choice
"""One searched parameter. `name` is a flag with hyphens (`max-num-seqs`) or `env.NAME`."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What is set on a vLLM server beyond its fixed start: flags and environment.

    Attributes:
        args: flags by hyphenated name, values as JSON; a flag that is not named stays at
            vLLM's default. Holds the fixed and the searched ones.
        env: environment variables, values as vLLM reads them.
    """

    args: Mapping[str, JsonValue]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Twelve hex digits that are equal exactly for equal configurations."""
        text = json.dumps([dict(self.args), dict(self.env)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A configuration the search wants to see run.

    Attributes:
        number: Optuna's trial number.
        params: the searched parameters as the space file names and spells them. For the
            reference only those that it sets.
        config: what the server is started with.
        is_reference: whether this is what runs today (or vLLM's own default).
    """

    number: int
    params: Mapping[str, JsonValue]
    config: EngineConfig
    is_reference: bool = False
