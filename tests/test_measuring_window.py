import numpy as np
import pytest

from tuner.measuring.window import (
    after_first_generation,
    in_blocks,
    least_error_cut,
    mean_in_flight,
    steady,
)
from tuner.metrics.serving import Span
from tuner.types import RequestRecord, RequestStatus


def request(send_s, end_s, tokens=10):
    return RequestRecord(
        index=0,
        status=RequestStatus.OK,
        send_s=send_s,
        end_s=end_s,
        output_tokens=tokens,
        token_times_s=(end_s,),
    )


def closed_loop(concurrency, count, seconds=1.0, seed=0):
    """`count` requests in a closed loop, lengths drawn at random around `seconds`."""
    rng = np.random.default_rng(seed)
    free_s = [0.0] * concurrency
    records = []
    for _ in range(count):
        slot = int(np.argmin(free_s))
        length_s = float(rng.uniform(0.5, 1.5)) * seconds
        records.append(request(free_s[slot], free_s[slot] + length_s))
        free_s[slot] += length_s
    return records


def arrays(records):
    sends_s = np.array([r.send_s for r in records])
    ends_s = np.array([r.end_s for r in records])
    return sends_s, ends_s, np.array([float(r.output_tokens) for r in records])


def steady_part(records, in_flight, until_s=None):
    sends_s, ends_s, tokens = arrays(records)
    return steady(ends_s, tokens, in_flight, sends_s.max() if until_s is None else until_s)


def test_steady_window_leaves_out_the_first_generation_and_the_tail():
    records = closed_loop(8, 200)
    window = steady_part(records, 8)
    assert window is not None
    ends_s = sorted(r.end_s for r in records)
    assert window.start_s >= ends_s[7]
    assert window.end_s == max(r.send_s for r in records)
    assert window.start_s < 0.5 * ends_s[-1]


def test_requests_sent_all_at_once_have_no_steady_window():
    assert steady_part([request(0.0, 1.0 + 0.01 * n) for n in range(32)], 32) is None


def test_a_few_generations_have_no_steady_window():
    assert steady_part(closed_loop(16, 48), 16) is None


def test_a_handful_of_requests_has_no_steady_window():
    """One at a time is steady at once, but the window's edges count for too much."""
    assert steady_part(closed_loop(1, 15), 1) is None
    assert steady_part(closed_loop(1, 60), 1) is not None


def test_window_of_a_running_load_ends_now():
    window = steady_part(closed_loop(4, 100), 4, until_s=20.0)
    assert window is not None
    assert window.end_s == 20.0


def test_slow_first_seconds_are_left_out_up_to_half_of_the_window():
    """As of a server that still compiles: the tokens of the first ten of fifty seconds."""
    records = [request(0.1 * n, 0.1 * n + 0.5, tokens=2 if n < 100 else 10) for n in range(500)]
    window = steady_part(records, 5)
    assert window is not None
    assert 9.0 <= window.start_s <= 13.0


def test_mean_in_flight_is_the_concurrency_of_a_closed_loop():
    assert mean_in_flight(*arrays(closed_loop(8, 400))[:2]) in (7, 8)


def test_mean_in_flight_is_at_least_one():
    assert mean_in_flight(np.array([0.0, 100.0]), np.array([1.0, 101.0])) == 1
    assert mean_in_flight(np.array([]), np.array([])) == 1


def test_blocks_are_as_long_as_requests_take():
    blocks = in_blocks(Span(100.0, 145.0), 2.0, ended=400)
    assert blocks.count == 22
    assert blocks.span == Span(101.0, 145.0)
    assert np.diff(blocks.edges_s) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("length_s", "request_s", "ended", "block_s"),
    [
        (1000.0, 2.0, 5000, 32.0),  # no more than 32 blocks
        (100.0, 0.1, 5000, 3.2),
        (20.0, 0.02, 5000, 0.64),
        (80.0, 2.0, 64, 6.0),  # at least 4 requests end in one: 5 s, of whole requests 6
        (40.0, 8.0, 400, 4.0),  # young: of half a request
        (20.0, 8.0, 400, 2.0),
    ],
)
def test_blocks_are_longer_where_there_would_be_too_many(length_s, request_s, ended, block_s):
    blocks = in_blocks(Span(0.0, length_s), request_s, ended)
    assert blocks.span.length_s / blocks.count == pytest.approx(block_s)
    assert 8 <= blocks.count <= 32


@pytest.mark.parametrize(
    ("length_s", "request_s", "ended", "left_s"),
    [(13.0, 8.0, 400, 8.0), (3.0, 1.0, 400, 3.0), (20.0, 3.0, 20, 18.0), (4.0, 5.0, 100, 4.0)],
)
def test_window_too_short_for_blocks_lasts_a_whole_number_of_requests(
    length_s, request_s, ended, left_s
):
    blocks = in_blocks(Span(0.0, length_s), request_s, ended)
    assert blocks.count == 0
    assert blocks.span == Span(length_s - left_s, length_s)


def test_requests_that_met_an_empty_server_are_not_looked_at():
    records = closed_loop(4, 40)
    looked_at = after_first_generation(records, 4)
    fourth_s = sorted(r.end_s for r in records)[3]
    assert 0 < len(looked_at) < len(records)
    assert all(record.send_s >= fourth_s for record in looked_at)
    assert after_first_generation(records[:3], 4) == []


def test_cut_leaves_out_a_slow_beginning():
    settled = np.random.default_rng(0).normal(100, 2, 30)
    assert least_error_cut(np.concatenate([[10, 30, 60, 80], settled])) in (4, 5, 6)


def test_cut_leaves_what_is_steady_nearly_whole():
    assert least_error_cut(np.full(20, 5.0)) == 0


def test_burst_at_the_beginning_is_no_ramp():
    values = np.random.default_rng(3).normal(100, 10, 40)
    values[2] = 150.0
    assert least_error_cut(values) == 0
