"""How often a failed configuration is started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.retries import MOST_ATTEMPTS, Record, Retry, Stop, decide, ends_the_study
from tuner.types import Blame, Failure, FailureCause, MemoryFacts, Stage

CONNECTION = "OSError: We couldn't connect to 'https://huggingface.co' to load the files"
WRONG_NAME = "OSError: org/nope is not a local folder and is not a valid model identifier"
OFFLINE = "OfflineModeIsEnabled: Cannot reach https://huggingface.co: offline mode is enabled."


def failure(cause, line="said so", *, stage=Stage.LOADING, exit_code=None, version="0.32.0"):
    memory = MemoryFacts(vllm_version=version)
    return Failure(cause, stage, line, exit_code=exit_code, memory=memory)


def lives(cause, line="said so"):
    """The decisions over the attempts of a configuration that always fails the same way."""
    decisions = []
    while not decisions or isinstance(decisions[-1], Retry):
        decisions.append(decide(failure(cause, line), [cause] * len(decisions)))
    return decisions


@pytest.mark.parametrize(
    ("cause", "waits_s"),
    [
        (FailureCause.PORT_IN_USE, [0, 0]),
        (FailureCause.DEVICE_BUSY, [5, 20]),
        (FailureCause.MEMORY_BASELINE_MOVED, [5, 20]),
        (FailureCause.NCCL, [5]),
        (FailureCause.COMPILE_CACHE, [0]),
        (FailureCause.MODEL_ACCESS, []),
        (FailureCause.DISK_FULL, []),
    ],
)
def test_decide_repeats_what_may_pass_and_then_stops(cause, waits_s):
    *retries, last = lives(cause)
    assert [retry.wait_s for retry in retries] == waits_s
    assert last == Stop()


def test_decide_says_what_every_wait_is_for():
    for cause in FailureCause:
        for decision in lives(cause, CONNECTION)[:-1]:
            assert bool(decision.waits_for) == (decision.wait_s > 0)


def test_decide_takes_a_fresh_compile_cache():
    assert decide(failure(FailureCause.COMPILE_CACHE)) == Retry(fresh_cache=True)


@pytest.mark.parametrize("cause", [FailureCause.UNKNOWN, FailureCause.CRASH, FailureCause.HANG])
def test_decide_repeats_the_unknown_once_and_then_counts_it(cause):
    assert lives(cause) == [Retry(), Record()]


def test_decide_counts_unknown_crash_and_hang_together():
    assert decide(failure(FailureCause.CRASH), [FailureCause.HANG]) == Record()
    assert decide(failure(FailureCause.CRASH), [FailureCause.PORT_IN_USE]) == Retry()


@pytest.mark.parametrize(
    "cause",
    [c for c in FailureCause if c.blame in (Blame.CONFIGURATION, Blame.NONE)]
    + [FailureCause.STARTUP_TIMEOUT],
)
def test_decide_never_repeats_what_the_configuration_did(cause):
    assert lives(cause) == [Record()]


@pytest.mark.parametrize(
    ("line", "attempts"), [(CONNECTION, 2), (WRONG_NAME, 1), (OFFLINE, 1), ("404 Not Found", 1)]
)
def test_decide_repeats_a_missing_model_where_the_network_is_named(line, attempts):
    decisions = lives(FailureCause.MODEL_NOT_FOUND, line)
    assert (len(decisions), decisions[-1]) == (attempts, Stop())


def test_decide_stops_at_a_flag_that_does_not_exist():
    line = "vllm serve: error: unrecognized arguments: --no-such-flag 1"
    assert decide(failure(FailureCause.BAD_CONFIG, line, exit_code=2)) == Stop()
    assert decide(failure(FailureCause.BAD_CONFIG, line, exit_code=1)) == Record()


def test_decide_records_a_value_that_a_flag_does_not_take():
    line = "vllm serve: error: argument --kv-cache-dtype: invalid choice: 'fp9'"
    assert decide(failure(FailureCause.BAD_CONFIG, line, exit_code=2)) == Record()


def test_decide_stops_at_a_command_that_ends_without_a_word_of_vllm():
    mute = failure(FailureCause.UNKNOWN, stage=Stage.LAUNCH, exit_code=1, version=None)
    assert decide(mute) == Stop()
    spoke = failure(FailureCause.UNKNOWN, stage=Stage.LAUNCH, exit_code=1)
    assert decide(spoke) == Retry()


def test_ends_the_study_only_for_the_machine():
    assert ends_the_study(failure(FailureCause.MODEL_ACCESS))
    assert ends_the_study(failure(FailureCause.PORT_IN_USE))
    assert not ends_the_study(failure(FailureCause.UNKNOWN))
    assert not ends_the_study(failure(FailureCause.OOM_LOAD))


@given(st.lists(st.sampled_from(list(FailureCause)), min_size=1, max_size=40))
def test_decide_ends_whatever_the_causes_take_turns(causes):
    attempts = 1
    for number, cause in enumerate(causes):
        if not isinstance(decide(failure(cause, CONNECTION), causes[:number]), Retry):
            break
        attempts += 1
    assert attempts <= MOST_ATTEMPTS
