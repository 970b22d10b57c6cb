"""Secrets stay out of records, everything else stays as it is."""

from __future__ import annotations

import errno
import os
import tracemalloc

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tuner import redact
from tuner.redact import (
    redact_argv,
    redact_env,
    redact_file,
    redact_json,
    redact_text,
    redact_yaml,
    remember_secrets,
    secrets_of,
)

HF = "hf_" + "aB3" * 11 + "x"
SK = "sk-" + "q1W_" * 8


def test_redact_env_masks_names_that_speak_of_secrets() -> None:
    env = {
        "HF_TOKEN": "anything",
        "HUGGING_FACE_HUB_TOKEN": "x",
        "VLLM_API_KEY": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "DB_PASSWORD": "1234",
        "AWS_ACCESS_KEY_ID": "id",
        "AZURE_STORAGE_KEY": "a",
    }
    assert set(redact_env(env).values()) == {"***"}


def test_redact_env_keeps_what_only_sounds_like_one() -> None:
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        "MAX_TOKENS": "100",
        "VLLM_LONG_TOKEN_THRESHOLD": "512",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "KEYBOARD": "de",
        "MY_KEYS_ORDER": "1",
        "MONKEY": "x",
        "HF_TOKEN": "",
    }
    assert redact_env(env) == env


def test_redact_env_masks_secrets_inside_other_values() -> None:
    env = {"HTTPS_PROXY": "http://joe:pass@proxy:3128", "EXTRA": f"--x {HF}"}
    assert redact_env(env) == {"HTTPS_PROXY": "http://joe:***@proxy:3128", "EXTRA": "--x ***"}


@pytest.mark.parametrize(
    ("argv", "masked"),
    [
        (["--api-key", "abc", "--port", "1"], ["--api-key", "***", "--port", "1"]),
        (["--api-key", "a", "b", "--x"], ["--api-key", "***", "***", "--x"]),
        (["--encryption-key", "abc", "--port"], ["--encryption-key", "***", "--port"]),
        (["--api-key=abc"], ["--api-key=***"]),
        (["--hf_token", "abc"], ["--hf_token", "***"]),
        (["--ssl-keyfile-password", "abc"], ["--ssl-keyfile-password", "***"]),
        (["serve", HF], ["serve", "***"]),
        (["--model-config", f'{{"token": "{SK}"}}'], ["--model-config", '{"token": "***"}']),
    ],
)
def test_redact_argv_masks(argv: list[str], masked: list[str]) -> None:
    assert redact_argv(argv) == masked


def test_redact_argv_keeps_ordinary_commands() -> None:
    argv = [
        *("vllm", "serve", "./models/tiny", "--max-num-batched-tokens", "2048"),
        *("--tokenizer", "./models/tiny", "--return-tokens-as-token-ids", "--hf-overrides"),
        *('{"rope_scaling": {"factor": 2}}', "--long-prefill-token-threshold", "512"),
    ]
    assert redact_argv(argv) == argv


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"token {HF} used", "token *** used"),
        (f"key={SK}.", "key=***."),
        ("https://user:pw@host/x", "https://user:***@host/x"),
        ("https://abcdef@host/x", "https://***@host/x"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer ***"),
        ("{'api_key': ['one', 'two'], 'port': 1}", "{'api_key': ***, 'port': 1}"),
        ('"password": "a b"', '"password": "***"'),
        ("HF_TOKEN=abc vllm serve", "HF_TOKEN=*** vllm serve"),
        ("vllm serve m --api-key abc --port 1", "vllm serve m --api-key *** --port 1"),
        ("serve --api-key one 't w o' three --port 1", "serve --api-key *** *** *** --port 1"),
        ("key nvapi-" + "aB3_" * 8, "key ***"),
        ("with glpat-" + "aB3-" * 5 + "x", "with ***"),
        ("github_pat_" + "aB3" * 8, "***"),
        (
            "GET https://b.s3.host/m?X-Amz-Credential=AB%2F1&X-Amz-Date=2&X-Amz-Signature=0f0f",
            "GET https://b.s3.host/m?X-Amz-Credential=***&X-Amz-Date=2&X-Amz-Signature=***",
        ),
        ("AZURE_STORAGE_KEY=abc== vllm serve", "AZURE_STORAGE_KEY=*** vllm serve"),
    ],
)
def test_redact_text_masks(text: str, masked: str) -> None:
    assert redact_text(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens=2048, hf_overrides={}, hf_token=None",
        "GPU KV cache size: 1,024 tokens, Maximum concurrency for 512 tokens per request: 2.00x",
        "cache_key=ab12 monkey: 1 KEY=2",
        "tokens: 5, eos_token: '</s>'",
        "see https://docs.vllm.ai/en/latest/configuration/serve_args.html @ noon",
    ],
)
def test_redact_text_keeps_what_is_no_secret(text: str) -> None:
    assert redact_text(text) == text


@given(st.text())
def test_redact_text_never_raises_and_is_stable(text: str) -> None:
    once = redact_text(text)
    assert redact_text(once) == once


@given(st.text(alphabet="abcdefgABCDEFG0123456789", min_size=20, max_size=40))
def test_redact_text_never_leaves_a_hugging_face_token(secret: str) -> None:
    assert secret not in redact_text(f"x hf_{secret} y=hf_{secret}")


@pytest.mark.parametrize(
    "document",
    [
        "server:\n  env:\n    HF_TOKEN: hf_abcdefghijklmnopqrstuv\n    A: 1\n",
        "env: {HF_TOKEN: hf_abcdefghijklmnopqrstuv, A: 1}\n",
        'env: {HF_TOKEN: "hf_abcdefghijklmnopqrstuv", A: 1}\n',
        "env: {HF_TOKEN: 'hf_abcdefghijklmnopqrstuv'}\n",
        "HF_TOKEN: hf_abcdefghijklmnopqrstuv",
        "args: [hf_abcdefghijklmnopqrstuv, b]",
        "proxy: http://me:secret@host/x\n",
    ],
)
def test_redact_yaml_masks_and_stays_yaml(document):
    masked = redact_yaml(document)
    assert "abcdef" not in masked
    assert "secret" not in masked
    before, after = yaml.safe_load(document), yaml.safe_load(masked)
    assert before.keys() == after.keys()
    assert "***" in str(after)


@pytest.fixture
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(redact, "_remembered", set())


@pytest.mark.usefixtures("nothing_remembered")
def test_remembered_secrets_are_masked_wherever_they_stand():
    remember_secrets(
        {"HF_TOKEN": "plain-words-1", "HTTPS_PROXY": "http://joe:pass-word-2@host:1"},
        {"api-key": ["first-key-3", "second-key-4"], "max-num-seqs": 128},
    )
    text = "said plain-words-1, pass-word-2, first-key-3 and second-key-4 to joe at host:1"
    assert redact_text(text) == "said ***, ***, *** and *** to joe at host:1"


@pytest.mark.usefixtures("nothing_remembered")
def test_remember_secrets_leaves_common_words_alone():
    remember_secrets(
        {
            "HF_TOKEN_PATH": "/root/.cache/huggingface/token",
            "AWS_SHARED_CREDENTIALS_FILE": "/root/.aws/credentials",
            "X_TOKEN_KIND": "default",
            "HF_TOKEN": "short",
            "MAX_TOKENS": "4096",
            "SOME_SECRET": "",
        }
    )
    text = "default: 4096 tokens in /root/.cache/huggingface/token, short"
    assert redact_text(text) == text


def test_secrets_of_finds_those_in_lists_and_mappings():
    settings = {"api-key": ["a1", "b2"], "config": {"password": "c3", "port": 1}, "seed": 4}
    assert secrets_of(settings) == ["a1", "b2", "c3"]


def test_redact_json_masks_every_text_and_keeps_the_rest():
    value = {"line": f"bad token {HF}", "numbers": {"a": 1.5}, "rows": [HF, None, True]}
    assert redact_json(value) == {
        "line": "bad token ***",
        "numbers": {"a": 1.5},
        "rows": ["***", None, True],
    }


@pytest.mark.usefixtures("nothing_remembered")
def test_redact_file_masks_lines_and_keeps_other_bytes(tmp_path):
    remember_secrets({"MY_TOKEN": "quoted-bare-5"})
    log = tmp_path / "server.log"
    log.write_bytes(
        b"\xff\xfe no text\r\nargs: {'api_key': ['one']}\n\x1b[31mgot quoted-bare-5\x1b[0m\n"
        b"--hf-token two --port 1\nAuthorization: Bearer abcdefgh\nAvg throughput: 3 tokens/s\n"
    )
    assert redact_file(log)
    assert log.read_bytes() == (
        b"\xff\xfe no text\r\nargs: {'api_key': ***}\n\x1b[31mgot ***\x1b[0m\n"
        b"--hf-token *** --port 1\nAuthorization: Bearer ***\nAvg throughput: 3 tokens/s\n"
    )
    assert log.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["server.log"]


def test_redact_file_leaves_a_log_without_secrets_as_it_is(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("Avg prompt throughput: 12.0 tokens/s\n" * 3)
    before = log.stat()
    assert not redact_file(log)
    assert log.stat().st_ino == before.st_ino
    assert not redact_file(tmp_path / "none.log")


@given(st.text())
def test_redact_file_hint_misses_nothing_that_redact_text_masks(text):
    for line in text.splitlines():
        for sentence in (
            line,
            f"{line} hf_{'a' * 20}",
            f"{line} token={line} x",
            f"--api-key {line}",
        ):
            if redact_text(sentence) != sentence:
                assert redact._suspicious(sentence.encode("utf-8", "surrogatepass"))


MIB = 2**20


@pytest.fixture(params=["holes are told", "holes are not told"])
def sparse_log(tmp_path, request, monkeypatch):
    """As `tuner.engine.log_size` leaves one: a head, a hole of 300 MiB, a tail, a hole again."""
    log = tmp_path / "server.log"
    with log.open("wb") as file:
        file.write(b"HF_TOKEN=before\n" + b"x" * MIB)
        file.seek(301 * MIB)
        file.write(b"HF_TOKEN=after\nthe end\n")
        file.truncate(302 * MIB)
    if log.stat().st_blocks * 512 > 8 * MIB:
        pytest.skip("the file system has no holes")
    if request.param == "holes are not told":

        def lseek(descriptor, position, how):
            if how in (os.SEEK_DATA, os.SEEK_HOLE):
                raise OSError(errno.EINVAL, "Invalid argument")
            return seek(descriptor, position, how)

        seek = os.lseek
        monkeypatch.setattr(redact.os, "lseek", lseek)
    return log


def test_redact_file_keeps_holes(sparse_log):
    assert redact_file(sparse_log)
    status = sparse_log.stat()
    assert status.st_size == 302 * MIB + len("***") * 2 - len("beforeafter")
    assert status.st_blocks * 512 < 8 * MIB
    with sparse_log.open("rb") as file:
        assert file.read(20) == b"HF_TOKEN=***\nxxxxxxx"
        file.seek(301 * MIB + len("***") - len("before"))
        assert file.read(22) == b"HF_TOKEN=***\nthe end\n\0"


def test_redact_file_reads_a_line_without_an_end_in_pieces(tmp_path):
    log = tmp_path / "server.log"
    log.write_bytes(b"x " * 40 * MIB + b"HF_TOKEN=abc")
    tracemalloc.start()
    assert redact_file(log)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * MIB
    assert log.read_bytes().endswith(b"x HF_TOKEN=***")
