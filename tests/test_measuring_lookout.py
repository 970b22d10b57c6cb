"""What is known of a load, and what its judges make of it."""

from __future__ import annotations

from dataclasses import replace

import builders
import numpy as np
import pytest

from tuner.load.request import Request
from tuner.measuring.finished import Finished, figures, is_even, typical_s, wrong_length
from tuner.measuring.judges import ScoreJudge, SloJudge, TimeJudge
from tuner.measuring.lookout import Lookout, Seen, counters_within
from tuner.metrics.page import GENERATION_TOKENS, PREEMPTIONS, PROMPT_TOKENS, WAITING, Snapshot
from tuner.metrics.serving import Span
from tuner.types import (
    ArrivalKind,
    DeviceUse,
    MeasureEnd,
    MeasureSpec,
    MemoryFacts,
    ObjectiveSpec,
    RequestRecord,
    RequestStatus,
    SloLimit,
    SloMetric,
)

CONCURRENCY = 4
TOKENS = 10
PLAIN = ObjectiveSpec()
TTFT = SloLimit(SloMetric.TTFT, 0.5, percentile=90.0)


def request(index: int, send_s: float, ttft_s: float = 0.1) -> RequestRecord:
    """Of one second and ten tokens."""
    times_s = tuple(np.linspace(send_s + ttft_s, send_s + 1.0, TOKENS).tolist())
    return RequestRecord(index, RequestStatus.OK, send_s, times_s[-1], 20, TOKENS, times_s)


def records(seconds: int, ttft_s: float = 0.1) -> list[RequestRecord]:
    """Four at a time, a quarter of a second apart: 40 tokens a second."""
    return [request(n, n / CONCURRENCY, ttft_s) for n in range(seconds * CONCURRENCY)]


def samples(seconds: int, waiting: float = 0.0, per_s: float = 40.0) -> list[Snapshot]:
    """Four a second."""
    found = []
    for place in range(4 * seconds + 1):
        at_s = place / 4
        values = {
            PREEMPTIONS[0]: 2 * at_s,
            GENERATION_TOKENS[0]: per_s * at_s,
            PROMPT_TOKENS[0]: 80 * at_s,
            WAITING[0]: waiting * at_s,
        }
        found.append(Snapshot({name: {(): value} for name, value in values.items()}, at_s))
    return found


def seen(
    now_s: float, known: list[RequestRecord], looks: list[Snapshot], sent: int | None = None
) -> Seen:
    ended = [record for record in known if record.end_s <= now_s]
    by_now = sum(record.send_s <= now_s for record in known) if sent is None else sent
    return Seen(now_s, now_s, by_now, ended, [look for look in looks if look.at_s <= now_s])


def test_lookout_sees_each_record_once_however_often_it_looks() -> None:
    known, looks = records(30), samples(30)
    at_once, bit_by_bit = Lookout((), CONCURRENCY), Lookout((), CONCURRENCY)
    at_once.see(known, looks)
    for count in (1, 7, 50, 120):
        bit_by_bit.see(known[:count], looks[:count])
    bit_by_bit.see(known, looks)
    one, other = at_once.steady_blocks(29.0), bit_by_bit.steady_blocks(29.0)
    assert one is not None
    assert other is not None
    assert one == other
    assert at_once.blocks(one) == bit_by_bit.blocks(other)


def test_blocks_have_the_servers_tokens_and_how_requests_ended() -> None:
    lookout = Lookout((TTFT,), CONCURRENCY)
    lookout.see(records(30), samples(30, per_s=44.0))
    cuts = lookout.steady_blocks(29.0)
    assert cuts is not None
    assert cuts.whole
    first, *_ = lookout.blocks(cuts)
    assert first.output_tokens / first.seconds == pytest.approx(44.0)
    assert first.input_tokens / first.seconds == pytest.approx(80.0)
    assert first.preemptions == pytest.approx(2 * first.seconds)
    assert first.good == first.served == first.ended > 0


def test_counters_within_are_those_between_the_readings_nearest_to_it() -> None:
    found = counters_within(samples(30), Span(10.1, 20.1))
    assert found.generation_tokens == 400
    assert found.preemptions == 20
    instant = counters_within(samples(30), Span(10.0, 10.01))
    assert instant.generation_tokens == 0


# --- judges --------------------------------------------------------------------------------


def test_score_judge_ends_once_the_score_is_known() -> None:
    judge = ScoreJudge(MeasureSpec(), PLAIN, CONCURRENCY, None)
    known, looks = records(60), samples(60)
    ends = [judge.end(seen(float(now), known, looks)) for now in range(1, 30)]
    assert ends[:8] == [None] * 8  # not before there are blocks
    assert MeasureEnd.PRECISE in ends
    assert judge.known.startswith("score 26.7 ±")  # 40 tokens/s, one preemption to two answers


@pytest.mark.parametrize(("incumbent", "end"), [(40.0, MeasureEnd.WORSE), (27.0, None)])
def test_score_judge_gives_up_what_is_clearly_worse(
    incumbent: float, end: MeasureEnd | None
) -> None:
    judge = ScoreJudge(MeasureSpec(precision=0.0), PLAIN, CONCURRENCY, incumbent)
    assert judge.end(seen(30.0, records(60), samples(60))) is end


def saturating(judge: ScoreJudge | SloJudge, waiting: float) -> list[MeasureEnd | None]:
    looks, known = samples(40, waiting=waiting), records(40)
    return [judge.end(seen(float(n), known, looks, sent=8 * n)) for n in range(1, 40)]


def test_score_judge_ends_where_requests_only_wait_longer() -> None:
    spec = MeasureSpec(precision=0.0)
    assert MeasureEnd.SATURATED in saturating(ScoreJudge(spec, PLAIN, None, None), 4.0)
    assert set(saturating(ScoreJudge(spec, PLAIN, None, None), 0.0)) == {None}


def test_closed_loop_is_never_saturated() -> None:
    judge = ScoreJudge(MeasureSpec(precision=0.0), PLAIN, CONCURRENCY, None)
    assert set(saturating(judge, 4.0)) == {None}


def test_slo_judge_is_sure_of_a_load_that_meets_it() -> None:
    judge = SloJudge((TTFT,), MeasureSpec(), CONCURRENCY)
    assert judge.end(seen(0.5, records(60), [])) is None
    assert judge.end(seen(5.0, records(60), [])) is None  # too few for 90 % at 99.9 %
    assert judge.end(seen(50.0, records(60), [])) is MeasureEnd.PRECISE
    assert judge.known == "111% of the SLO"


def test_slo_judge_is_sure_of_a_load_that_does_not() -> None:
    judge = SloJudge((TTFT,), MeasureSpec(), CONCURRENCY)
    assert judge.end(seen(10.0, records(60, ttft_s=0.6), [])) is MeasureEnd.WORSE


def test_slo_judge_does_not_hold_the_first_generation_against_a_closed_loop() -> None:
    """All of it was sent at once, and waited for one another."""
    known = [request(n, 0.0, ttft_s=0.9) for n in range(CONCURRENCY)] + [
        replace(record, index=record.index + CONCURRENCY)
        for record in records(60)
        if record.send_s >= 1.0
    ]
    judge = SloJudge((TTFT,), MeasureSpec(), CONCURRENCY)
    ends = [judge.end(seen(float(now), known, [])) for now in range(1, 55)]
    assert MeasureEnd.WORSE not in ends
    assert MeasureEnd.PRECISE in ends


def test_slo_judge_ends_a_saturated_open_loop() -> None:
    judge = SloJudge((replace(TTFT, limit_s=0.1001),), MeasureSpec(), None)
    assert MeasureEnd.SATURATED in saturating(judge, 4.0)


@pytest.mark.parametrize("now_s", [9.0, 10.0])
def test_every_judge_ends_when_the_time_is_over(now_s: float) -> None:
    spec = MeasureSpec(precision=0.0, time_s=10.0)
    wanted = MeasureEnd.TIME if now_s == 10.0 else None
    now = seen(now_s, records(1), samples(20))
    for judge in (
        ScoreJudge(spec, PLAIN, CONCURRENCY, None),
        SloJudge((TTFT,), spec, CONCURRENCY),
        TimeJudge(spec),
    ):
        assert judge.end(now) is wanted


# --- the figures ---------------------------------------------------------------------------


def finished(end: MeasureEnd, until_s: float | None = None) -> Finished:
    known, looks = records(60), samples(61)
    if until_s is not None:
        known = [record for record in known if record.end_s <= until_s]
        looks = [look for look in looks if look.at_s <= until_s]
    return Finished(known, looks, builders.counters(), end, until_s)


SPEC = builders.workload(requests=240, concurrency=CONCURRENCY)


def test_figures_are_of_the_steady_part_and_carry_the_interval_of_the_score() -> None:
    found, span = figures(
        finished(MeasureEnd.COMPLETE), SPEC, PLAIN, MeasureSpec(), MemoryFacts(), DeviceUse()
    )
    assert span is not None
    assert found.window_s == pytest.approx(span.length_s)
    assert found.steady
    assert found.output_throughput_tokens_per_s == pytest.approx(40.0, rel=0.01)
    assert found.counters.preemptions == pytest.approx(2 * found.window_s, abs=1.0)
    assert found.interval is not None
    assert found.interval.low <= 40 / 1.5 <= found.interval.high
    assert found.blocks >= 8


def test_figures_of_a_load_that_was_cut_off_miss_nothing_of_its_end() -> None:
    """Without the tokens in flight the last second would be some 20 tokens short."""
    found, _ = figures(
        finished(MeasureEnd.TIME, until_s=12.0),
        SPEC,
        PLAIN,
        MeasureSpec(),
        MemoryFacts(),
        DeviceUse(),
    )
    assert found.end is MeasureEnd.TIME
    assert found.output_throughput_tokens_per_s == pytest.approx(40.0)
    assert found.input_throughput_tokens_per_s == pytest.approx(80.0)


def test_figures_of_a_ramp_are_of_all_of_it() -> None:
    ramp = replace(SPEC, concurrency=None, request_rate_per_s=4.0, arrivals=ArrivalKind.RAMP)
    assert not is_even(ramp)
    assert is_even(replace(ramp, arrivals=ArrivalKind.POISSON))
    found, span = figures(
        finished(MeasureEnd.COMPLETE), ramp, PLAIN, MeasureSpec(), MemoryFacts(), DeviceUse()
    )
    assert span is None
    assert not found.steady
    assert found.interval is None
    assert found.counters == builders.counters()


# --- what voids it -------------------------------------------------------------------------


def asked(tokens: int, *, exactly: bool = True) -> list[Request]:
    return [Request(n, (1, 2), 2, tokens, ignore_eos=exactly) for n in range(8)]


def test_answers_shorter_than_asked_for_are_told_with_both_lengths() -> None:
    told = wrong_length(records(2), asked(16))
    assert "10.0 tokens on average, 16.0 were asked for" in told


def test_answers_about_as_long_as_asked_for_are_fine() -> None:
    assert wrong_length(records(2), asked(TOKENS)) == ""
    assert wrong_length(records(2), asked(16, exactly=False)) == ""
    assert wrong_length([], asked(16)) == ""


def test_typical_request_is_the_median_of_the_served() -> None:
    assert typical_s(records(2)) == pytest.approx(1.0)
    assert typical_s([]) == 0.0
