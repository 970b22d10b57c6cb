"""What an entry of the table of wordings is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tuner.engine.log_context import Context
from tuner.types import FailureCause


class Weight(StrEnum):
    """How much a line explains."""

    ROOT = "root"
    """The cause itself."""
    HINT = "hint"
    """Says what kind of failure, but a root named later explains more."""
    WRAPPER = "wrapper"
    """Only says that there was a failure; the cause stands elsewhere."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One wording.

    Attributes:
        regex: named groups become the failure's numbers (see `log_causes`).
        details: searched in the same message for more numbers; each may be missing, as a
            message is cut off at times.
        aliases: names under which a number is given too, where the message has no other.
        decide: refines the cause by stage and traceback; its None means: no failure.
        decisive: a starting server cannot recover from it any more.
        engine_dead: a server that was ready cannot serve any more.
        also_serving: it means the same once the server is ready; a request may fail with
            words that at start would be the server's end.
        any_level: it counts also where vLLM calls it a warning.
        refines: says more of an out-of-memory failure that was just found.
    """

    cause: FailureCause
    regex: re.Pattern[str]
    seen_in: str
    weight: Weight = Weight.ROOT
    details: tuple[re.Pattern[str], ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    decide: Context | None = None
    decisive: bool = False
    engine_dead: bool = False
    also_serving: bool = False
    any_level: bool = False
    refines: bool = False


def pattern(cause: FailureCause, regex: str, seen_in: str, **more: object) -> Pattern:
    """A `Pattern` of the text of a regular expression."""
    return Pattern(cause, re.compile(regex), seen_in, **more)  # type: ignore[arg-type]
