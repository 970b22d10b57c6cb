"""The fixed sections of a space file as pydantic models.

Keys may be written with hyphens or underscores. Every validator raises through
`tuner.spec.problems.wrong`, so that a message reads "`workload.requests` must be ...".
What is named by the user (flags, environment, parameters) is not here but in
`tuner.spec.values` and `tuner.spec.knobs`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tuner.names import did_you_mean, is_study_name
from tuner.spec.document import kind_of
from tuner.spec.problems import wrong
from tuner.types import Metric, SamplerKind, WorkloadKind
from tuner.units import parse_duration, parse_whole

_E = TypeVar("_E", bound=StrEnum)


# --- values ----------------------------------------------------------------------------


def _whole(minimum: int, maximum: int = 2**53) -> Callable[[object], int]:
    def validate(value: object) -> int:
        try:
            number = parse_whole(value) if isinstance(value, str) else value
        except ValueError as error:
            raise wrong(f"must be a whole number: {error}") from None
        if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
            raise wrong(f"must be a whole number of at least {minimum}, not {kind_of(value)}")
        if number > maximum:
            raise wrong(f"must be at most {maximum}, not {kind_of(value)}")
        return number

    return validate


def _number(minimum: float, exclusive: bool) -> Callable[[object], float]:
    bound = f"greater than {minimum:g}" if exclusive else f"of at least {minimum:g}"

    def validate(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(f"must be a number {bound}, not {kind_of(value)}")
        if value < minimum or (exclusive and value == minimum):
            raise wrong(f"must be a number {bound}, not {kind_of(value)}")
        return float(value)

    return validate


def _duration(value: object) -> float:
    hint = "Write it like 90s, 15m, 4h or 1h30m; a plain number is seconds."
    if not isinstance(value, str | int | float):
        raise wrong(f"must be a duration, not {kind_of(value)}", hint)
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise wrong(f"must be a duration: {error}", hint) from None
    if seconds <= 0:
        raise wrong(f"must be longer than nothing, not {kind_of(value)}", hint)
    return seconds


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise wrong(f"must be a text, not {kind_of(value)}")
    if "\0" in value or "\n" in value:
        raise wrong("must be one line of text")
    return value.strip()


def _study(value: object) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not is_study_name(text):
        raise wrong(
            f"must name one folder, which {kind_of(value)} cannot",
            "Use letters, digits, `.`, `_` and `-`, and start with a letter or digit.",
        )
    return text


def _command(value: object) -> tuple[str, ...]:
    hint = "Write it as a list, such as `command: [vllm, serve]`."
    if isinstance(value, str):
        try:
            parts = ", ".join(shlex.split(value))
        except ValueError:
            parts = ""
        raise wrong("must be a list", f"Write `command: [{parts}]`." if parts else hint)
    if not isinstance(value, list) or not value:
        raise wrong(f"must be a list of words, not {kind_of(value or None)}", hint)
    for part in value:
        plain = isinstance(part, str | int | float) and not isinstance(part, bool)
        if not plain or not str(part) or "\0" in str(part):
            raise wrong(f"must hold words only, not {kind_of(part)}", hint)
    return tuple(str(part) for part in value)


def _one_of(kinds: type[_E]) -> Callable[[object], _E]:
    names = [kind.value for kind in kinds]

    def validate(value: object) -> _E:
        if isinstance(value, str) and value in names:
            return kinds(value)
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        raise wrong(f"must be one of {', '.join(names)}, not {kind_of(value)}", hint)

    return validate


def _named_values(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(f"must be a mapping, not {kind_of(value)}", "Write `name: value` lines.")
    return value


def _searched(value: object) -> dict[str, object]:
    if not (named := _named_values(value)):
        raise wrong(
            "is empty, there is nothing to search",
            "Write a parameter, such as `max-num-seqs: {low: 16, high: 512, log: true}`.",
        )
    return named


def _lines(value: object) -> list[object]:
    if isinstance(value, list):
        return value
    hint = "Write a list: each constraint on its own line after `- `."
    raise wrong(f"must be a list of expressions, not {kind_of(value)}", hint)


Whole = Annotated[int, BeforeValidator(_whole(1))]
WholeOrZero = Annotated[int, BeforeValidator(_whole(0))]
Positive = Annotated[float, BeforeValidator(_number(0, exclusive=True))]
NotNegative = Annotated[float, BeforeValidator(_number(0, exclusive=False))]
Duration = Annotated[float, BeforeValidator(_duration)]
Text = Annotated[str, BeforeValidator(_text)]
NamedValues = Annotated[dict[str, object], BeforeValidator(_named_values)]


# --- sections --------------------------------------------------------------------------


class Section(BaseModel):
    """A mapping with known keys; a key without a value counts as not written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    needs_value: ClassVar[frozenset[str]] = frozenset()
    """Optional keys that may not stand there empty."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, value: object) -> object:
        if isinstance(value, Section):
            return value
        known = list(cls.model_fields)
        if not isinstance(value, dict):
            example = ", ".join(f"{key}: …" for key in known[:3])
            raise wrong(f"must be a mapping, not {kind_of(value)}", f"Write `{{{example}}}`.")
        kept: dict[str, object] = {}
        for written, entry in value.items():
            key = str(written).replace("-", "_")
            if key not in known:
                hint = did_you_mean(key, known) or f"Known keys here: {', '.join(known)}."
                raise wrong("is an unknown key", hint, at=str(written))
            if key in kept:
                raise wrong("is written twice", "Delete one of the two.", at=str(written))
            kept[key] = entry
        return {
            key: entry for key, entry in kept.items() if entry is not None or key in cls.needs_value
        }


class ServerSection(Section):
    """`server:`"""

    model: Text
    command: Annotated[tuple[str, ...], BeforeValidator(_command)] = ("vllm", "serve")
    args: NamedValues = Field(default_factory=dict)
    env: NamedValues = Field(default_factory=dict)
    startup_timeout: Duration = 15 * 60.0


class LengthSection(Section):
    """`input_tokens:` and `output_tokens:`; a plain number is a fixed length."""

    mean: Positive
    stdev: NotNegative = 0.0
    min: Whole = 1
    max: Whole | None = None

    @model_validator(mode="before")
    @classmethod
    def _fixed(cls, value: object) -> object:
        if isinstance(value, dict):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise wrong(
                f"must be a number of tokens or a mapping, not {kind_of(value)}",
                "Write `512`, or `{mean: 512, stdev: 128, min: 16, max: 2048}`.",
            )
        return {"mean": _whole(1)(value)}

    @model_validator(mode="after")
    def _ordered(self) -> LengthSection:
        if self.max is not None and self.max < self.min:
            raise wrong(f"must be at least min ({self.min}), not {self.max}", at="max")
        above = self.max is not None and self.mean > self.max
        if above or self.mean < self.min:
            raise wrong(f"must lie between min and max, not {self.mean}", at="mean")
        return self


MOST_REQUESTS = 1_000_000
"""Prompts are kept in memory for a whole study; a million short ones take gigabytes."""

MOST_IN_FLIGHT = 20_000
"""Beyond this one client has no ports left on its own address."""


class WorkloadSection(Section):
    """`workload:`"""

    kind: Annotated[WorkloadKind, BeforeValidator(_one_of(WorkloadKind))]
    path: Text | None = None
    input_tokens: LengthSection | None = None
    output_tokens: LengthSection | None = None
    requests: Annotated[int, BeforeValidator(_whole(1, MOST_REQUESTS))]
    concurrency: Annotated[int, BeforeValidator(_whole(1, MOST_IN_FLIGHT))] | None = None
    request_rate: Positive | None = None
    burstiness: Positive | None = None
    warmup: Annotated[int, BeforeValidator(_whole(0, MOST_REQUESTS))] | None = None
    request_timeout: Duration = 10 * 60.0
    seed: WholeOrZero = 0

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadSection:
        if self.kind is WorkloadKind.SHAREGPT:
            if self.path is None:
                raise wrong("of kind sharegpt needs a file", "Write `path: ./sharegpt.json`.")
            if self.input_tokens is not None:
                raise wrong(
                    "is for kind synthetic; prompts of sharegpt come from the file",
                    "Delete it.",
                    at="input_tokens",
                )
            return self
        if self.path is not None:
            raise wrong("is for kind sharegpt only", "Delete it.", at="path")
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) is None:
                raise wrong(
                    f"of kind synthetic needs `{name}`",
                    f"Write `{name}: {{mean: 256, stdev: 64}}`.",
                )
        return self

    @model_validator(mode="after")
    def _one_loop(self) -> WorkloadSection:
        hint = "Write `concurrency: 32` (closed loop) or `request_rate: 4` (arrivals per second)."
        if self.concurrency is None and self.request_rate is None:
            raise wrong("needs concurrency or request_rate", hint)
        if self.concurrency is not None and self.request_rate is not None:
            raise wrong("has both concurrency and request_rate", f"Delete one. {hint}")
        if self.burstiness is not None and self.request_rate is None:
            raise wrong("only shapes a request_rate", "Delete it.", at="burstiness")
        return self


class ObjectiveSection(Section):
    """`objective:`"""

    maximize: Annotated[Metric, BeforeValidator(_one_of(Metric))] = Metric.OUTPUT_THROUGHPUT
    preemption_weight: NotNegative = 1.0


class BudgetSection(Section):
    """`budget:`"""

    trials: Whole | None = None
    time: Duration | None = None

    @model_validator(mode="before")
    @classmethod
    def _something(cls, value: object) -> object:
        empty = value is None or (
            isinstance(value, dict) and all(entry is None for entry in value.values())
        )
        if empty:
            raise wrong("allows nothing", "Write `budget: {trials: 30, time: 4h}`, or one of them.")
        return value


class SearchSection(Section):
    """`search:`"""

    sampler: Annotated[SamplerKind, BeforeValidator(_one_of(SamplerKind))] = SamplerKind.AUTO
    seed: Annotated[int, BeforeValidator(_whole(0, 2**32 - 1))] = 0


class SpaceFile(Section):
    """The whole file."""

    needs_value: ClassVar[frozenset[str]] = frozenset({"budget", "search_space"})

    study: Annotated[str, BeforeValidator(_study)] | None = None
    server: ServerSection
    search_space: Annotated[dict[str, object], BeforeValidator(_searched)]
    constraints: Annotated[list[object], BeforeValidator(_lines)] = Field(default_factory=list)
    reference: NamedValues = Field(default_factory=dict)
    workload: WorkloadSection
    objective: ObjectiveSection = ObjectiveSection()
    budget: BudgetSection = BudgetSection(trials=30)
    search: SearchSection = SearchSection()
