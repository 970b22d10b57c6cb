"""Whether a failure may pass by itself: what `tuner diagnose` says, and what the tuner does."""

from __future__ import annotations

import re

from tuner.types import Failure, FailureCause

_NETWORK = re.compile(
    r"couldn't connect|could not connect|connection|connect to|timed? ?out|max retries"
    r"|name resolution|resolve host|unreachable|proxy|cached files|LocalEntryNotFound"
    r"|\b50[234]\b",
    re.I,
)
_OFFLINE_ON_PURPOSE = re.compile(
    r"offline mode is enabled|OfflineModeIsEnabled|HF_HUB_OFFLINE|outgoing traffic", re.I
)


def may_pass(failure: Failure) -> bool:
    """Whether the same configuration may do better at the next start."""
    if failure.cause is FailureCause.MODEL_NOT_FOUND:
        return _network(failure)
    return failure.cause.retry


def _network(failure: Failure) -> bool:
    """Whether the words of a missing model tell of a connection that may come back."""
    words = f"{failure.line}\n{failure.excerpt}"
    return bool(_NETWORK.search(words)) and not _OFFLINE_ON_PURPOSE.search(words)
