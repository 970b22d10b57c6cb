"""What a study writes is for its owner alone, and holds no secret in clear."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import yaml
from stand_in import COMMAND, FAST, write_tiny_model

from tuner import redact
from tuner.cli import main

TOKEN = "hf_" + "aB3" * 11 + "x"
SECRETS = {
    "a token of Hugging Face's form": TOKEN,
    "a secret flag": "plain-word-of-mine-1",
    "a password in a URL": "proxy-pass-3",
    "a key of the environment": "outer-word-4",
    "a token in the environment": "bare-token-5",
}

SPACE = {
    "study": "mine",
    "server": {
        "command": COMMAND,
        "model": "./model",
        "args": {
            "block-size": 32,
            "max-model-len": 512,
            "kv-cache-memory-bytes": "4MiB",
            "hf-token": SECRETS["a secret flag"],
        },
        "env": {
            **FAST,
            "HF_TOKEN": TOKEN,
            "MY_TOKEN": SECRETS["a token in the environment"],
            "HTTPS_PROXY": f"http://joe:{SECRETS['a password in a URL']}@127.0.0.1:1",
        },
    },
    "search_space": {"max-num-seqs": {"low": 2, "high": 64, "log": True}},
    "workload": {
        "kind": "synthetic",
        "input_tokens": 32,
        "output_tokens": 16,
        "requests": 8,
        "concurrency": 4,
        "warmup": 1,
    },
    "budget": {"trials": 2},
}


def call(*arguments):
    try:
        main(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


@pytest.fixture
def clean_memory(monkeypatch):
    monkeypatch.setattr(redact, "_remembered", set())


@pytest.fixture
def studied(in_tmp, monkeypatch, capsys, clean_memory):
    """A study with secrets in all places, made under an open umask; all that was shown."""
    monkeypatch.setenv("SOME_API_KEY", SECRETS["a key of the environment"])
    write_tiny_model(in_tmp / "model")
    Path("space.yaml").write_text(yaml.safe_dump(SPACE))
    before = os.umask(0o022)
    try:
        assert call("check", "space.yaml") == 0
        code = call("run", "space.yaml")
        call("status", "mine")
        call("status", "mine", "--json")
        for trial in ("0", "1"):
            call("show", "mine", trial)
            call("show", "mine", trial, "--json")
        for form in ("yaml", "shell", "json"):
            call("export", "mine", "--format", form)
    finally:
        os.umask(before)
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def files(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def modes(paths):
    return {str(path): oct(stat.S_IMODE(path.stat().st_mode)) for path in paths}


def test_study_is_private_and_keeps_no_secret(studied):
    code, shown = studied
    assert "8 of 8" in shown
    assert code == 0
    written = files("studies")
    assert {"study.db", "server.log", "launch.json", "outcome.json", "space.yaml"} <= {
        path.name for path in written
    }
    texts = {str(path): path.read_bytes().decode("utf-8", "replace") for path in written}
    texts["what was shown"] = shown
    found = [
        f"{what} in {where}"
        for where, text in texts.items()
        for what, secret in SECRETS.items()
        if secret in text
    ]
    assert found == []
    folders = [path for path in Path("studies").rglob("*") if path.is_dir()]
    assert set(modes([Path("studies"), *folders]).values()) == {"0o700"}
    assert {path: mode for path, mode in modes(written).items() if mode != "0o600"} == {}
    kept = yaml.safe_load(Path("studies/mine/space.yaml").read_text())
    assert kept["server"]["env"]["HF_TOKEN"] == "***"


def test_folder_that_exists_keeps_its_permissions(in_tmp):
    write_tiny_model(in_tmp / "model")
    space = {**SPACE, "server": {**SPACE["server"], "env": FAST}, "budget": {"trials": 1}}
    Path("space.yaml").write_text(yaml.safe_dump(space))
    Path("studies/mine").mkdir(parents=True)
    Path("studies").chmod(0o755)
    Path("studies/mine").chmod(0o750)
    call("run", "space.yaml")
    assert modes([Path("studies"), Path("studies/mine")]) == {
        "studies": "0o755",
        "studies/mine": "0o750",
    }
    assert modes([Path("studies/mine/study.db")]) == {"studies/mine/study.db": "0o600"}


def test_storage_url_is_shown_without_its_password(in_tmp, capsys):
    for url in (
        "postgresql://me:word-of-mine@127.0.0.1:1/db",
        "nonsense+driver://me:word-of-mine@host/db",
        "postgresql://me:word-of-mine@127.0.0.1:port/db",
    ):
        assert call("status", url) in (2, 3)
        captured = capsys.readouterr()
        assert "word-of-mine" not in captured.out + captured.err
        assert captured.err.startswith("error: ")
