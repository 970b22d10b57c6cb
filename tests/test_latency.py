import pytest

from tuner.metrics.latency import due_s, e2e_s, itl_s, tpot_s, ttft_s
from tuner.types import RequestRecord, RequestStatus


def record(times_s, *, counts=(), send_s=1.0, intended_s=None, tokens=None):
    return RequestRecord(
        index=0,
        status=RequestStatus.OK,
        send_s=send_s,
        end_s=times_s[-1],
        prompt_tokens=10,
        output_tokens=sum(counts) or len(times_s) if tokens is None else tokens,
        token_times_s=tuple(times_s),
        token_counts=counts,
        intended_s=intended_s,
    )


def test_latencies_count_from_when_the_request_was_due():
    late = record([2.0, 2.5], send_s=1.5, intended_s=1.0)
    assert due_s(late) == 1.0
    assert ttft_s(late) == 1.0
    assert e2e_s(late) == 1.5


def test_latencies_of_a_closed_loop_count_from_the_send():
    assert ttft_s(record([2.0, 2.5], send_s=1.5)) == 0.5


def test_itl_is_each_gap_where_events_carry_one_token():
    assert list(itl_s(record([1.0, 1.5, 3.5]))) == [0.5, 2.0]


def test_itl_shares_the_gap_among_the_tokens_of_one_event():
    gaps_s = list(itl_s(record([1.0, 1.4, 1.5], counts=(2, 4, 1))))
    assert gaps_s == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1])


def test_mean_itl_equals_tpot_where_the_first_event_has_one_token():
    spread = record([1.0, 1.4, 1.5, 2.0], counts=(1, 4, 1, 3))
    gaps_s = list(itl_s(spread))
    assert sum(gaps_s) / len(gaps_s) == pytest.approx(tpot_s(spread))
