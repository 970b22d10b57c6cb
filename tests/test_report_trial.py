"""What `tuner show`, `tuner status` and the end of a run say of a trial, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import builders
import pytest
from rich.console import Console

from tuner import cli
from tuner.export.deployment import best_deployment
from tuner.export.record import json_record
from tuner.records import Attempt, StudyRecord, StudyState, TrialRecord, TrialState
from tuner.report.console import outcome_line, print_status, print_summary
from tuner.report.documents import status_document, trial_document, trial_summary
from tuner.report.measured import estimate_note
from tuner.report.trial import print_trial
from tuner.stopping import Ending
from tuner.types import EngineConfig, Failure, FailureCause, JsonValue, MeasureEnd, Stage

BUSY = Attempt(
    FailureCause.DEVICE_BUSY,
    Stage.LAUNCH,
    "\x1b[31mFree memory on device\n is less",
    "started again after 5 s for the device to be free",
    4,
)
MOVED = Attempt(FailureCause.CRASH, Stage.READY, "Engine core died", "started again", 2)
KV = Failure(
    FailureCause.KV_TOO_SMALL,
    Stage.KV_ALLOCATION,
    "To serve at least one request",
    {"needed_gib": 24.0, "available_gib": 3.18, "max_model_len_tokens": 32768.0},
)


def trial(number: int = 4, args: Mapping[str, JsonValue] | None = None) -> TrialRecord:
    return TrialRecord(
        number=number,
        state=TrialState.MEASURED,
        params=dict(args or {}),
        config=EngineConfig(dict(args or {})),
        is_reference=False,
        score=800.0,
        constraints={},
        outcome=builders.measurement(),
        directory=None,
    )


def overridden(number: int = 4) -> TrialRecord:
    return replace(trial(number, {"async-scheduling": True}), effective={"async-scheduling": False})


def study(*trials: TrialRecord) -> StudyRecord:
    return StudyRecord("s", builders.study_spec(), StudyState.FINISHED, trials, {})


def shown(found: TrialRecord, *others: TrialRecord) -> str:
    console = Console(width=300, record=True)
    print_trial(console, found, [found, *others])
    return console.export_text()


# --- settings without effect ---------------------------------------------------------------


def test_show_names_a_setting_without_effect() -> None:
    text = "async-scheduling=true has no effect: vLLM takes false instead"
    assert f"no effect       {text}" in shown(overridden())
    assert "no effect" not in shown(trial())
    document = trial_document(overridden(), [])
    assert document["no_effect"] == [
        {
            "parameter": "async-scheduling",
            "why": "vLLM takes a value of its own instead",
            "text": text,
        }
    ]
    assert trial_document(trial(), [])["no_effect"] == []


def test_show_compares_a_trial_with_the_others_of_its_study() -> None:
    memory = replace(builders.measurement().memory, kv_cache_tokens=4096, kv_cache_gib=2.0)
    outcome = builders.measurement(memory=memory)
    narrow = replace(trial(4, {"kv-cache-dtype": "fp8"}), outcome=outcome)
    wide = replace(trial(2, {"kv-cache-dtype": "auto"}), outcome=outcome)
    assert "as with auto (trial 2)" in shown(narrow, wide)
    assert trial_document(narrow, [wide])["no_effect"] != []
    assert trial_document(narrow, [])["no_effect"] == []


@pytest.mark.parametrize("ending", [None, Ending.TRIALS])
def test_end_of_a_run_and_status_name_settings_without_effect(ending: Ending | None) -> None:
    console = Console(width=200, record=True)
    print_summary(console, study(overridden()), ending)
    note = "note: async-scheduling had no effect in trial 4: vLLM takes a value of its own instead"
    assert note in console.export_text()
    print_status(console, study(overridden()))
    assert console.export_text().count(note) == 1


def test_show_command_compares_with_the_other_trials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = replace(builders.measurement().memory, kv_cache_tokens=4096, kv_cache_gib=2.0)
    outcome = builders.measurement(memory=memory)
    narrow = replace(trial(4, {"kv-cache-dtype": "fp8"}), outcome=outcome)
    wide = replace(trial(2, {"kv-cache-dtype": "auto"}), outcome=outcome)
    monkeypatch.setattr(cli, "_read", lambda *_: study(wide, narrow))
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["show", "s", "4", *words])
        assert ended.value.code == 0
        assert "(trial 2)" in " ".join(capsys.readouterr().out.split())


def test_status_document_names_settings_without_effect() -> None:
    assert status_document(study(overridden(1), trial(2), overridden(3)))["no_effect"] == [
        {
            "parameter": "async-scheduling",
            "why": "vLLM takes a value of its own instead",
            "trials": [1, 3],
        }
    ]


# --- starts before the last one --------------------------------------------------------------


def test_show_has_a_row_for_each_failed_start() -> None:
    text = shown(replace(trial(), attempts=(BUSY, MOVED)))
    assert (
        "attempt 1       device_busy while starting Python and importing vLLM: "
        "Free memory on device is less; "
        "started again after 5 s for the device to be free\n"
    ) in text
    assert (
        "attempt 2       crash while serving: Engine core died; started again "
        "(its log is in the folder of no. 2)\n"
    ) in text
    assert "attempt" not in shown(trial())


def test_show_document_has_each_failed_start() -> None:
    assert trial_document(trial(), [])["attempts"] == []
    assert trial_document(replace(trial(), attempts=(BUSY,)), [])["attempts"] == [
        {
            "cause": "device_busy",
            "stage": "launch",
            "line": "Free memory on device is less",
            "then": "started again after 5 s for the device to be free",
            "trial": 4,
        }
    ]


def test_export_as_json_has_attempts_and_effects() -> None:
    best = replace(overridden(), attempts=(BUSY,))
    document = json.loads(json_record(best_deployment(study(best), None)))
    assert document["trial"]["attempts"][0]["cause"] == "device_busy"
    assert document["trial"]["no_effect"][0]["parameter"] == "async-scheduling"


# --- in words --------------------------------------------------------------------------------


def test_failure_is_told_with_the_words_and_units_of_diagnose() -> None:
    failed = replace(trial(), state=TrialState.INFEASIBLE, score=0.0, outcome=KV)
    text = shown(failed)
    assert "failure         kv_too_small while allocating the KV cache\n" in text
    assert "numbers         needed 24 GiB, available 3.18 GiB, max model len 32768 tokens\n" in text
    assert outcome_line(failed) == (
        "kv_too_small while allocating the KV cache: To serve at least one request"
    )


def test_line_of_a_failure_has_no_escape_sequences() -> None:
    failed = replace(trial(), outcome=replace(KV, line="\x1b[31mno\x1b[0m room"))
    assert outcome_line(failed).endswith(": no room")


# --- estimates ---------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [MeasureEnd.WORSE, MeasureEnd.SATURATED, MeasureEnd.TIME])
def test_summary_says_that_the_best_is_an_estimate(end: MeasureEnd) -> None:
    cut = replace(trial(), outcome=replace(builders.measurement(), end=end))
    console = Console(width=200, record=True)
    print_summary(console, study(cut), None)
    assert "The figures of the best (no. 4) are an estimate: " in console.export_text()
    assert "(estimate)" in outcome_line(cut)
    assert trial_summary(cut)["estimate"] is True
    assert estimate_note(study(cut)) in best_deployment(study(cut), None).evidence()


@pytest.mark.parametrize("end", [MeasureEnd.COMPLETE, MeasureEnd.PRECISE])
def test_summary_says_nothing_of_a_best_that_was_measured_in_full(end: MeasureEnd) -> None:
    full = replace(trial(), outcome=replace(builders.measurement(), end=end))
    assert estimate_note(study(full)) is None
    assert "estimate" not in outcome_line(full)
    assert trial_summary(full)["estimate"] is False
    assert estimate_note(study()) is None


def test_estimate_note_tells_why() -> None:
    cut = replace(trial(), outcome=replace(builders.measurement(), end=MeasureEnd.TIME))
    assert estimate_note(study(cut)) == (
        "The figures of the best (no. 4) are an estimate: the longest time to measure was over, "
        "and the requests in flight were cut off."
    )
