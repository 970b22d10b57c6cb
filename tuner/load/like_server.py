"""Kind `like-server`: what a vLLM in production has served, as a synthetic workload.

Read from its page of metrics: the histograms of prompt and generation lengths, how many requests
ended, and the share of prompt tokens that its prefix cache had. Prompts and answers are never
seen, here or there.

Read once, at the beginning of a study: a server in production has served something else a
minute later, and a study needs the same load in every trial.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tuner.errors import InputError
from tuner.load.lengths import LONGEST_TOKENS, draw, mean_of_bins
from tuner.metrics.page import ENDED, PREFIX_HITS, PREFIX_QUERIES, PROCESS_START
from tuner.types import (
    LengthBin,
    LengthKind,
    LengthSpec,
    SharedPrefixSpec,
    WorkloadKind,
    WorkloadSpec,
)

PROMPT_LENGTHS = "vllm:request_prompt_tokens"
ANSWER_LENGTHS = "vllm:request_generation_tokens"

LOOK_S = 5.0
"""Between the two readings that tell what comes in now."""

FEWEST_ENDED = 20
"""Requests between two readings from which a rate is told: to a fifth or so (1/sqrt(20))."""

MISLEADING = 2.0
"""The rate over the uptime counts unless that of now is this many times as high or as low."""

LEAST_SHARED_TOKENS = 16
"""A block of the prefix cache; what is shared of less is not shared."""

_MOST_COUNTED = 2.0**53
"""No count of requests comes near, and floats stop counting there."""

_TIMEOUT_S = 10.0
_MOST_BYTES = 1 << 24
_HTTP_OK = 200
_DRAWN = 4000
_HOUR_S = 3600
_HINT = (
    "Give the metrics of a running vLLM, such as `url: http://127.0.0.1:8000/metrics`; it has "
    "them unless it was started with --disable-log-stats."
)


@dataclass(frozen=True, slots=True)
class Seen:
    """A workload like the server's, and in which words it is told.

    Attributes:
        summary: one line.
    """

    workload: WorkloadSpec
    summary: str


async def resolved(spec: WorkloadSpec, *, look_s: float = LOOK_S) -> Seen:
    """Ask the server; what the spec says itself (a rate, a concurrency, a scale) stays.

    The arrival rate is that of all requests over the server's uptime, or, where what comes in
    within `look_s` is very different (a server that was idle for days), the latter.

    Raises:
        InputError: it cannot be reached, is no vLLM, or has served nothing yet.
    """
    url = _page_url(spec.url or "")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
        first = _Page.of(await _get(session, url), url)
        inputs, outputs = first.lengths(PROMPT_LENGTHS), first.lengths(ANSWER_LENGTHS)
        rate, basis = spec.request_rate_per_s, "as asked for"
        if rate is None and spec.concurrency is None:
            began_s = time.monotonic()
            await asyncio.sleep(look_s)
            second = _Page.of(await _get(session, url), url)
            passed_s = time.monotonic() - began_s
            rate, basis = _rate(second, second.ended - first.ended, passed_s)
        context = await _context(session, url)
    sent = _scaled(
        _spec_of(inputs, first.mean(PROMPT_LENGTHS), context),
        spec.input_scale,
        spec.max_input_tokens,
    )
    asked = _scaled(
        _spec_of(outputs, first.mean(ANSWER_LENGTHS), context),
        spec.output_scale,
        spec.max_output_tokens,
    )
    prefix = _prefix(sent, first.hit_share)
    workload = replace(
        spec,
        kind=WorkloadKind.SYNTHETIC,
        input_tokens=sent,
        output_tokens=asked,
        request_rate_per_s=rate,
        shared_prefix=prefix,
        input_scale=1.0,
        output_scale=1.0,
        max_input_tokens=None,
        max_output_tokens=None,
    )
    load = f"{rate:.3g} requests/s {basis}" if rate else f"{spec.concurrency} requests in flight"
    shared = f"{first.hit_share:.0%} of the input from its prefix cache"
    summary = (
        f"like {url} ({first.ended:.0f} requests): {sent.mean:.0f} input and {asked.mean:.0f} "
        f"output tokens on average, {load}, {shared}"
    )
    return Seen(workload, summary)


# --- the page --------------------------------------------------------------------------


Buckets = tuple[tuple[float, float], ...]
"""Upper bounds and how many lengths lie below, as Prometheus has them."""


@dataclass(frozen=True, slots=True)
class _Page:
    """Sums over all engines and models of a page, by name and upper bound (of buckets)."""

    url: str
    values: Mapping[tuple[str, str], float]

    @classmethod
    def of(cls, text: str, url: str) -> _Page:
        """Read a page.

        Raises:
            InputError: it is none of Prometheus.
        """
        values: dict[tuple[str, str], float] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if not math.isfinite(sample.value):
                        continue
                    key = sample.name, sample.labels.get("le", "")
                    values[key] = values.get(key, 0.0) + sample.value
        except (ValueError, IndexError, KeyError) as problem:
            raise InputError(f"{url} is no page of metrics: {problem}", _HINT) from problem
        return cls(url, values)

    def value(self, names: Sequence[str]) -> float | None:
        """The value under the first of `names` that the page has."""
        return next((self.values[name, ""] for name in names if (name, "") in self.values), None)

    @property
    def ended(self) -> float:
        """Requests that were answered."""
        return self.value(ENDED) or 0.0

    @property
    def hit_share(self) -> float:
        """Share of prompt tokens that the prefix cache had; 0 where it is off."""
        queries, hits = self.value(PREFIX_QUERIES) or 0.0, self.value(PREFIX_HITS) or 0.0
        return min(1.0, hits / queries) if queries > 0 else 0.0

    def lengths(self, name: str) -> Buckets:
        """A histogram.

        Raises:
            InputError: there is none, or it is empty.
        """
        found: list[tuple[float, float]] = []
        for (sample, bound), count in self.values.items():
            if sample == f"{name}_bucket":
                found.append((self._bound(name, bound), count))
        if not found:
            raise InputError(f"{self.url} has no {name}.", _HINT)
        found.sort()
        counts = [count for _, count in found]
        if counts[0] < 0 or counts != sorted(counts) or counts[-1] > _MOST_COUNTED:
            raise InputError(f"{self.url}: the buckets of {name} make no sense.", _HINT)
        if counts[-1] <= 0:
            raise InputError(
                f"{self.url}: the server has answered no request yet.",
                "Ask one that has served what you want to tune for.",
            )
        return tuple(found)

    def mean(self, name: str) -> float | None:
        """Of a histogram's lengths, exactly; None where the page does not tell."""
        total, count = self.value((f"{name}_sum",)), self.value((f"{name}_count",))
        if total is None or not count or not 0 < total / count <= LONGEST_TOKENS:
            return None
        return total / count

    def _bound(self, name: str, text: str) -> float:
        try:
            bound = float(text)
        except ValueError:
            bound = -1.0
        if not (bound >= 0 and (math.isinf(bound) or bound <= LONGEST_TOKENS)):
            raise InputError(f"{self.url}: {name} has a bucket up to {text!r}", _HINT)
        return bound


def _rate(page: _Page, ended: float, passed_s: float) -> tuple[float, str]:
    """Arrivals a second, and over what time.

    Raises:
        InputError: it cannot be told.
    """
    now = ended / passed_s if passed_s > 0 and ended >= FEWEST_ENDED else None
    started_s = page.value(PROCESS_START)
    uptime_s = time.time() - started_s if started_s else 0.0
    if uptime_s > 0 and page.ended > 0:
        rate = page.ended / uptime_s
        if now is None or rate / MISLEADING <= now <= rate * MISLEADING:
            return rate, f"over its uptime of {_span(uptime_s)}"
    if now is None:
        raise InputError(
            f"{page.url} does not tell how many requests come in.",
            "Write `request_rate: 4` or `concurrency: 32`.",
        )
    return now, f"in {passed_s:.0f} s just now, far from the mean of its uptime"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= _HOUR_S else f"{seconds / 60:.1f} min"


# --- lengths ---------------------------------------------------------------------------


def _spec_of(buckets: Buckets, mean: float | None, context: int | None) -> LengthSpec:
    """Equally likely lengths within each bucket.

    The last, open one ends at the context, or else so far above that nothing is left out of a
    histogram of one bucket.
    """
    bins = []
    below, lower = 0.0, 0
    for bound, count in buckets:
        is_open = math.isinf(bound)
        open_end = context or max(2 * lower, round(2 * (mean or 0.0)))
        upper = max(lower + 1, open_end) if is_open else math.floor(bound)
        if upper <= lower:
            continue  # what is in it belongs to the next one
        if count > below:
            bins.append(LengthBin(lower + 1, upper, count - below))
        below, lower = max(below, count), upper
    found = tuple(bins) or (LengthBin(1, 1, 1.0),)
    return LengthSpec(mean_of_bins(found), kind=LengthKind.HISTOGRAM, bins=found)


def _scaled(lengths: LengthSpec, scale: float, limit: int | None) -> LengthSpec:
    bins = tuple(
        LengthBin(_cut(bin_.low * scale, limit), _cut(bin_.high * scale, limit), bin_.weight)
        for bin_ in lengths.bins
    )
    return replace(lengths, mean=mean_of_bins(bins), bins=bins)


def _cut(tokens: float, limit: int | None) -> int:
    length = max(1, round(tokens))
    return length if limit is None else min(length, limit)


def _prefix(inputs: LengthSpec, share: float) -> SharedPrefixSpec | None:
    """One common beginning of the length that makes `share` of all input.

    Prompts that are shorter share less: the length t solves E[min(t, L)] = share * E[L].
    """
    lengths = np.sort(draw(inputs, _DRAWN, np.random.default_rng(0))).astype(np.float64)
    wanted = share * lengths.mean()
    # E[min(t, L)] at each drawn length, which it rises linearly between.
    count = len(lengths)
    below = np.concatenate(([0.0], np.cumsum(lengths)[:-1]))
    shared = (below + lengths * (count - np.arange(count))) / count
    points, means = np.concatenate(([0.0], lengths)), np.concatenate(([0.0], shared))
    tokens = int(np.interp(wanted, means, points))
    return SharedPrefixSpec(tokens) if tokens >= LEAST_SHARED_TOKENS else None


# --- asking ----------------------------------------------------------------------------


def _page_url(url: str) -> str:
    """With the path of the metrics, where only a host was given."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path="/metrics")) if parts.path in ("", "/") else url


async def _get(session: aiohttp.ClientSession, url: str) -> str:
    """A page's text.

    Raises:
        InputError: there is none.
    """
    try:
        async with session.get(url) as answer:
            content = await answer.content.read(_MOST_BYTES) if answer.status == _HTTP_OK else b""
            while answer.status == _HTTP_OK and not answer.content.at_eof():
                content += await answer.content.read(_MOST_BYTES)
                if len(content) > _MOST_BYTES:
                    raise InputError(f"{url} is larger than a page of metrics.", _HINT)
            if answer.status != _HTTP_OK:
                raise InputError(f"{url} answers with HTTP {answer.status}.", _HINT)
            return content.decode("utf-8", errors="replace")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as problem:
        raise InputError(
            f"{url} cannot be read: {str(problem) or type(problem).__name__}", _HINT
        ) from problem


async def _context(session: aiohttp.ClientSession, url: str) -> int | None:
    """The served context, which the metrics do not have; None where it is not told."""
    try:
        text = await _get(session, urlunsplit(urlsplit(url)._replace(path="/v1/models", query="")))
        models = json.loads(text)["data"]
        found = [model.get("max_model_len") for model in models]
    except (InputError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return max((length for length in found if type(length) is int and length > 0), default=None)
