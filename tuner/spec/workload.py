"""`workload:` of a space file as pydantic models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, model_validator

from tuner.spec import fields
from tuner.spec.document import kind_of
from tuner.spec.fields import Duration, Section, Text, Whole, WholeOrZero
from tuner.spec.lengths import LengthSection
from tuner.spec.problems import wrong
from tuner.types import ArrivalKind, SharedPrefixSpec, WorkloadKind, WorkloadSpec

MOST_REQUESTS = 1_000_000
"""Prompts are kept in memory for a whole study; a million short ones take gigabytes."""

MOST_IN_FLIGHT = 20_000
"""Beyond this one client has no ports left on its own address."""

MOST_LEVELS = 20
MOST_TURNS = 1_000
LARGEST_FACTOR = 1e6

DEFAULT_WARMUP = 8
"""Warm-up requests: the first ones after a start are slower by a second, more add little."""

_PLAIN = frozenset({WorkloadKind.SYNTHETIC, WorkloadKind.LIKE_SERVER})
_WITHOUT_TIMES = _PLAIN | {
    WorkloadKind.SHAREGPT,
    WorkloadKind.CUSTOM,
    WorkloadKind.OPENAI_BATCH,
}
_LOOP_HINT = "Write `concurrency: 32` (closed loop) or `request_rate: 4` (arrivals per second)."
_GONE = "Delete it."

_N = TypeVar("_N", int, float)


def _levels(value: object) -> list[object]:
    """One load, or a list of different ones."""
    levels = value if isinstance(value, list) else [value]
    if not levels or len(levels) > MOST_LEVELS:
        raise wrong(f"must be a number or a list of 1 to {MOST_LEVELS}, not of {len(levels)}")
    return levels


def _different(levels: tuple[_N, ...]) -> tuple[_N, ...]:
    if len(set(levels)) < len(levels):
        raise wrong("has a level twice", "Delete one of the two.")
    return levels


def _concurrencies(value: object) -> tuple[int, ...]:
    return _different(tuple(fields.whole(1, MOST_IN_FLIGHT)(level) for level in _levels(value)))


def _rates(value: object) -> tuple[float, ...]:
    positive = fields.number(0, exclusive=True, maximum=LARGEST_FACTOR)
    return _different(tuple(positive(level) for level in _levels(value)))


def _url(value: object) -> str:
    hint = "Write the address of its page of metrics: `url: http://127.0.0.1:8000/metrics`."
    address = fields.text(value)
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known or any(character.isspace() for character in address):
        raise wrong(f"must be an http:// address, not {kind_of(value)}", hint)
    if parts.username is not None or parts.password is not None:
        raise wrong("must not hold a name or password: it is kept with the study", hint)
    return address


Concurrencies = Annotated[tuple[int, ...], BeforeValidator(_concurrencies)]
Rates = Annotated[tuple[float, ...], BeforeValidator(_rates)]
Factor = Annotated[float, BeforeValidator(fields.number(0, exclusive=True, maximum=LARGEST_FACTOR))]
Requests = Annotated[int, BeforeValidator(fields.whole(1, MOST_REQUESTS))]


class SharedPrefixSection(Section):
    """`shared_prefix:`"""

    tokens: Whole
    groups: Requests = 1


class ScaleSection(Section):
    """`scale:`; a plain number is for both."""

    input: Factor = 1.0
    output: Factor = 1.0

    @model_validator(mode="before")
    @classmethod
    def _both(cls, value: object) -> object:
        if isinstance(value, dict):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(
                f"must be a number or a mapping, not {kind_of(value)}",
                "Write `0.5`, or `{input: 0.25, output: 0.5}`.",
            )
        return {"input": value, "output": value}


class WorkloadSection(Section):
    """`workload:`"""

    kind: Annotated[WorkloadKind, BeforeValidator(fields.one_of(WorkloadKind))]
    path: Text | None = None
    url: Annotated[str, BeforeValidator(_url)] | None = None
    input_tokens: LengthSection | None = None
    output_tokens: LengthSection | None = None
    shared_prefix: SharedPrefixSection | None = None
    turns: Annotated[int, BeforeValidator(fields.whole(1, MOST_TURNS))] = 1
    scale: ScaleSection | None = None
    max_input_tokens: Whole | None = None
    max_output_tokens: Whole | None = None
    requests: Requests
    concurrency: Concurrencies | None = None
    request_rate: Rates | None = None
    arrivals: Annotated[ArrivalKind, BeforeValidator(fields.one_of(ArrivalKind))] | None = None
    burstiness: Factor | None = None
    ramp_to: Factor | None = None
    speedup: Factor | None = None
    warmup: Annotated[int, BeforeValidator(fields.whole(0, MOST_REQUESTS))] | None = None
    request_timeout: Duration = 10 * 60.0
    seed: WholeOrZero = 0

    @property
    def has_levels(self) -> bool:
        """Whether there is more than one load."""
        return len(self.concurrency or self.request_rate or ()) > 1

    # --- checks ------------------------------------------------------------------------

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadSection:
        if self.kind is WorkloadKind.SYNTHETIC:
            self._refuse(("path", "url", "scale", "max_input_tokens", "max_output_tokens"))
            self._complete()
        elif self.kind is WorkloadKind.LIKE_SERVER:
            self._refuse(("path", "input_tokens", "output_tokens", "shared_prefix"))
            if self.url is None:
                raise wrong(
                    "of kind like-server needs its address",
                    "Write `url: http://127.0.0.1:8000/metrics`.",
                )
        else:
            self._refuse(("url", "input_tokens", "shared_prefix"))
            if self.turns > 1:
                raise wrong(self._not_for(), _GONE, at="turns")
            if self.path is None:
                example = "sharegpt.json" if self.kind is WorkloadKind.SHAREGPT else "trace.jsonl"
                raise wrong(f"of kind {self.kind} needs a file", f"Write `path: ./{example}`.")
        return self

    @model_validator(mode="after")
    def _one_loop(self) -> WorkloadSection:
        if self.concurrency is not None and self.request_rate is not None:
            raise wrong("has both concurrency and request_rate", f"Delete one. {_LOOP_HINT}")
        needs_load = self.kind in _WITHOUT_TIMES and self.kind is not WorkloadKind.LIKE_SERVER
        asked = self.concurrency or self.request_rate
        if self.arrivals is ArrivalKind.TRACE:
            self._check_replay()
        elif asked is None and (needs_load or self.arrivals is not None):
            raise wrong("needs concurrency or request_rate", _LOOP_HINT)
        if self.concurrency is not None:
            for name in ("arrivals", "burstiness", "ramp_to", "speedup"):
                if getattr(self, name) is not None:
                    raise wrong("only shapes a request_rate, here is a concurrency", _GONE, at=name)
        self._check_shape()
        return self

    def _complete(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) is None:
                raise wrong(
                    f"of kind synthetic needs `{name}`",
                    f"Write `{name}: {{mean: 256, stdev: 64}}`.",
                )
        shared, sent = self.shared_prefix, self.input_tokens
        if shared is not None and sent is not None and shared.tokens >= sent.spec().mean:
            raise wrong(
                f"has {shared.tokens} tokens, the mean input only {sent.spec().mean:g}: "
                "the beginning is a part of the input",
                "Write fewer, or raise `input_tokens`.",
                at="shared_prefix",
            )

    def _refuse(self, names: tuple[str, ...]) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise wrong(self._not_for(), _GONE, at=name)

    def _not_for(self) -> str:
        return f"does not go with kind {self.kind}"

    def _check_replay(self) -> None:
        if self.kind in _WITHOUT_TIMES:
            raise wrong(
                f"cannot be trace: kind {self.kind} has no times",
                "Write poisson, constant or ramp.",
                at="arrivals",
            )
        if self.speedup is not None and self.request_rate is not None:
            raise wrong(
                "and request_rate both say how fast the trace is replayed", _GONE, at="speedup"
            )

    def _check_shape(self) -> None:
        """Whether what shapes arrivals fits their kind."""
        kind = self._arrivals()
        if self.burstiness is not None and kind not in (ArrivalKind.POISSON, ArrivalKind.RAMP):
            raise wrong(f"does not shape arrivals of kind {kind}", _GONE, at="burstiness")
        if self.speedup is not None and kind is not ArrivalKind.TRACE:
            raise wrong("is for `arrivals: trace` only", _GONE, at="speedup")
        if kind is ArrivalKind.RAMP and self.ramp_to is None:
            raise wrong(
                "of kind ramp needs a rate to end at", "Write `ramp_to: 16`.", at="arrivals"
            )
        if kind is ArrivalKind.RAMP and self.has_levels:
            raise wrong("has several levels", "A ramp has one: where it begins.", at="request_rate")
        if self.ramp_to is not None and kind is not ArrivalKind.RAMP:
            raise wrong("is for `arrivals: ramp` only", "Write `arrivals: ramp`.", at="ramp_to")

    def _arrivals(self) -> ArrivalKind:
        if self.arrivals is not None:
            return self.arrivals
        replayed = self.kind not in _WITHOUT_TIMES and not (self.concurrency or self.request_rate)
        return ArrivalKind.TRACE if replayed else ArrivalKind.POISSON

    # --- the plain value ---------------------------------------------------------------

    def spec(self) -> WorkloadSpec:
        """The same as a plain value, with defaults filled in."""
        concurrency = self.concurrency[0] if self.concurrency else None
        levels = tuple(float(level) for level in self.concurrency or self.request_rate or ())
        shared = self.shared_prefix
        scale = self.scale or ScaleSection()
        return WorkloadSpec(
            kind=self.kind,
            path=None if self.path is None else Path(fields.expanded(self.path)),
            input_tokens=None if self.input_tokens is None else self.input_tokens.spec(),
            output_tokens=None if self.output_tokens is None else self.output_tokens.spec(),
            requests=self.requests,
            concurrency=concurrency,
            request_rate_per_s=self.request_rate[0] if self.request_rate else None,
            burstiness=1.0 if self.burstiness is None else self.burstiness,
            warmup_requests=self._warmup_requests(),
            request_timeout_s=self.request_timeout,
            seed=self.seed,
            levels=levels if len(levels) > 1 else (),
            arrivals=self._arrivals(),
            ramp_to_per_s=self.ramp_to,
            speedup=1.0 if self.speedup is None else self.speedup,
            input_scale=scale.input,
            output_scale=scale.output,
            max_input_tokens=self.max_input_tokens,
            max_output_tokens=self.max_output_tokens,
            shared_prefix=None
            if shared is None
            else SharedPrefixSpec(shared.tokens, shared.groups),
            turns=self.turns,
            url=self.url,
        )

    def _warmup_requests(self) -> int:
        if self.warmup is not None:
            return self.warmup
        most = max(self.concurrency) if self.concurrency else DEFAULT_WARMUP
        return max(2, min(most, DEFAULT_WARMUP))
