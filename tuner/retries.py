"""Whether a configuration that failed is started again: a pure function of what is known.

A failure of the configuration is its result: the search learns from it, and another start
costs minutes and tells the same. A failure of the environment says nothing of the
configuration, so that it is started again as often as such failures pass by themselves; then
the study stops, for no other configuration would do better. What nobody can name is tried
once more, and then counted as the configuration's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tuner.engine.passing import may_pass
from tuner.types import Blame, Failure, FailureCause, Stage

MOST_ATTEMPTS = 6
"""Starts of one configuration in all, whatever the causes: they may take turns."""

_ARGPARSE_EXIT_CODE = 2


@dataclass(frozen=True, slots=True)
class Retry:
    """Start the same configuration again.

    Attributes:
        wait_s: how long to wait before.
        waits_for: what may change meanwhile, in words; empty if nothing is waited for.
        fresh_cache: start with an empty folder as vLLM's compile cache.
    """

    wait_s: float = 0.0
    waits_for: str = ""
    fresh_cache: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """The failure is the configuration's result."""


@dataclass(frozen=True, slots=True)
class Stop:
    """No configuration can do better before someone mends the machine: the study ends."""


Decision: TypeAlias = Retry | Record | Stop

_FREED = "for the memory of the device to be freed"
_ENVIRONMENT: Mapping[FailureCause, Sequence[Retry]] = {
    # Someone took the port between our look and vLLM's bind; each start chooses a new one.
    FailureCause.PORT_IN_USE: (Retry(), Retry()),
    # A driver frees the memory of an ended process within seconds, a large host cache later.
    FailureCause.DEVICE_BUSY: (Retry(5.0, _FREED), Retry(20.0, _FREED)),
    FailureCause.MEMORY_BASELINE_MOVED: (
        Retry(5.0, "for the memory of the device to settle"),
        Retry(20.0, "for the memory of the device to settle"),
    ),
    # A rendezvous that came to nothing works the second time, or it is the driver or the net.
    FailureCause.NCCL: (Retry(5.0, "for the ranks of the last start to be gone"),),
    # A file of the cache is damaged; whose fault it was, a fresh one tells.
    FailureCause.COMPILE_CACHE: (Retry(fresh_cache=True),),
    # Not for a wrong name (see `may_pass`).
    FailureCause.MODEL_NOT_FOUND: (Retry(20.0, "for the network"),),
}
"""What is done after the first, second, ... failure of a cause. Not here: `model_access` and
`disk_full`, which no waiting mends."""

_OPEN_RETRIES = 1
"""`unknown`, `crash` and `hang` count together: one more start tells chance from habit."""

_OPEN = frozenset({FailureCause.UNKNOWN, FailureCause.CRASH, FailureCause.HANG})
"""Not `startup_timeout`: it costs the longest, and the limit is the user's own."""


def decide(failure: Failure, earlier: Sequence[FailureCause] = ()) -> Decision:
    """What to do after a failure.

    Args:
        earlier: the causes of the same configuration's attempts before this one, in order.
    """
    if _no_flag_like_that(failure) or _mute_command(failure):
        return Stop()
    if failure.cause in _OPEN:
        tried = sum(cause in _OPEN for cause in earlier)
        return Retry() if tried < _OPEN_RETRIES and _may_go_on(earlier) else Record()
    if failure.blame is not Blame.ENVIRONMENT:
        return Record()
    retries = _ENVIRONMENT.get(failure.cause, ())
    if failure.cause is FailureCause.MODEL_NOT_FOUND and not may_pass(failure):
        retries = ()
    tried = list(earlier).count(failure.cause)
    return retries[tried] if tried < len(retries) and _may_go_on(earlier) else Stop()


def ends_the_study(failure: Failure, earlier: Sequence[FailureCause] = ()) -> bool:
    """Whether a failure that is not followed by another attempt ends the study."""
    match decide(failure, earlier):
        case Stop():
            return True
        case Record():
            return False
        case Retry():
            return failure.blame is Blame.ENVIRONMENT


def _may_go_on(earlier: Sequence[FailureCause]) -> bool:
    return len(earlier) + 1 < MOST_ATTEMPTS


def _no_flag_like_that(failure: Failure) -> bool:
    """A flag that vLLM does not have, where it could not be asked for its flags before."""
    is_refusal = failure.cause is FailureCause.BAD_CONFIG
    # argparse ends the same way for a value that it does not take, which is one configuration's.
    return (
        is_refusal
        and failure.exit_code == _ARGPARSE_EXIT_CODE
        and "unrecognized arguments" in failure.line
    )


def _mute_command(failure: Failure) -> bool:
    """Ended before vLLM said a word: it is not vLLM, or is not let run (docker, permissions)."""
    said_nothing = failure.stage is Stage.LAUNCH and failure.memory.vllm_version is None
    is_unknown = failure.cause is FailureCause.UNKNOWN
    return is_unknown and said_nothing and failure.exit_code is not None
