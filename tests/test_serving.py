"""Figures of a load: by hand, and against numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.metrics.serving import Span, percentiles, summarise
from tuner.types import Percentiles, RequestRecord, RequestStatus, SloLimit, SloMetric


def ok(index: int, send_s: float, times_s: list[float], output_tokens: int) -> RequestRecord:
    return RequestRecord(
        index=index,
        status=RequestStatus.OK,
        send_s=send_s,
        end_s=times_s[-1] + 0.5,
        prompt_tokens=10,
        output_tokens=output_tokens,
        token_times_s=tuple(times_s),
    )


def bad(status: RequestStatus, send_s: float, end_s: float, error: str) -> RequestRecord:
    return RequestRecord(
        index=9,
        status=status,
        send_s=send_s,
        end_s=end_s,
        prompt_tokens=100,
        output_tokens=100,
        token_times_s=(end_s,),
        error=error,
    )


def test_summarise_gives_the_figures_worked_out_by_hand() -> None:
    figures = summarise(
        [ok(0, 100.0, [101.0, 102.0, 104.0], 3), ok(1, 101.0, [104.0], 1)],
    )
    assert figures.window_s == pytest.approx(4.5)
    assert (figures.offered, figures.served, figures.rejected, figures.failed) == (2, 2, 0, 0)
    assert figures.request_throughput_per_s == pytest.approx(2 / 4.5)
    assert figures.output_throughput_tokens_per_s == pytest.approx(4 / 4.5)
    assert figures.input_throughput_tokens_per_s == pytest.approx(20 / 4.5)
    assert figures.ttft_s is not None
    assert figures.ttft_s.mean == pytest.approx(2.0)  # 1 and 3
    assert figures.ttft_s.p50 == pytest.approx(2.0)
    assert figures.tpot_s == Percentiles(1.5, 1.5, 1.5, 1.5)  # (4 - 1) / 2, one token: none
    assert figures.itl_s is not None
    assert figures.itl_s.p50 == pytest.approx(1.5)  # gaps of 1 and 2
    assert figures.itl_s.p90 == pytest.approx(1.9)
    assert figures.e2e_s is not None
    assert figures.e2e_s.mean == pytest.approx(3.5)  # 4 and 3, to the last token
    assert figures.first_error == ""


def test_summarise_counts_tokens_and_not_chunks_in_tpot() -> None:
    figures = summarise([ok(0, 0.0, [1.0, 3.0], output_tokens=5)])
    assert figures.tpot_s is not None
    assert figures.tpot_s.mean == pytest.approx(0.5)
    assert figures.itl_s is not None
    assert figures.itl_s.mean == pytest.approx(2.0)


def test_summarise_takes_no_output_from_requests_that_were_not_served() -> None:
    figures = summarise(
        [
            ok(0, 0.0, [1.0, 1.5], 2),
            bad(RequestStatus.SERVER_ERROR, 0.0, 8.0, "later"),
            bad(RequestStatus.REJECTED, 0.0, 3.0, "too long"),
            bad(RequestStatus.TIMEOUT, 0.0, 10.0, "timeout"),
        ]
    )
    assert (figures.offered, figures.served, figures.rejected, figures.failed) == (4, 1, 1, 2)
    assert figures.window_s == pytest.approx(10.0)
    assert figures.output_throughput_tokens_per_s == pytest.approx(0.2)
    assert figures.input_throughput_tokens_per_s == pytest.approx(1.0)
    assert figures.request_throughput_per_s == pytest.approx(0.1)
    assert figures.e2e_s == Percentiles(1.5, 1.5, 1.5, 1.5)
    assert figures.first_error == "too long"


def test_summarise_has_no_latencies_when_nothing_was_served() -> None:
    figures = summarise([bad(RequestStatus.SERVER_ERROR, 0.0, 2.0, "HTTP 500")])
    assert (figures.served, figures.failed) == (0, 1)
    assert figures.output_throughput_tokens_per_s == 0.0
    assert figures.ttft_s is figures.tpot_s is figures.itl_s is figures.e2e_s is None


def test_summarise_of_no_requests_is_zero() -> None:
    figures = summarise([])
    assert (figures.window_s, figures.offered) == (0.0, 0)
    assert figures.request_throughput_per_s == 0.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_numpys(values: list[float]) -> None:
    found = percentiles(values)
    assert found is not None
    assert found.mean == pytest.approx(np.mean(values))
    for quantile, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value == pytest.approx(np.percentile(values, quantile, method="linear"))


def test_percentiles_of_nothing_are_none() -> None:
    assert percentiles([]) is None


records = st.lists(
    st.builds(
        lambda status, send, gaps, tokens: RequestRecord(
            index=0,
            status=status,
            send_s=send,
            end_s=send + sum(gaps),
            prompt_tokens=7,
            output_tokens=tokens,
            token_times_s=tuple(send + float(t) for t in np.cumsum(gaps)),
        ),
        st.sampled_from(RequestStatus),
        st.floats(0, 1000),
        st.lists(st.floats(0, 10), min_size=1, max_size=20),
        st.integers(1, 40),
    ),
    max_size=30,
)


@given(records)
def test_summarise_agrees_with_numpy_on_any_load(load: list[RequestRecord]) -> None:
    figures = summarise(load)
    served = [record for record in load if record.status is RequestStatus.OK]
    assert figures.offered == figures.served + figures.rejected + figures.failed == len(load)
    assert figures.output_throughput_tokens_per_s * figures.window_s == pytest.approx(
        sum(record.output_tokens for record in served) if figures.window_s else 0.0
    )
    expected = {
        "ttft_s": [r.token_times_s[0] - r.send_s for r in served],
        "e2e_s": [r.token_times_s[-1] - r.send_s for r in served],
        "itl_s": [b - a for r in served for a, b in pairwise(r.token_times_s)],
        "tpot_s": [
            (r.token_times_s[-1] - r.token_times_s[0]) / (r.output_tokens - 1)
            for r in served
            if r.output_tokens > 1
        ],
    }
    for name, values in expected.items():
        found = getattr(figures, name)
        if not values:
            assert found is None
            continue
        assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
        assert found.p99 == pytest.approx(np.percentile(values, 99), abs=1e-9)


# --- over a window ------------------------------------------------------------------------


def test_window_counts_what_comes_after_its_start_and_up_to_its_end() -> None:
    """It begins and ends with an answer: of four answers in a row, three came in three seconds."""
    answers = [ok(n, n, [n + 0.25, n + 0.5], 2) for n in range(4)]  # they end at 1, 2, 3, 4
    figures = summarise(answers, Span(1.0, 4.0))
    assert figures.steady
    assert figures.window_s == 3.0
    assert figures.request_throughput_per_s == pytest.approx(1.0)
    assert figures.output_throughput_tokens_per_s == pytest.approx(2.0)
    assert figures.input_throughput_tokens_per_s == pytest.approx(10.0)
    assert (figures.offered, figures.served) == (4, 4)


def test_latencies_are_of_the_requests_that_were_due_in_the_window() -> None:
    answers = [ok(n, n, [n + 0.1 * (n + 1)], 1) for n in range(4)]
    figures = summarise(answers, Span(1.0, 2.5))
    assert figures.ttft_s is not None
    assert figures.ttft_s.mean == pytest.approx(0.25)  # 0.2 and 0.3


def test_slo_is_judged_by_the_requests_that_were_due_in_the_window() -> None:
    answers = [ok(n, n, [n + 0.1 * (n + 1)], 1) for n in range(4)]
    unserved = bad(RequestStatus.TIMEOUT, 2.0, 2.4, "late")
    limit = SloLimit(SloMetric.TTFT, 0.25, 50)
    figures = summarise([*answers, unserved], Span(1.0, 2.5), [limit])
    assert figures.slo_kept == pytest.approx(1 / 3)  # 0.2, and neither 0.3 nor the unserved
    assert figures.slo_missed == {"ttft_p50": 2}
    assert figures.slo_reached_s == {"ttft_p50": pytest.approx(0.3)}
    plain = summarise(answers)
    assert (plain.slo_kept, plain.slo_missed) == (None, {})
