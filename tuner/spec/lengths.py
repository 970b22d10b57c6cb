"""`input_tokens:` and `output_tokens:` of a space file."""

from __future__ import annotations

import re
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

from pydantic import BeforeValidator, model_validator

from tuner.spec import fields
from tuner.spec.document import kind_of
from tuner.spec.fields import Section
from tuner.spec.problems import wrong
from tuner.types import LengthBin, LengthKind, LengthSpec

LONGEST_TOKENS = 2**31 - 1

_EXAMPLES = "Write `512`, or `{mean: 512, stdev: 128, min: 16, max: 2048}`."
_HISTOGRAM_EXAMPLE = "Write tokens and how often: `histogram: {1-128: 60, 129-1024: 40}`."
_BIN = re.compile(r"\s*([0-9]{1,10})\s*(?:-\s*([0-9]{1,10})\s*)?")
_MEAN_EXAMPLE = "Write the mean number of tokens, such as `mean: 512`."

_Tokens = fields.number(0, exclusive=True, maximum=LONGEST_TOKENS)
_Spread = fields.number(0, exclusive=False, maximum=LONGEST_TOKENS)


class _Named(StrEnum):
    """Distributions that are called by their names; a histogram shows by its key."""

    NORMAL = "normal"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"


def _bins(value: object) -> tuple[LengthBin, ...]:
    if not isinstance(value, dict) or not value:
        shown = kind_of(value or None)
        raise wrong(f"must be a mapping of ranges, not {shown}", _HISTOGRAM_EXAMPLE)
    bins = []
    for written, entry in value.items():
        match = _BIN.fullmatch(str(written))
        if match is None:
            raise wrong("is no range of tokens", _HISTOGRAM_EXAMPLE, at=str(written))
        low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high <= LONGEST_TOKENS:
            raise wrong("must rise, from 1 at least", _HISTOGRAM_EXAMPLE, at=str(written))
        weight = entry if isinstance(entry, int | float) and not isinstance(entry, bool) else -1
        if weight < 0 or weight > fields.LARGEST:
            raise wrong(
                f"must have a weight, not {kind_of(entry)}", _HISTOGRAM_EXAMPLE, at=str(written)
            )
        if weight > 0:
            bins.append(LengthBin(low, high, float(weight)))
    if not bins:
        raise wrong("has no weight above 0", _HISTOGRAM_EXAMPLE)
    bins.sort(key=lambda bin_: bin_.low)
    for one, other in pairwise(bins):
        if other.low <= one.high:
            raise wrong(f"has the length {other.low} in two ranges", _HISTOGRAM_EXAMPLE)
    return tuple(bins)


class LengthSection(Section):
    """A plain number is a fixed length."""

    distribution: Annotated[_Named, BeforeValidator(fields.one_of(_Named))] | None = None
    mean: Annotated[float, BeforeValidator(_Tokens)] | None = None
    stdev: Annotated[float, BeforeValidator(_Spread)] | None = None
    min: Annotated[int, BeforeValidator(fields.whole(1, LONGEST_TOKENS))] = 1
    max: Annotated[int, BeforeValidator(fields.whole(1, LONGEST_TOKENS))] | None = None
    histogram: Annotated[tuple[LengthBin, ...], BeforeValidator(_bins)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _fixed(cls, value: object) -> object:
        if isinstance(value, dict):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise wrong(f"must be a number of tokens or a mapping, not {kind_of(value)}", _EXAMPLES)
        return {"mean": fields.whole(1, LONGEST_TOKENS)(value)}

    @model_validator(mode="after")
    def _consistent(self) -> LengthSection:
        if self.max is not None and self.max < self.min:
            raise wrong(f"must be at least min ({self.min}), not {self.max}", at="max")
        if self.histogram is not None:
            self._refuse_beside(("distribution", "mean", "stdev"), "a histogram")
            return self
        if self.distribution is _Named.UNIFORM:
            self._refuse_beside(("mean", "stdev"), "a uniform distribution, which has min and max")
            if self.max is None:
                raise wrong("is missing", "Write `min: 64, max: 1024`.", at="max")
            return self
        if self.mean is None:
            raise wrong("is missing", _MEAN_EXAMPLE, at="mean")
        above = self.max is not None and self.mean > self.max
        if above or self.mean < self.min:
            raise wrong(f"must lie between min and max, not {self.mean:g}", at="mean")
        if self.distribution is _Named.LOGNORMAL and not self.stdev:
            raise wrong("is missing", "Write `stdev: 512`: how far lengths spread.", at="stdev")
        return self

    def _refuse_beside(self, names: tuple[str, ...], what: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise wrong(f"does not go with {what}", "Delete it.", at=name)

    def spec(self) -> LengthSpec:
        """The same as a plain value."""
        if self.histogram is not None:
            total = sum(bin_.weight for bin_ in self.histogram)
            mean = sum(b.weight * (b.low + b.high) / 2 for b in self.histogram) / total
            bins = self.histogram
            return LengthSpec(mean, 0.0, self.min, self.max, LengthKind.HISTOGRAM, bins)
        if self.distribution is _Named.UNIFORM:
            mean = (self.min + (self.max or self.min)) / 2
            return LengthSpec(mean, 0.0, self.min, self.max, LengthKind.UNIFORM)
        kind = LengthKind.NORMAL
        if self.distribution is _Named.LOGNORMAL:
            kind = LengthKind.LOGNORMAL
        return LengthSpec(self.mean or 0.0, self.stdev or 0.0, self.min, self.max, kind)
