"""What is said of a file: against numpy, and in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.cli import main
from tuner.load.traces.prefixes import PrefixCount
from tuner.load.traces.reading import TraceStream
from tuner.load.traces.statistics import Exceeding, TraceSummary, describe
from tuner.load.traces.trace import TraceRequest

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def burst(rows: list[tuple[float, int, int]]) -> str:
    lines = (f"{time!r},m,{sent},{got},{sent + got},x\n" for time, sent, got in rows)
    return BURST + "".join(lines)


def summary_of(tmp_path: Path, content: Any, *contexts: int) -> TraceSummary:
    path = tmp_path / "file"
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_text(content)
    return describe(TraceStream(path), contexts or (100,))


tokens = st.integers(1, 2**31 - 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), tokens, tokens), min_size=1, max_size=30))
def test_describe_agrees_with_numpy(tmp_path: Path, rows: list[tuple[float, int, int]]) -> None:
    found = summary_of(tmp_path, burst(rows), 2**31)
    for lengths, column in ((found.input_tokens, 1), (found.output_tokens, 2)):
        recorded = np.array([row[column] for row in rows])
        assert lengths is not None
        assert lengths.mean == pytest.approx(recorded.mean())
        expected = np.percentile(recorded, [50, 90, 99])
        assert (lengths.p50, lengths.p90, lengths.p99) == pytest.approx(tuple(expected))
        assert lengths.max == recorded.max()
    times = np.array([row[0] for row in rows])
    assert found.duration_s == pytest.approx(np.ptp(times))
    assert found.exceeding == (Exceeding(2**31, sum(sent + got > 2**31 for _, sent, got in rows)),)


@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_burstiness_is_the_shape_of_gamma_gaps(tmp_path: Path, shape: float) -> None:
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.gamma(shape, 1 / (2 * shape), 20_000))
    found = summary_of(tmp_path, burst([(float(time), 1, 1) for time in times]))
    assert found.burstiness == pytest.approx(shape, rel=0.08)
    assert found.request_rate_per_s == pytest.approx(2, rel=0.05)


def test_times_that_say_nothing_are_none(tmp_path: Path) -> None:
    even = summary_of(tmp_path, burst([(0.1 * n, 1, 1) for n in range(50)]))
    assert (even.request_rate_per_s, even.burstiness) == (pytest.approx(10), None)
    tied = summary_of(tmp_path, burst([(5, 1, 1), (5, 1, 1)]))
    assert (tied.duration_s, tied.request_rate_per_s, tied.burstiness) == (0, None, None)
    untimed = summary_of(tmp_path, [{"prompt": "P"}])
    assert (untimed.duration_s, untimed.request_rate_per_s) == (None, None)


def test_rows_out_of_order_are_sorted_and_counted(tmp_path: Path) -> None:
    found = summary_of(tmp_path, burst([(9, 1, 1), (5, 1, 1), (6, 1, 1)]))
    assert (found.duration_s, found.out_of_order) == (4, 2)


def test_lengths_of_texts_are_estimates(tmp_path: Path) -> None:
    found = summary_of(tmp_path, [{"prompt": "x" * 400, "output_tokens": 1}, {"prompt": "y" * 40}])
    assert found.estimated_tokens
    assert found.input_tokens.max == 100
    assert found.output_tokens is not None
    assert found.output_tokens.mean == 1
    assert found.exceeding == (Exceeding(100, 1),)  # an unknown answer has at least one token
    recorded = summary_of(tmp_path, burst([(1, 2, 3)]))
    assert not recorded.estimated_tokens


def test_unknown_outputs_are_none(tmp_path: Path) -> None:
    assert summary_of(tmp_path, [{"prompt": "x"}]).output_tokens is None


# --- shared prefixes ---------------------------------------------------------------------


def shared(*requests: TraceRequest) -> float | None:
    count = PrefixCount()
    for request in requests:
        count.add(request)
    return count.fraction()


def blocks(tokens: int, *ids: int) -> TraceRequest:
    return TraceRequest(1, None, tokens, 1, hash_ids=ids)


def said(text: str) -> TraceRequest:
    return TraceRequest(1, None, None, None, prompt=text)


def test_shared_prefix_counts_blocks_that_came_before(tmp_path: Path) -> None:
    assert shared(blocks(1000, 1, 2), blocks(1100, 1, 2, 3)) == pytest.approx(1024 / 2100)
    assert shared(blocks(600, 1, 2), blocks(600, 1, 2)) == pytest.approx(0.5)


def test_shared_prefix_ends_at_the_first_new_block() -> None:
    assert shared(blocks(1024, 1, 2), blocks(1536, 1, 9, 2)) == pytest.approx(512 / 2560)
    assert shared(blocks(1024, 1, 2), blocks(512, 2)) == 0


def test_shared_prefix_does_not_count_a_block_within_its_own_prompt() -> None:
    assert shared(blocks(1536, 1, 1, 1)) == 0


def test_shared_prefix_of_texts_is_by_whole_blocks_of_characters() -> None:
    system = "s" * 64 + "t" * 64
    assert shared(said(system + "a" * 72), said(system + "b" * 72)) == pytest.approx(128 / 400)
    assert shared(said("x" * 63), said("x" * 63)) == 0


def test_shared_prefix_of_lengths_alone_is_unknown() -> None:
    assert shared(TraceRequest(1, 0.0, 5, 5), blocks(512, 1)) is None


# --- memory ------------------------------------------------------------------------------


MEASURE = """
import re, sys
from pathlib import Path
from tuner.load.traces.reading import TraceStream
from tuner.load.traces.statistics import describe

def highest_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

describe(TraceStream(Path(sys.argv[1])))
before = highest_kib()
found = describe(TraceStream(Path(sys.argv[2])))
print(found.requests, found.refused.total, highest_kib() - before)
"""


def test_describe_of_many_rows_keeps_few_bytes_of_each(tmp_path: Path) -> None:
    rows = 300_000
    short, long = tmp_path / "short.csv", tmp_path / "long.csv"
    short.write_text(burst([(1, 2, 3)]))
    with long.open("w") as file:
        file.write(BURST)
        file.writelines(f"{n},m,{n % 3000 + 1},{n % 50},9,API log\n" for n in range(rows))
    shown = subprocess.run(
        [sys.executable, "-c", MEASURE, str(short), str(long)],
        capture_output=True,
        text=True,
        check=True,
    )
    requests, refused, kib = map(int, shown.stdout.split())
    assert (requests, refused) == (rows * 49 // 50, rows // 50)
    assert kib * 1024 < 80 * rows  # as objects they would take more than 200 bytes each


def test_describe_of_a_list_in_one_line_does_not_hold_it(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "Q" * 500}, {"from": "gpt", "value": "A"}]}
    path = tmp_path / "list.json"
    path.write_text(json.dumps([row] * 10_000))
    tracemalloc.start()
    try:
        assert describe(TraceStream(path)).requests == 10_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 3


# --- the command -------------------------------------------------------------------------

MIXED = [
    {"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [1, 2]},
    {"timestamp": 1000, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]},
    {"timestamp": 4000, "input_length": 600, "output_length": 30, "hash_ids": [1]},
    {"timestamp": 3000, "input_length": 100, "output_length": 30, "hash_ids": [7]},
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MIXED))
    return str(path)


def test_workload_json_has_the_promised_keys(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main_ok("workload", trace, "--json", "--max-model-len", "615", "--max-model-len", "100")
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "file": trace,
        "format": "mooncake",
        "requests": 3,
        "refused": 1,
        "refused_reasons": {"hash_ids do not fit input_length": 1},
        "input_tokens": {
            "mean": pytest.approx(1300 / 3),
            "p50": 600,
            "p90": 600,
            "p99": 600,
            "max": 600,
        },
        "output_tokens": {
            "mean": 20,
            "p50": 20,
            "p90": pytest.approx(28),
            "p99": pytest.approx(29.8),
            "max": 30,
        },
        "estimated_tokens": False,
        "duration_s": 3,
        "request_rate": pytest.approx(2 / 3),
        "burstiness": pytest.approx(1.5**2 / 0.25),
        "shared_prefix_fraction": pytest.approx(600 / 1300),
        "exceeding": [
            {"max_model_len": 100, "requests": 3},
            {"max_model_len": 615, "requests": 1},
        ],
        "untimed": 0,
        "out_of_order": 0,
    }


def test_workload_says_what_was_refused_and_what_is_estimated(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main_ok("workload", trace)
    shown = capsys.readouterr().out
    assert "mooncake, 3 requests, 1 rows refused" in shown
    assert "46.2% of the input begins as an earlier request did" in shown
    assert "hash_ids do not fit input_length (first in line 3)" in shown
    assert "longer than max-model-len 2048: 0" in shown
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "Why?"}\n')
    main_ok("workload", str(texts))
    shown = capsys.readouterr().out
    assert "4 characters a token" in shown
    assert "arrivals: not in the file" in shown


def test_workload_of_an_unknown_format_name_is_refused(trace: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["workload", trace, "--format", "nonsense"])
    assert leaving.value.code == 2


def main_ok(*arguments: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(list(arguments))
    assert leaving.value.code == 0
