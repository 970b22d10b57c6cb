"""The server's own histograms: by hand, and of the stand-in's page."""

from __future__ import annotations

import pytest
from stand_in import StandIn

from tuner.metrics.histograms import NAMES, latencies, parse, with_clients_means
from tuner.types import Percentiles, RequestRecord, RequestStatus, ServerLatencies

TTFT = "vllm:time_to_first_token_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"


def page(counts: dict[str, float], total: float, name: str = TTFT, engine: str = "0") -> str:
    """A histogram; `counts` up to each bound."""
    lines = [
        f'{name}_bucket{{engine="{engine}",le="{bound}"}} {count}'
        for bound, count in counts.items()
    ]
    lines += [
        f'{name}_count{{engine="{engine}"}} {counts["+Inf"]}',
        f'{name}_sum{{engine="{engine}"}} {total}',
    ]
    return f"# TYPE {name} histogram\n" + "\n".join(lines) + "\n"


BEFORE = page({"0.1": 5, "0.5": 10, "1.0": 10, "+Inf": 10}, 2.0)
AFTER = page({"0.1": 5, "0.5": 60, "1.0": 100, "+Inf": 110}, 72.0)


def test_window_is_the_difference_of_two_pages_and_its_mean_is_exact() -> None:
    found = latencies(parse(BEFORE), parse(AFTER)).ttft_s
    assert found is not None
    assert found.mean == pytest.approx(0.7)  # 70 s by 100 requests
    assert found.p50 == pytest.approx(0.5)  # the 50th is the last up to 0.5
    assert found.p90 == pytest.approx(1.0)
    assert found.p99 == pytest.approx(1.0)  # beyond the last bound: where that begins


def test_percentiles_are_interpolated_within_a_bucket() -> None:
    found = parse(page({"0.2": 0, "0.4": 100, "+Inf": 100}, 30.0))[TTFT].percentiles()
    assert found is not None
    assert (found.p50, found.p90) == pytest.approx((0.3, 0.38))


def test_engines_are_added_up() -> None:
    text = AFTER + page({"0.1": 5, "0.5": 60, "1.0": 100, "+Inf": 110}, 28.0, engine="1")
    found = parse(text)[TTFT]
    assert (found.count, found.total_s, found.buckets[0.5]) == (220, 100.0, 120)


def test_older_names_are_taken_where_the_newer_are_not() -> None:
    old = page({"0.05": 10, "+Inf": 10}, 0.3, name="vllm:time_per_output_token_seconds")
    new = page({"0.05": 10, "+Inf": 10}, 0.4, name=TPOT)
    assert latencies({}, parse(old)).tpot_s.mean == pytest.approx(0.03)  # type: ignore[union-attr]
    both = latencies({}, parse(old + new))
    assert both.tpot_s.mean == pytest.approx(0.04)  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["", "no page", AFTER.replace("72.0", "many"), "vllm:e2e{"])
def test_page_without_histograms_gives_none(text: str) -> None:
    assert latencies(parse(text), parse(text)) == ServerLatencies()


def test_nothing_in_between_gives_none() -> None:
    assert latencies(parse(AFTER), parse(AFTER)) == ServerLatencies()


def record(sent_s: float, times_s: tuple[float, ...], status: RequestStatus) -> RequestRecord:
    return RequestRecord(
        0, status, sent_s, sent_s + 9, 1, len(times_s), times_s, intended_s=sent_s - 5
    )


def test_clients_means_count_from_the_sending_of_served_requests() -> None:
    records = [
        record(1.0, (2.0, 3.0), RequestStatus.OK),
        record(2.0, (5.0, 7.0), RequestStatus.OK),
        record(0.0, (99.0,), RequestStatus.TIMEOUT),
        record(0.0, (), RequestStatus.REJECTED),
    ]
    own = ServerLatencies(ttft_s=Percentiles(1.0, 1.0, 1.0, 1.0))
    found = with_clients_means(own, records)
    assert (found.client_ttft_mean_s, found.client_e2e_mean_s) == (2.0, 3.5)
    assert found.ttft_s == own.ttft_s
    assert with_clients_means(own, records[2:]) == own


def test_page_of_the_stand_in_has_them() -> None:
    with StandIn("--max-model-len", "512", "--kv-cache-memory-bytes", "16M") as server:
        server.ready()
        before = parse(server.ask("GET", "/metrics")[1])
        for _ in range(3):
            server.post("/v1/completions", prompt="a b c", max_tokens=8, ignore_eos=True)
        query = "&".join(f"name[]={name}" for name in NAMES)
        narrow = parse(server.ask("GET", f"/metrics/?{query}")[1])
        whole = parse(server.ask("GET", "/metrics")[1])
    found = latencies(before, whole)
    assert latencies(before, narrow) == found
    assert found.ttft_s is not None
    assert found.e2e_s is not None
    assert 0 < found.ttft_s.mean < found.e2e_s.mean < 5
    assert found.tpot_s is not None
    assert 0 < found.tpot_s.mean < found.e2e_s.mean
