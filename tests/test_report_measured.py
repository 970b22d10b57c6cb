"""What `tuner show` and `tuner status` say of a measurement."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import builders
import pytest
from rich.console import Console

from tuner import cli
from tuner.measuring.kept import KeptRequest
from tuner.records import StudyRecord, StudyState, TrialRecord, TrialState
from tuner.report.console import outcome_line, print_summary
from tuner.report.documents import trial_summary
from tuner.report.measured import (
    broken_promises,
    disagreement,
    measurement_rows,
    promise_note,
)
from tuner.report.requests import print_requests, requests_document
from tuner.types import (
    ClientHealth,
    Interval,
    MeasureEnd,
    Measurement,
    Metric,
    ObjectiveSpec,
    Percentiles,
    RateProbe,
    RateSearch,
    RequestRecord,
    RequestStatus,
    ServerLatencies,
    SloLimit,
    SloMetric,
)

PLAIN = builders.measurement()
FULL = replace(
    PLAIN,
    steady=True,
    end=MeasureEnd.PRECISE,
    interval=Interval(784.0, 816.0),
    blocks=21,
    goodput_per_s=2.5,
    statuses={"ok": 30, "rejected": 1, "timeout": 1},
    client=ClientHealth(0.0021, 0.0, 0.45, 2),
    energy_j=1234.5,
)
RATE = RateSearch(
    12.5,
    Interval(11.0, 14.0),
    (RateProbe(8.0, 1.01, 200, True), RateProbe(16.0, 0.62, 90, False)),
)


MISSED = {"ttft_p99": 71, "tpot_p99": 12}
REACHED_S = {"ttft_p99": 0.658}
LIMITS = (SloLimit(SloMetric.TTFT, 0.2), SloLimit(SloMetric.TPOT, 0.05))


def rows(measured: Measurement) -> dict[str, str]:
    return dict(measurement_rows(measured))


def trial(measured: Measurement, score: float = 800.0) -> TrialRecord:
    return TrialRecord(
        number=3,
        state=TrialState.MEASURED,
        params={},
        config=None,
        is_reference=False,
        score=score,
        constraints={},
        outcome=measured,
        directory=None,
    )


def seconds(mean: float) -> Percentiles:
    return Percentiles(mean, mean, mean, mean)


# --- rows ----------------------------------------------------------------------------------


def test_rows_tell_how_long_and_how_surely_it_was_measured() -> None:
    told = rows(FULL)
    assert told["window"] == "10.0 s, without ramp-up and ramp-down"
    assert told["ended"] == "the score was known well enough"
    assert told["score lies"] == ("between 784.00 and 816.00 (±2.0%, 95% confidence, 21 blocks)")
    assert told["goodput"] == "2.50 requests/s within the SLO"
    assert told["requests"].endswith("(1 timeout)")
    assert told["client"] == (
        "2 processes, busy 45% of the time; p99: loop 2.1 ms late, requests sent 0.0 ms late"
    )
    assert told["energy"] == "1234 J of all devices, 0.154 J per output token"


def test_rows_of_a_small_measurement_say_that_all_of_it_counts() -> None:
    told = rows(PLAIN)
    assert told["window"] == "10.0 s, all of the load"
    assert told["ended"] == "all requests were sent"
    for label in ("score lies", "goodput", "client", "server's means", "highest load", "energy"):
        assert label not in told


@pytest.mark.parametrize("end", [MeasureEnd.WORSE, MeasureEnd.SATURATED, MeasureEnd.TIME])
def test_rows_say_that_the_figures_of_an_early_end_are_an_estimate(end: MeasureEnd) -> None:
    assert rows(replace(PLAIN, end=end))["ended"].endswith("the figures are an estimate")


def test_rows_of_a_search_tell_every_probe() -> None:
    told = rows(replace(PLAIN, rate=RATE))
    assert told["highest load"] == "12.5, between 11 and 14 (95% confidence)"
    assert told["probe 1"] == "8 meets the SLO: 101.0% of what it asks for, 200 requests"
    assert told["probe 2"] == "16 does not meet the SLO: 62.0% of what it asks for, 90 requests"


def test_rows_of_a_search_say_that_the_client_was_the_limit() -> None:
    limited = replace(RATE, limited_by="16/s could not be driven: its loop was late")
    assert "limited by" not in rows(replace(PLAIN, rate=RATE))
    assert rows(replace(PLAIN, rate=limited))["limited by"] == (
        "the client: 16/s could not be driven: its loop was late"
    )


def test_rows_tell_how_many_requests_kept_the_slo() -> None:
    kept = replace(PLAIN, slo_kept=0.48, slo_missed=MISSED, slo_reached_s=REACHED_S)
    assert rows(kept)["SLO"] == "48% of requests; missed ttft_p99 71, tpot_p99 12"
    assert rows(replace(PLAIN, slo_kept=1.0, slo_missed={"ttft_p99": 0}))["SLO"] == (
        "100% of requests"
    )
    assert "SLO" not in rows(PLAIN)


def test_broken_promises_are_told_with_what_was_promised() -> None:
    kept = replace(PLAIN, slo_kept=0.48, slo_missed=MISSED, slo_reached_s=REACHED_S)
    assert broken_promises(kept, LIMITS) == (
        "ttft_p99 is 658 ms, promised 200 ms; "
        "tpot_p99 is none, because too few were served, promised 50 ms"
    )
    fine = replace(kept, slo_reached_s={"ttft_p99": 0.2, "tpot_p99": 0.04})
    assert broken_promises(fine, LIMITS) == ""
    assert broken_promises(PLAIN, LIMITS) == ""


def test_note_warns_of_a_best_that_breaks_its_promise() -> None:
    kept = replace(PLAIN, slo_kept=0.9, slo_missed={"ttft_p99": 7}, slo_reached_s=REACHED_S)
    spec = builders.study_spec(objective=ObjectiveSpec(Metric.GOODPUT, slo=LIMITS[:1]))
    study = StudyRecord("s", spec, StudyState.FINISHED, (replace(trial(kept), number=7),), {})
    assert promise_note(study) == (
        "The best (no. 7) does not keep the SLO: ttft_p99 is 658 ms, promised 200 ms."
    )
    assert promise_note(replace(study, trials=(trial(PLAIN),))) is None
    assert promise_note(replace(study, trials=())) is None


def test_rows_of_several_loads_tell_each() -> None:
    told = rows(replace(PLAIN, levels=(PLAIN, replace(PLAIN, ttft_s=None))))
    assert "800.0 output tokens/s" in told["load 1"]
    assert "TTFT p99 40 ms" in told["load 1"]
    assert "TTFT p99 -" in told["load 2"]


def test_rows_show_the_servers_own_means_beside() -> None:
    own = ServerLatencies(seconds(0.02), seconds(0.01), seconds(0.5), 0.021, 0.51)
    told = rows(replace(PLAIN, server=own))
    assert told["server's means"].startswith("TTFT 20.0 ms, TPOT 10.0 ms, E2E 500.0 ms")
    assert "they disagree" not in told
    odd = replace(own, client_ttft_mean_s=0.2)
    assert rows(replace(PLAIN, server=odd))["they disagree"] == (
        "TTFT 200.0 ms seen by the client, 20.0 ms by the server"
    )


@pytest.mark.parametrize(
    ("server_s", "client_s", "agrees"),
    [
        (0.1, 0.125, True),
        (0.1, 0.14, False),
        (2.0, 2.2, True),
        (2.0, 2.5, False),
        (2.5, 2.0, False),
    ],
)
def test_disagreement_begins_beyond_what_lies_between_the_clocks(
    server_s: float, client_s: float, agrees: bool
) -> None:
    found = disagreement(ServerLatencies(e2e_s=seconds(server_s), client_e2e_mean_s=client_s))
    assert (found == "") is agrees


def test_disagreement_needs_both() -> None:
    assert disagreement(ServerLatencies(ttft_s=seconds(1.0))) == ""
    assert disagreement(ServerLatencies(client_ttft_mean_s=1.0)) == ""


# --- one line ------------------------------------------------------------------------------


def test_line_has_the_interval_beside_the_score_and_the_goodput() -> None:
    line = outcome_line(trial(FULL))
    assert line.startswith("score 800.0 ±2.0%, 800.0 tok/s")
    assert "goodput 2.50/s" in line


def test_line_marks_an_estimate() -> None:
    assert outcome_line(trial(replace(FULL, end=MeasureEnd.WORSE))).startswith(
        "score 800.0 ±2.0% (estimate), "
    )


def test_line_of_a_search_has_the_loads_between_which_it_lies() -> None:
    line = outcome_line(trial(replace(PLAIN, rate=RATE), 12.5))
    assert line.startswith("score 12.5 (11 to 14), ")


def test_line_of_a_search_says_that_the_client_was_the_limit() -> None:
    limited = replace(PLAIN, rate=replace(RATE, limited_by="16/s could not be driven"))
    line = outcome_line(trial(limited, 12.5))
    assert line.startswith("score 12.5 (11 to 14, a bound of the load, not of the server), ")


def test_summary_tells_the_share_in_the_slo_and_a_broken_promise() -> None:
    kept = replace(PLAIN, slo_kept=0.9, slo_missed={"ttft_p99": 7}, slo_reached_s=REACHED_S)
    spec = builders.study_spec(objective=ObjectiveSpec(Metric.GOODPUT, slo=LIMITS[:1]))
    study = StudyRecord("s", spec, StudyState.FINISHED, (trial(kept),), {})
    out = io.StringIO()
    print_summary(Console(file=out, width=100), study, None)
    assert any(line.split() == ["in", "the", "SLO", "-", "90%"] for line in _lines(out))
    assert "ttft_p99 is 658 ms, promised 200 ms" in out.getvalue()
    out = io.StringIO()
    print_summary(Console(file=out, width=100), replace(study, trials=(trial(PLAIN),)), None)
    assert "SLO" not in out.getvalue()


def _lines(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


def test_line_without_an_interval_is_as_ever() -> None:
    assert outcome_line(trial(PLAIN)).startswith("score 800.0, 800.0 tok/s, 0 preempted")


def test_summary_document_has_interval_and_end() -> None:
    document = trial_summary(trial(FULL))
    assert document["score_interval"] == [784.0, 816.0]
    assert (document["end"], document["goodput"]) == ("precise", 2.5)
    assert trial_summary(trial(replace(PLAIN, rate=RATE)))["score_interval"] == [11.0, 14.0]


# --- requests ------------------------------------------------------------------------------

SERVED = RequestRecord(7, RequestStatus.OK, 1.5, 2.0, 16, 3, (1.75, 1.875, 2.0), intended_s=1.25)
REFUSED = RequestRecord(8, RequestStatus.REJECTED, 3.0, 3.1, error="HTTP 400:\x1b[31m no")
KEPT = [KeptRequest(0, SERVED), KeptRequest(1, REFUSED)]


def test_requests_are_printed_a_line_each() -> None:
    out = io.StringIO()
    print_requests(Console(file=out, width=40), KEPT)
    head, first, second = out.getvalue().splitlines()
    assert head.split()[:3] == ["load", "request", "status"]
    assert first.split() == ["0", "7", "ok", "1.250", "250.0", "500.0", "125.0", "750.0", "16", "3"]
    assert second.split()[:7] == ["1", "8", "rejected", "3.000", "0.0", "-", "-"]
    assert second.endswith(" 0      0  HTTP 400: no")


def test_requests_are_printed_with_the_limits_that_they_missed() -> None:
    out = io.StringIO()
    print_requests(Console(file=out, width=40), KEPT, LIMITS)
    head, first, second = out.getvalue().splitlines()
    assert head.split()[-2:] == ["SLO", "error"]
    assert first.split()[-1] == "ttft_p99,tpot_p99"
    assert second.endswith(" ttft_p99,tpot_p99  HTTP 400: no")
    loose = (SloLimit(SloMetric.TTFT, 9.0),)
    out = io.StringIO()
    print_requests(Console(file=out, width=40), KEPT, loose)
    assert out.getvalue().splitlines()[1].split()[-1] == "kept"
    first, second = requests_document(KEPT, loose)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (first["slo_missed"], second["slo_missed"]) == ([], ["ttft_p99"])


def test_requests_document_has_all_that_is_known() -> None:
    first, second = requests_document(KEPT)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (first["load"], first["index"], first["status"]) == (0, 7, "ok")
    assert (first["due_s"], first["ttft_s"], first["tpot_s"], first["e2e_s"]) == (
        1.25,
        0.5,
        0.125,
        0.75,
    )
    assert first["token_times_s"] == [1.75, 1.875, 2.0]
    assert (second["ttft_s"], second["error"]) == (None, "HTTP 400:\x1b[31m no")


def test_requests_of_a_trial_without_any_are_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = replace(trial(PLAIN), directory=tmp_path)
    record = StudyRecord("s", builders.study_spec(), StudyState.STOPPED, (empty,), {})
    monkeypatch.setattr(cli, "_read", lambda *_: record)
    with pytest.raises(SystemExit) as ended:
        cli.main(["show", "s", "3", "--requests"])
    assert ended.value.code == 2
    assert "no such file" in capsys.readouterr().err


def test_requests_of_a_trial_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = replace(trial(PLAIN), directory=tmp_path)
    spec = builders.study_spec(objective=ObjectiveSpec(Metric.GOODPUT, slo=LIMITS))
    record = StudyRecord("s", spec, StudyState.STOPPED, (kept,), {})
    monkeypatch.setattr(cli, "_read", lambda *_: record)
    monkeypatch.setattr("tuner.measuring.kept.read_requests", lambda _: iter(KEPT))
    for words, shown in (([], "ttft_p99,tpot_p99"), (["--json"], '"rejected"')):
        with pytest.raises(SystemExit) as ended:
            cli.main(["show", "s", "3", "--requests", *words])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert shown in out
    assert [request["index"] for request in json.loads(out)] == [7, 8]
    assert json.loads(out)[1]["slo_missed"] == ["ttft_p99", "tpot_p99"]
