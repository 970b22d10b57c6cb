"""`tuner diagnose`: files, pipes, JSON, a terminal that a log must not command."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from builders import study_spec
from rich.console import Console

from tuner.cli import main
from tuner.engine.diagnosis import diagnose
from tuner.records import TrialRecord, TrialState
from tuner.report.diagnosis import diagnosis_document, print_diagnosis, shown_numbers
from tuner.report.documents import trial_document
from tuner.report.plain import plain, plain_line
from tuner.report.trial import print_trial
from tuner.types import EngineConfig, Failure, FailureCause, Stage

LOGS = Path(__file__).parent / "data" / "logs"
TOO_SMALL = LOGS / "cpu_0.32_kv_too_small.log"
COMMAND = [sys.executable, "-m", "tuner.cli", "diagnose"]
KEYS = ["cause", "stage", "blame", "retry", "line", "numbers", "advice", "vllm_version", "excerpt"]
KEYS += ["starts", "earlier"]


def call(*arguments):
    """Run a command in this process; its exit code."""
    try:
        main(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def as_json(capsys, *arguments):
    assert call("diagnose", "--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


def shown(diagnosis, width=80, terminal=False):
    sink = open(os.devnull, "w")  # noqa: SIM115
    console = Console(width=width, record=True, file=sink, force_terminal=terminal)
    print_diagnosis(console, diagnosis)
    console.file.close()
    return console.export_text()


# --- where the log comes from ----------------------------------------------------------


def test_json_has_the_promised_fields(capsys):
    document = as_json(capsys, str(TOO_SMALL))
    assert list(document) == KEYS
    assert document["cause"] == "kv_too_small"
    assert document["stage"] == "kv_allocation"
    assert document["blame"] == "configuration"
    assert document["retry"] is False
    assert document["numbers"]["estimated_max_model_len_tokens"] == 224
    assert document["advice"][0] == "set max-model-len to at most 224: that is what fits now"
    assert document["vllm_version"] == "0.32.0"
    assert document["line"] in " ".join(document["excerpt"].split())


def test_gzip_and_utf16_are_read(capsys, tmp_path):
    packed, wide = tmp_path / "server.log.gz", tmp_path / "powershell.log"
    packed.write_bytes(gzip.compress(TOO_SMALL.read_bytes()))
    wide.write_bytes(TOO_SMALL.read_text(encoding="utf-8").encode("utf-16"))
    expected = as_json(capsys, str(TOO_SMALL))
    assert as_json(capsys, str(packed)) == expected
    assert as_json(capsys, str(wide)) == expected


def test_standard_input_is_read(tmp_path):
    done = subprocess.run(
        [*COMMAND, "-", "--json"], input=TOO_SMALL.read_bytes(), capture_output=True, check=True
    )
    assert json.loads(done.stdout)["cause"] == "kv_too_small"
    assert done.stderr == b""


def test_exit_code_counts_where_the_log_is_silent(capsys, tmp_path):
    log = tmp_path / "silent.log"
    log.write_text("vLLM API server version 0.11.0\n")
    assert as_json(capsys, str(log))["cause"] == "none"
    assert as_json(capsys, str(log), "--exit-code", "-9")["cause"] == "host_oom"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no file"),
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: path.write_bytes(gzip.compress(b"x" * 9999)[:30]), "cannot be read"),
    ],
)
def test_unreadable_log_is_one_message_and_exit_code_2(capsys, tmp_path, make, message):
    path = tmp_path / "server.log"
    make(path)
    assert call("diagnose", str(path)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert "Traceback" not in said.err


# --- ends ------------------------------------------------------------------------------


def test_interrupt_while_reading_ends_with_130():
    process = subprocess.Popen(
        [*COMMAND, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    # More than a pipe holds: when it is written, the command is reading.
    process.stdin.write(b"vLLM\n" * 100_000)
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_reader_that_leaves_early_is_no_error():
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*COMMAND, str(TOO_SMALL)], stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


# --- what is shown ---------------------------------------------------------------------


def test_text_names_the_verdict_the_numbers_and_the_steps():
    text = shown(diagnose([TOO_SMALL.read_bytes()]), width=200)
    lines = text.splitlines()
    assert lines[0] == (
        "kv_too_small while allocating the KV cache (vLLM 0.32.0): "
        "the configuration is to blame, a retry does not help"
    )
    assert lines[1].startswith("ValueError: To serve at least one request")
    assert "estimated max model len 224 tokens" in lines[2]
    assert "What to change:" in lines
    assert " 1. set max-model-len to at most 224: that is what fits now" in lines


def test_steps_fit_a_narrow_terminal():
    text = shown(diagnose([TOO_SMALL.read_bytes()]), width=40, terminal=True)
    steps = text.split("What to change:")[1].split("The log around it")[0].strip("\n")
    assert max(map(len, steps.splitlines())) <= 40
    assert "    that is what fits now" in steps.splitlines()


def test_what_goes_into_a_pipe_is_not_wrapped():
    found = diagnose([TOO_SMALL.read_bytes()])
    assert shown(found, width=40) == shown(found, width=400)


def test_advice_stands_before_few_lines_of_the_log():
    for log in (TOO_SMALL, *sorted((LOGS / "corpus").glob("unknown_*.log"))):
        found = diagnose([log.read_bytes()], 1)
        head, _, tail = shown(found, width=200).partition("The log around it")
        lines = tail.splitlines()[1:]
        assert found.advice[-1] in head
        assert 0 < len(lines) <= 10
        assert max(map(len, lines)) <= 402
        assert any(found.line[:40] in line for line in lines) or found.line.startswith("exit code")


@pytest.mark.parametrize(
    ("log", "heading"),
    [
        (TOO_SMALL, "What to change:"),
        (LOGS / "cpu_0.32_port_in_use.log", "What to do:"),
        (LOGS / "corpus" / "unknown_0.8.5.log", "What to do:"),
    ],
)
def test_heading_of_the_steps_fits_the_blame(log, heading):
    assert heading in shown(diagnose([log.read_bytes()], 1)).splitlines()


def test_headline_counts_the_starts():
    port = (LOGS / "cpu_0.32_port_in_use.log").read_bytes()
    text = shown(diagnose([TOO_SMALL.read_bytes() * 2 + port]))
    assert text.splitlines()[0] == (
        "3 starts in this log; the last one: port_in_use while starting Python and importing vLLM "
        "(vLLM 0.32.0): the environment is to blame, a retry may help; before: kv_too_small x2"
    )


def test_json_counts_the_starts(capsys, tmp_path):
    log = tmp_path / "loop.log"
    port = (LOGS / "cpu_0.32_port_in_use.log").read_bytes()
    log.write_bytes(TOO_SMALL.read_bytes() * 2 + port)
    document = as_json(capsys, str(log))
    assert document["cause"] == "port_in_use"
    assert document["starts"] == 3
    assert document["earlier"] == ["kv_too_small", "kv_too_small"]


def test_unknown_phase_is_shown_as_such():
    line = "(EngineCore pid=1) ERROR 12-01 06:13:32 [core.py:1] CUDA out of memory."
    assert shown(diagnose([line.encode()])).splitlines()[0] == (
        "out of device memory, phase unknown: this is only a part of a log; give the whole log"
    )


def test_use_of_the_exit_code_is_shown():
    text = shown(diagnose([TOO_SMALL.read_bytes()], 1))
    assert "exit code 1: not needed, the log says why" in text.splitlines()


def test_healthy_log_is_one_line():
    text = shown(diagnose([(LOGS / "cpu_0.32_ok.log").read_bytes()]))
    assert text == "none (vLLM 0.32.0): no failure in it; it ends while serving\n"


HOSTILE = (
    b"vLLM API server version 0.11.0\n"
    b"\x1b]0;title\x07\x1b[2J\x1b[31m[bold red]markup[/bold red] [/]\x1b[0m\x00\x08\x9b31m\xff\n"
    b"token: hf_abcdefgh\x1b[1mijklmnopqrstuvwxyz\n"
    b"Traceback (most recent call last):\n"
    b"strange.Error: \xed\xa0\x80 [link=file:///x]name[/link] --api-key=geheim123\n"
)


def test_log_does_not_command_the_terminal():
    text = shown(diagnose([HOSTILE]), width=200)
    assert "[bold red]markup[/bold red] [/]" in text
    assert "[link=file:///x]name[/link]" in text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "title" not in text


def test_secrets_are_masked_also_where_colours_cut_them():
    diagnosis = diagnose([HOSTILE])
    for text in (shown(diagnosis), json.dumps(diagnosis_document(diagnosis))):
        assert "geheim123" not in text
        assert "abcdefgh" not in text
        assert "ijklmnop" not in text


def test_json_is_strict_for_any_bytes():
    for data in (HOSTILE, bytes(range(256)) * 4, b"CUDA out of memory. Tried to allocate 9" * 99):
        text = json.dumps(diagnosis_document(diagnose([data])), allow_nan=False, ensure_ascii=False)
        text.encode("utf-8")  # no lone surrogates


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("a\x1b[1;31mb\x1b[0mc", "abc"),
        ("a\x1b]8;;http://x\x1b\\b", "ab"),
        ("a\x1bcb", "ab"),
        ("a\x1b", "a"),
        ("a\u202eb\x7f\x85", "ab"),
        ("a\tb\nc", "a b\nc"),
        ("a\udc80b", "a?b"),
    ],
)
def test_plain_keeps_the_words_alone(text, harmless):
    assert plain(text) == harmless


def test_plain_line_is_one_line():
    assert plain_line(" a \n\n b\r\nc") == "a b c"


def test_numbers_are_shown_with_their_units():
    numbers = {"needed_gib": 24.0, "tried_to_allocate_gib": 28.49 / 1024, "max_num_seqs": 1024.0}
    assert shown_numbers(numbers) == (
        "needed 24 GiB, tried to allocate 28.49 MiB, max num seqs 1024"
    )


# --- a trial that failed ---------------------------------------------------------------


def failed_trial():
    spec = study_spec()
    return TrialRecord(
        number=3,
        state=TrialState.INFEASIBLE,
        params={"max-num-seqs": 128},
        config=EngineConfig({**spec.server.args, "max-num-seqs": 128}),
        is_reference=False,
        score=0.0,
        constraints={},
        outcome=Failure(FailureCause.OOM_RUNTIME, Stage.LOAD, "\x1b[31mCUDA out of memory."),
        directory=None,
        effective={"gpu-memory-utilization": 0.92, "max-num-seqs": 128},
    )


def test_show_prints_what_to_change(capsys):
    print_trial(Console(width=200), failed_trial(), [])
    text = capsys.readouterr().out
    assert "advice          1. lower gpu-memory-utilization from 0.92 to 0.87" in text
    assert "lower max-num-seqs from 128 to 64" in text
    assert "enforce-eager:" not in text  # it is set
    assert "\x1b" not in text


def test_show_document_carries_the_advice():
    steps = trial_document(failed_trial(), [])["advice"]
    assert any("max-num-seqs from 128 to 64" in step for step in steps)
