"""Requests that do not fit a context: they count as failed, and the score says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tuner.load.workload import too_long
from tuner.types import Choice, FloatRange, IntRange, JsonValue, Knob, StudySpec

_CONTEXT = "max-model-len"


def unfitting(spec: StudySpec, resolved: Mapping[str, JsonValue]) -> Iterator[str]:
    """A sentence for each context that is shorter than some request of the workload.

    Args:
        resolved: values in effect for the reference, where vLLM told them.
    """
    for tokens in sorted(_contexts(spec, resolved)):
        count = too_long(spec.workload, tokens)
        if count:
            yield (
                f"{_CONTEXT} {tokens}: {count} of {spec.workload.requests} requests are "
                "longer; they count as failed"
            )


def _contexts(spec: StudySpec, resolved: Mapping[str, JsonValue]) -> set[int]:
    """Contexts that trials may have; of a range, its bounds."""
    fixed = [spec.server.args.get(_CONTEXT), spec.reference.get(_CONTEXT), resolved.get(_CONTEXT)]
    searched = [
        value for knob in spec.search_space if knob.name == _CONTEXT for value in _extremes(knob)
    ]
    return {
        c for c in (*fixed, *searched) if isinstance(c, int) and not isinstance(c, bool) and c > 0
    }


def _extremes(knob: Knob) -> tuple[JsonValue, ...]:
    match knob:
        case IntRange(low=low, high=high) | FloatRange(low=low, high=high):
            return (low, high)
        case Choice(choices=choices):
            return choices
