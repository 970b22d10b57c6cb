import pytest

from tuner.metrics.slo import attained, meets, missed_limits, promises, within
from tuner.types import RequestRecord, RequestStatus, SloLimit, SloMetric

TTFT = SloLimit(SloMetric.TTFT, 0.5, percentile=90)
TPOT = SloLimit(SloMetric.TPOT, 0.05)
ITL = SloLimit(SloMetric.ITL, 0.2)
E2E = SloLimit(SloMetric.E2E, 2.0)


def record(ttft_s=0.3, gaps_s=(0.04, 0.04), status=RequestStatus.OK):
    times_s = [10 + ttft_s]
    for gap_s in gaps_s:
        times_s.append(times_s[-1] + gap_s)
    return RequestRecord(
        index=0,
        status=status,
        send_s=10.0,
        end_s=times_s[-1],
        prompt_tokens=5,
        output_tokens=len(times_s),
        token_times_s=tuple(times_s),
    )


def test_request_counts_if_it_meets_every_limit():
    assert meets(record(), [TTFT, TPOT, ITL, E2E])


@pytest.mark.parametrize(
    ("slow", "limit"),
    [
        (record(ttft_s=0.6), TTFT),
        (record(gaps_s=(0.08, 0.04)), TPOT),
        (record(gaps_s=(0.01, 0.25, 0.01)), ITL),
        (record(ttft_s=1.5, gaps_s=(0.4, 0.4)), E2E),
    ],
)
def test_request_that_misses_one_limit_does_not_count(slow, limit):
    assert not meets(slow, [limit])


def test_request_that_was_not_served_counts_for_nothing():
    assert not meets(record(status=RequestStatus.TIMEOUT), [TTFT])
    assert not meets(record(status=RequestStatus.TIMEOUT), [])


def test_answer_of_one_token_has_no_gaps_to_miss():
    assert meets(record(gaps_s=()), [TPOT, ITL])


def test_within_counts_requests_that_were_not_served_as_missed():
    records = [record(), record(), record(ttft_s=0.7), record(status=RequestStatus.REJECTED)]
    assert within(records, TTFT) == 0.5


def test_attained_is_that_of_the_scarcest_limit():
    records = [record()] * 9 + [record(ttft_s=0.9)]
    assert attained(records, [TTFT]) == pytest.approx(1.0)  # nine in ten is what p90 asks for
    assert attained(records, [TTFT, SloLimit(SloMetric.TTFT, 0.5)]) == pytest.approx(0.9 / 0.99)


def test_attained_is_nothing_without_requests_or_without_promises():
    assert attained([], [TTFT]) == 0.0
    assert attained([record()], []) == 0.0


def test_promises_tell_how_many_requests_missed_which_limit():
    slow, unserved = record(ttft_s=0.7), record(status=RequestStatus.TIMEOUT)
    told = promises([record()] * 7 + [slow, slow, unserved], [TTFT, TPOT])
    assert told.kept == pytest.approx(0.7)
    assert told.missed == {"ttft_p90": 3, "tpot_p99": 1}
    assert told.reached_s == {"ttft_p90": pytest.approx(0.7)}  # TPOT has no p99: one in ten failed


@pytest.mark.parametrize("slow", [9, 10, 11])
def test_promises_agree_with_what_is_attained(slow):
    """990 of 1000 are what p99 asks for."""
    limit = SloLimit(SloMetric.TTFT, 0.5)
    records = [record()] * (1000 - slow) + [record(ttft_s=0.9)] * slow
    is_kept = promises(records, [limit]).reached_s["ttft_p99"] <= limit.limit_s
    assert is_kept is (attained(records, [limit]) >= 1.0) is (slow <= 10)


def test_promises_are_none_without_requests_or_without_limits():
    assert promises([], [TTFT]) is None
    assert promises([record()], []) is None


def test_missed_limits_of_a_request_are_named_as_in_the_space_file():
    assert missed_limits(record(), [TTFT, TPOT]) == ()
    assert missed_limits(record(ttft_s=0.9), [TTFT, TPOT]) == ("ttft_p90",)
    assert missed_limits(record(status=RequestStatus.EMPTY), [TTFT, TPOT]) == (
        "ttft_p90",
        "tpot_p99",
    )
