"""What `tuner check` supposes before anything was measured, and what it keeps to itself."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from builders import study_spec, workload
from rich.console import Console
from stand_in import COMMAND, FAST, write_tiny_model

from tuner import redact
from tuner.cli import main
from tuner.commands import check
from tuner.engine.config_check import ConfigAnswer, ConfigChecker
from tuner.findings import ASSUMED_PROBES, ASSUMED_START_S, ASSUMED_TPOT_S, Findings
from tuner.report.check import print_check
from tuner.types import FailureCause, MeasureSpec, Metric, ObjectiveSpec, StudySpec

CLOSED = workload(requests=400, concurrency=4)  # of 8 output tokens each
LOAD_S = 400 * 8 / 4 * ASSUMED_TPOT_S
OPEN = replace(CLOSED, concurrency=None, request_rate_per_s=10.0)
SEARCH = ObjectiveSpec(Metric.MAX_RATE)


def assumed_s(**changes: object) -> float:
    return check._assumed_trial_s(study_spec(**{"workload": CLOSED, **changes})) - ASSUMED_START_S


def test_assumed_time_of_one_load_and_of_several() -> None:
    assert assumed_s() == pytest.approx(LOAD_S)
    assert assumed_s(workload=replace(CLOSED, levels=(4.0, 8.0))) == pytest.approx(1.5 * LOAD_S)
    assert assumed_s(workload=OPEN) == pytest.approx(40.0, rel=0.05)


def test_assumed_time_of_a_search_for_the_highest_load_is_that_of_its_probes() -> None:
    assert assumed_s(objective=SEARCH) == pytest.approx(ASSUMED_PROBES * LOAD_S)


def test_assumed_time_of_each_load_is_cut_at_the_longest() -> None:
    short = MeasureSpec(time_s=5.0)
    assert assumed_s(measure=short) == 5.0
    assert assumed_s(measure=short, workload=OPEN) == 5.0
    assert assumed_s(measure=short, workload=replace(CLOSED, levels=(4.0, 8.0))) == 10.0
    assert assumed_s(measure=short, objective=SEARCH) == ASSUMED_PROBES * 5.0
    assert assumed_s(measure=MeasureSpec(time_s=9999.0)) == pytest.approx(LOAD_S)


def test_estimate_says_how_many_loads_it_supposes() -> None:
    assert "7 loads a trial" in printed(study_spec(objective=SEARCH))
    assert "loads a trial" not in printed(study_spec())


def printed(spec: StudySpec) -> str:
    out = io.StringIO()
    print_check(Console(file=out), Findings(spec, {}, (), {}, "", 1, 60.0, False, ()))
    return out.getvalue()


@pytest.mark.parametrize("accepted", [False, True], ids=["refused", "unknown"])
def test_errors_of_vllm_that_quote_a_secret_are_masked(
    accepted: bool,
    in_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tiny_model(in_tmp / "model")
    secret = "swordfish-4711"
    document = {
        "server": {
            "command": COMMAND,
            "model": "./model",
            "env": {**FAST, "HF_TOKEN": secret},
        },
        "search_space": {"max-num-seqs": [2, 4]},
        "workload": {
            "kind": "synthetic",
            "input_tokens": 8,
            "output_tokens": 8,
            "requests": 4,
            "concurrency": 2,
        },
        "budget": {"trials": 2},
    }
    Path("space.yaml").write_text(yaml.safe_dump(document))

    async def quotes(_checker: ConfigChecker, *_: object) -> ConfigAnswer:
        error = f"1 validation error [type=value_error, input_value='{secret}']"
        return ConfigAnswer(accepted=accepted, cause=FailureCause.BAD_CONFIG, error=error)

    monkeypatch.setattr(ConfigChecker, "ask", quotes)
    monkeypatch.setattr(redact, "_remembered", set())
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["check", "space.yaml", *words])
        assert ended.value.code == 0
        captured = capsys.readouterr()
        assert "validation error" in captured.out
        assert secret not in captured.out + captured.err
    json.loads(captured.out)
