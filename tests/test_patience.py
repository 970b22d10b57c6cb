"""A start whose time is up: a hang, or not done yet."""

from __future__ import annotations

import pytest

from tuner.engine.patience import Waited, clock, judge, words
from tuner.types import FailureCause, Stage

CAPTURING = Waited(
    Stage.GRAPH_CAPTURE,
    age_s=900.0,
    quiet_s=460.0,
    last_line="INFO Capturing CUDA graphs:  40%",
    problem="/health: ClientConnectorError",
)


def waited(stage: Stage = Stage.LOADING, *, age_s: float = 900.0, quiet_s: float) -> Waited:
    return Waited(stage, age_s, quiet_s, "INFO a line", "/health: ClientConnectorError")


@pytest.mark.parametrize(
    ("limit_s", "quiet_s", "cause"),
    [
        (900.0, 450.0, FailureCause.HANG),
        (900.0, 449.0, FailureCause.STARTUP_TIMEOUT),
        (90.0, 60.0, FailureCause.HANG),
        (90.0, 50.0, FailureCause.STARTUP_TIMEOUT),  # a minute is not long enough
        (30.0, 30.0, FailureCause.STARTUP_TIMEOUT),
    ],
)
def test_judge_asks_how_long_there_was_no_progress(
    limit_s: float, quiet_s: float, cause: FailureCause
) -> None:
    assert judge(waited(age_s=limit_s, quiet_s=quiet_s), limit_s) is cause


def test_words_of_a_hang_say_since_when_and_what_came_last() -> None:
    assert words(CAPTURING, 900.0, FailureCause.HANG) == (
        "not ready after 15m: no progress since 7m20s, while capturing CUDA graphs "
        "(last line: INFO Capturing CUDA graphs: 40%)"
    )


def test_words_of_a_hang_after_the_log_said_ready_tell_what_http_says() -> None:
    last = Waited(Stage.READY, 100.0, 80.0, "Application startup complete.", "/health: 503")
    assert words(last, 100.0, FailureCause.HANG) == (
        "not ready after 1m40s: no progress since 20s, while waiting for the first answer "
        "(/health: 503)"
    )


def test_words_of_a_start_that_was_still_moving_say_what_to_raise() -> None:
    assert words(waited(quiet_s=3.0), 900.0, FailureCause.STARTUP_TIMEOUT) == (
        "not ready after 15m, still loading the weights (/health: ClientConnectorError): "
        "raise server.startup_timeout"
    )


def test_words_of_a_server_that_never_said_anything() -> None:
    mute = Waited(Stage.LAUNCH, 900.0, 900.0, "", "nothing listens on its port yet")
    assert words(mute, 900.0, FailureCause.HANG) == (
        "not ready after 15m: no progress since 0s, while starting Python and importing vLLM "
        "(its log is empty)"
    )


def test_words_cut_a_long_line() -> None:
    long = Waited(Stage.LOADING, 900.0, 900.0, "x" * 5000, "")
    assert len(words(long, 900.0, FailureCause.HANG)) < 300


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (0.4, "0s"), (45, "45s"), (60, "1m"), (440, "7m20s"), (3600, "1h"), (3905, "1h5m")],
)
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown
