"""What is handed out: YAML, shell and JSON, and the check by vLLM before."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from builders import measurement, study_spec

from tuner.engine.config_check import Difference, FileAnswer
from tuner.errors import EnvironmentProblem, InputError, NoResult
from tuner.export import export_best
from tuner.records import StudyRecord, StudyState, TrialRecord, TrialState
from tuner.types import EngineConfig, Failure, FailureCause, ServerSpec, Stage

SERVER = ServerSpec(
    ("vllm", "serve"),
    "org/model",
    {"enable-prefix-caching": False},
    {"HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz", "VLLM_LOGGING_LEVEL": "it's loud"},
    60.0,
)
BEST_ARGS = {
    "enable-prefix-caching": False,
    "max-num-seqs": 16,
    "kv-cache-dtype": "fp8",
    "compilation-config": {"cudagraph_mode": "FULL"},
    "kv-offloading-size": 0,
}


class Reading:
    """Stands for vLLM's parser; keeps what it was shown."""

    def __init__(self, answer: FileAnswer) -> None:
        self.answer = answer
        self.seen: dict[str, object] = {}

    async def check_file(self, path: Path, meant: list[str]) -> FileAnswer:
        self.seen = {"file": yaml.safe_load(path.read_text()), "meant": meant}
        return self.answer


def trial(number, args, throughput, *, is_reference=False, effective=None):
    return TrialRecord(
        number=number,
        state=TrialState.MEASURED,
        params={name: args[name] for name in ("max-num-seqs", "kv-cache-dtype") if name in args},
        config=EngineConfig(args, SERVER.env),
        is_reference=is_reference,
        score=throughput,
        constraints={},
        outcome=measurement(throughput=throughput),
        directory=None,
        effective=effective or {},
    )


REFERENCE = trial(0, dict(SERVER.args), 500.0, is_reference=True)
BEST = trial(3, BEST_ARGS, 620.0, effective={"gpu-memory-utilization": 0.92})


def study(*trials):
    spec = study_spec(server=SERVER)
    return StudyRecord("chat", spec, StudyState.FINISHED, trials, {"vLLM": "0.32.0"})


def export(record, form="yaml", answer=None):
    reading, notices = Reading(answer or FileAnswer(accepted=True)), []
    text = asyncio.run(export_best(record, form, None, reading, notices.append))
    return text, reading, notices


def test_export_yaml_holds_model_and_every_flag():
    text, reading, _ = export(study(REFERENCE, BEST))
    assert (
        yaml.safe_load(text)
        == reading.seen["file"]
        == {
            "model": "org/model",
            "no-enable-prefix-caching": True,  # vLLM drops `enable-prefix-caching: false`
            "max-num-seqs": 16,
            "kv-cache-dtype": "fp8",
            "compilation-config": {"cudagraph_mode": "FULL"},
        }
    )


def test_export_yaml_tells_its_evidence_and_the_defaults_it_leaves():
    text, _, _ = export(study(REFERENCE, BEST))
    assert "trial 3" in text
    assert "620.0 output tokens/s" in text
    assert "Score +24.0% over the reference: output tokens/s +24.0%" in text
    assert "gpu-memory-utilization=0.92" in text


def test_export_compares_with_the_command_that_was_measured():
    _, reading, _ = export(study(REFERENCE, BEST))
    meant = reading.seen["meant"]
    assert meant[:3] == ["vllm", "serve", "org/model"]
    assert "--no-enable-prefix-caching" in meant
    assert "--kv-offloading-size" not in meant


@pytest.mark.parametrize("form", ["yaml", "shell", "json"])
def test_export_never_shows_a_secret(form):
    text, _, _ = export(study(REFERENCE, BEST), form)
    assert "hf_abc" not in text


def test_export_shell_runs_with_its_arguments_quoted(tmp_path):
    record = study(REFERENCE, BEST)
    spec = replace(record.spec, server=replace(SERVER, command=("./show args", "serve")))
    text, _, _ = export(replace(record, spec=spec), "shell")
    shower = tmp_path / "show args"
    shower.write_text('#!/bin/sh\necho "$VLLM_LOGGING_LEVEL"; for a in "$@"; do echo "$a"; done\n')
    shower.chmod(0o755)
    script = tmp_path / "serve.sh"
    script.write_text(text)
    env = {**os.environ, "HF_TOKEN": "mine"}
    ran = subprocess.run(
        ["bash", str(script), "--port", "8000"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines() == [
        "it's loud", "serve", "org/model", "--no-enable-prefix-caching", "--max-num-seqs", "16",
        "--kv-cache-dtype", "fp8", "--compilation-config", '{"cudagraph_mode": "FULL"}',
        "--port", "8000",
    ]  # fmt: skip


def test_export_shell_asks_for_a_secret_it_does_not_hold(tmp_path):
    text, _, _ = export(study(REFERENCE, BEST), "shell")
    script = tmp_path / "serve.sh"
    script.write_text(text)
    env = {k: v for k, v in os.environ.items() if k != "HF_TOKEN"}
    ran = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True)
    assert ran.returncode != 0
    assert "HF_TOKEN" in ran.stderr


def test_export_json_is_the_whole_record():
    document = json.loads(export(study(REFERENCE, BEST), "json")[0])
    assert document["flags"]["max-num-seqs"] == 16
    assert document["trial"]["measurement"]["output_throughput_tokens_per_s"] == 620.0
    assert document["reference"]["number"] == 0
    assert document["gain"] == pytest.approx(0.24)
    assert document["versions"] == {"vLLM": "0.32.0"}


def test_export_says_when_the_reference_is_the_best():
    text, _, _ = export(study(REFERENCE, trial(1, BEST_ARGS, 400.0)))
    assert "The reference is the best" in text
    assert "max-num-seqs" not in yaml.safe_load(text)


def test_export_of_a_study_without_a_result_is_exit_4():
    failure = Failure(FailureCause.KV_NO_BLOCKS, Stage.KV_ALLOCATION, "No available memory")
    failed = replace(REFERENCE, state=TrialState.INFEASIBLE, outcome=failure, score=0.0)
    with pytest.raises(NoResult) as caught:
        export(study(failed))
    assert caught.value.exit_code == 4


def test_export_refuses_an_unknown_format():
    with pytest.raises(InputError, match="toml"):
        export(study(REFERENCE, BEST), "toml")


def test_export_is_not_handed_out_when_vllm_refuses_it():
    with pytest.raises(EnvironmentProblem, match="unrecognized arguments"):
        export(study(BEST), answer=FileAnswer(accepted=False, error="unrecognized arguments"))


def test_export_is_not_handed_out_when_vllm_reads_something_else():
    differences = {"enable-prefix-caching": Difference(in_file=True, meant=False)}
    with pytest.raises(EnvironmentProblem, match="enable-prefix-caching: meant False"):
        export(study(BEST), answer=FileAnswer(accepted=True, differences=differences))


def test_export_says_when_nobody_could_check_it():
    answer = FileAnswer(accepted=True, known=False, error="vLLM is not installed")
    _, _, notices = export(study(BEST), answer=answer)
    assert notices == ["not checked by vLLM: vLLM is not installed"]
