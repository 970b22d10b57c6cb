"""At the end of the time for a start: does the server hang, or was it only not done yet?

Both end the wait. A start that was still getting on wants a longer `startup_timeout`; one that
had stopped to move would have waited for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.engine.log_facts import STAGE_WORDS
from tuner.types import FailureCause, Stage

QUIET_S = 60.0
"""The least silence that is called a hang: loading one large shard from a slow disk, or
capturing with a cold cache, says nothing for tens of seconds."""

_QUIET_SHARE = 0.5
_LONGEST_LINE = 160


@dataclass(frozen=True, slots=True)
class Waited:
    """A start that has used up its time.

    Attributes:
        age_s: since the launch.
        quiet_s: since its log last showed progress.
        last_line: of the log, secrets masked; empty if there is none.
        problem: why it does not serve yet, as HTTP tells.
    """

    stage: Stage
    age_s: float
    quiet_s: float
    last_line: str
    problem: str


def judge(waited: Waited, limit_s: float, quiet_at_least_s: float = QUIET_S) -> FailureCause:
    """HANG where the log has shown no progress for half of the time-out, else STARTUP_TIMEOUT."""
    quiet_limit_s = max(quiet_at_least_s, _QUIET_SHARE * limit_s)
    return FailureCause.HANG if waited.quiet_s >= quiet_limit_s else FailureCause.STARTUP_TIMEOUT


def words(waited: Waited, limit_s: float, cause: FailureCause) -> str:
    """What the failure's line says."""
    doing = STAGE_WORDS[waited.stage]
    if cause is not FailureCause.HANG:
        return (
            f"not ready after {clock(limit_s)}, still {doing} ({_cut(waited.problem)}): "
            "raise server.startup_timeout"
        )
    if waited.stage is Stage.READY:
        seen = waited.problem  # the log has said all it had to
    else:
        seen = f"last line: {waited.last_line}" if waited.last_line else "its log is empty"
    since = clock(waited.age_s - waited.quiet_s)
    return (
        f"not ready after {clock(limit_s)}: no progress since {since}, while {doing} ({_cut(seen)})"
    )


def clock(seconds: float) -> str:
    """As a space file has it: `45s`, `7m20s`, `1h5m`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    parts = [(hours, "h"), (minutes, "m"), (rest if not hours else 0, "s")]
    return "".join(f"{count}{unit}" for count, unit in parts if count) or "0s"


def _cut(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= _LONGEST_LINE else one_line[: _LONGEST_LINE - 1] + "…"
