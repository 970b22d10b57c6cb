"""Damaged, wrong and hostile files: one message with the file, never a traceback."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loaded_traces import load

from tuner.cli import main
from tuner.errors import InputError
from tuner.load.traces import opening
from tuner.load.traces.reading import TraceStream
from tuner.load.traces.statistics import describe
from tuner.load.traces.trace import Reason, TraceFormat

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_ROW = b"2023-11-16 18:15:46.6805900,374,44\n"
BURST = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
TURNS = b'{"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}'


def azure(row: bytes) -> bytes:
    return AZURE + AZURE_ROW + row + b"\n"


def burst(row: bytes) -> bytes:
    return BURST + b"5,GPT-4,10,10,20,API log\n" + row + b"\n"


def mooncake(row: bytes) -> bytes:
    return b'{"timestamp": 0, "input_length": 3, "output_length": 1}\n' + row + b"\n"


def custom(row: bytes) -> bytes:
    return b'{"prompt": "P"}\n' + row + b"\n"


def batch(row: bytes) -> bytes:
    good = (
        b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "P"}}'
    )
    return good + b"\n" + row + b"\n"


def guidellm(row: bytes) -> bytes:
    return b"prompt,prompt_tokens_count,output_tokens_count\nP,3,4\n" + row + b"\n"


def sharegpt(row: bytes) -> bytes:
    return b"[" + TURNS + b",\n" + row + b"]"


# name: (content, why its one bad row, which the second one of the file is, is refused)
BAD_ROWS: dict[str, tuple[bytes, Reason]] = {
    "azure no such date": (azure(b"2023-13-16 18:15:46,1,1"), Reason.NOT_A_TIME),
    "azure no time": (azure(b",1,1"), Reason.NOT_A_TIME),
    "azure header again": (azure(AZURE.strip()), Reason.NOT_A_TIME),
    "azure no length": (azure(b"2023-11-16 18:15:46,,1"), Reason.NO_LENGTH),
    "azure fraction": (azure(b"2023-11-16 18:15:46,12.5,1"), Reason.NOT_WHOLE),
    "azure NaN": (azure(b"2023-11-16 18:15:46,NaN,1"), Reason.NOT_WHOLE),
    "azure infinity": (azure(b"2023-11-16 18:15:46,1e999,1"), Reason.NOT_WHOLE),
    "azure word": (azure(b"2023-11-16 18:15:46,many,1"), Reason.NOT_WHOLE),
    "azure underscore": (azure(b"2023-11-16 18:15:46,1_000,1"), Reason.NOT_WHOLE),
    "azure other digits": (azure("2023-11-16 18:15:46,١٢,1".encode()), Reason.NOT_WHOLE),
    "azure negative": (azure(b"2023-11-16 18:15:46,-5,1"), Reason.NEGATIVE),
    "azure huge": (azure(b"2023-11-16 18:15:46,2147483648,1"), Reason.TOO_LARGE),
    "azure endless": (azure(b"2023-11-16 18:15:46," + b"9" * 6000 + b",1"), Reason.NOT_WHOLE),
    "azure empty prompt": (azure(b"2023-11-16 18:15:46,0,1"), Reason.NO_INPUT),
    "azure no answer": (azure(b"2023-11-16 18:15:46,1,0"), Reason.NO_OUTPUT),
    "azure cut row": (azure(b"2023-11-16 18:15"), Reason.WRONG_COLUMNS),
    "azure long row": (azure(b"2023-11-16 18:15:46,1,1,1"), Reason.WRONG_COLUMNS),
    "azure stray quote": (azure(b'2023-11-16 18:15:46,"1,1'), Reason.NOT_CSV),
    "azure not UTF-8": (azure(b"2023-11-16 18:15:46,1,\xff"), Reason.NOT_UTF8),
    "burst failed": (burst(b"6,GPT-4,10,0,10,API log"), Reason.NO_OUTPUT),
    "burst NaN time": (burst(b"nan,GPT-4,10,1,10,API log"), Reason.NOT_A_TIME),
    "burst negative time": (burst(b"-1,GPT-4,10,1,10,API log"), Reason.NOT_A_TIME),
    "burst endless time": (burst(b"1e300,GPT-4,10,1,10,API log"), Reason.NOT_A_TIME),
    "burst decimal comma": (burst(b'6,GPT-4,"10,0",1,10,API log'), Reason.NOT_WHOLE),
    "mooncake not JSON": (mooncake(b'{"timestamp": 1, "input_len'), Reason.NOT_JSON),
    "mooncake list": (mooncake(b"[1, 2]"), Reason.NOT_OBJECT),
    "mooncake no length": (mooncake(b'{"timestamp": 1}'), Reason.NO_LENGTH),
    "mooncake ids without length": (mooncake(b'{"hash_ids": [1]}'), Reason.NO_LENGTH),
    "mooncake too few ids": (mooncake(b'{"input_length": 513, "hash_ids": [1]}'), Reason.HASH_IDS),
    "mooncake ids no list": (mooncake(b'{"input_length": 3, "hash_ids": "1"}'), Reason.HASH_IDS),
    "mooncake ids of text": (mooncake(b'{"input_length": 3, "hash_ids": ["1"]}'), Reason.HASH_IDS),
    "mooncake NaN": (mooncake(b'{"input_length": NaN}'), Reason.NOT_WHOLE),
    "mooncake true": (mooncake(b'{"input_length": true}'), Reason.NOT_WHOLE),
    "mooncake words": (mooncake(b'{"input_length": 3, "timestamp": "x"}'), Reason.NOT_A_TIME),
    "mooncake infinity": (mooncake(b'{"input_length": 3, "timestamp": 1e999}'), Reason.NOT_A_TIME),
    "mooncake long integer": (
        mooncake(b'{"input_length": 3, "timestamp": 1' + b"0" * 400 + b"}"),
        Reason.NOT_A_TIME,
    ),
    "mooncake digits": (mooncake(b'{"input_length": 1' + b"0" * 5000 + b"}"), Reason.NOT_JSON),
    "mooncake deep": (mooncake(b'{"hash_ids":' + b"[" * 100_000), Reason.NOT_JSON),
    "mooncake bad chat": (mooncake(b'{"messages": [1], "output_length": 3}'), Reason.NO_PROMPT),
    "custom no prompt": (custom(b'{"role": "x"}'), Reason.NO_PROMPT),
    "custom blank prompt": (custom(b'{"prompt": " \\n"}'), Reason.NO_PROMPT),
    "custom number": (custom(b'{"prompt": 12}'), Reason.NO_PROMPT),
    "custom half surrogate": (custom(b'{"prompt": "\\ud800"}'), Reason.NOT_UTF8),
    "custom not UTF-8": (custom(b'{"prompt": "\xe4"}'), Reason.NOT_UTF8),
    "custom zero": (custom(b'{"prompt": "x", "output_tokens": 0}'), Reason.NO_OUTPUT),
    "custom fraction": (custom(b'{"prompt": "x", "output_tokens": 1.5}'), Reason.NOT_WHOLE),
    "custom object": (custom(b'{"prompt": "x", "output_tokens": {}}'), Reason.NOT_WHOLE),
    "batch no body": (
        batch(b'{"custom_id": "2", "method": "POST", "url": "/v1/completions", "params": {}}'),
        Reason.NO_REQUEST,
    ),
    "batch no url": (batch(b'{"custom_id": "2", "body": {"prompt": "x"}}'), Reason.NO_REQUEST),
    "batch same id": (
        batch(b'{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}'),
        Reason.REPEATED_ID,
    ),
    "batch embeddings": (
        batch(b'{"custom_id": "2", "method": "POST", "url": "/v1/embeddings", "body": {}}'),
        Reason.OTHER_REQUEST,
    ),
    "batch GET": (
        batch(b'{"custom_id": "2", "method": "GET", "url": "/v1/completions", "body": {}}'),
        Reason.OTHER_REQUEST,
    ),
    "batch empty chat": (
        batch(
            b'{"custom_id": "2", "method": "POST", "url": "/v1/chat/completions", '
            b'"body": {"messages": []}}'
        ),
        Reason.NO_PROMPT,
    ),
    "batch two prompts": (
        batch(
            b'{"custom_id": "2", "method": "POST", "url": "/v1/completions", '
            b'"body": {"prompt": ["a", "b"]}}'
        ),
        Reason.SEVERAL_PROMPTS,
    ),
    "guidellm blank": (guidellm(b" ,,4"), Reason.NO_PROMPT),
    "guidellm NaN": (guidellm(b"P,nan,4"), Reason.NOT_WHOLE),
    "guidellm long row": (guidellm(b"P,3,4,5"), Reason.WRONG_COLUMNS),
    "guidellm bad quote": (guidellm(b'"P"x,3,4'), Reason.NOT_CSV),
    "guidellm not UTF-8": (guidellm(b"\xff\xfe,3,4"), Reason.NOT_UTF8),
    "sharegpt number": (sharegpt(b"12"), Reason.NOT_OBJECT),
    "sharegpt no turns": (sharegpt(b"{}"), Reason.NO_REPLY),
    "sharegpt no reply": (
        sharegpt(b'{"conversations": [{"from": "human", "value": "Q"}]}'),
        Reason.NO_REPLY,
    ),
    "sharegpt turn of list": (sharegpt(b'{"conversations": [["human", "Q"]]}'), Reason.NO_REPLY),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_refused_counted_and_found_again(tmp_path: Path, name: str) -> None:
    content, reason = BAD_ROWS[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    trace = load(path)
    assert len(trace.requests) == 1
    assert trace.refused.counts == {reason: 1}
    header = not content.startswith((b"{", b"["))
    assert trace.refused.lines == {reason: (3 if header else 2,)}


TWO_FORMATS = b'{"prompt": "P"}\n' + TURNS + b"\n"
CUT_GZIP = gzip.compress(AZURE + AZURE_ROW * 5000)[:-40]
SPOILT_GZIP = bytearray(gzip.compress(os.urandom(3000)))
SPOILT_GZIP[1500:1600] = bytes(100)

# name: (content, part of the message, format that is asked for)
BAD_FILES: dict[str, tuple[bytes, str, str | None]] = {
    "empty": (b"", "is empty", None),
    "empty gzip": (gzip.compress(b""), "is empty", None),
    "white space": (b" \n\n\t\n", "nothing but white space", None),
    "white space as CSV": (b" \n\n\t\n", "nothing but white space", "azure"),
    "header only": (AZURE, "has no rows", None),
    "empty list": (b"[]", "no JSON object", None),
    "empty list as sharegpt": (b"[]", "has no rows", "sharegpt"),
    "list of numbers": (b"[1, 2, 3]", "no JSON object", None),
    "prose": (b"Dear Sir,\nthis is a letter.\n", "no format has these columns: Dear Sir", None),
    "page": (b"<!DOCTYPE html>\n<html>404</html>\n", "no format has these columns", None),
    "no header": (AZURE_ROW * 3, ":1: no format has these columns", None),
    "other CSV": (b"a,b,c\n1,2,3\n", ":1: no format has these columns: a, b, c", None),
    "commas": (b'a,"x, y"\n1,2\n', 'these columns: a, "x, y"', None),
    "many columns": (b",".join(b"c%d" % n for n in range(20)) + b"\n1\n", "… (20 in all)", None),
    "other JSON": (b'{"a": 1}\n{"b": 2}\n', ":1: no format has these keys: a, b", None),
    "inputs.json": (b'{"data": [{"session_id": 1}]}', "no format has these keys: data", None),
    "several formats": (TWO_FORMATS, "custom in line 1, sharegpt in line 2", None),
    "azure column is missing": (b"TIMESTAMP,Tokens\nx,1\n", "no column 'ContextTokens'", "azure"),
    "burstgpt as azure": (burst(b""), "no column 'ContextTokens'", "azure"),
    "azure as burstgpt": (AZURE + AZURE_ROW, "no column 'Request tokens'", "burstgpt"),
    "azure as guidellm": (AZURE + AZURE_ROW, "no column for the prompt", "guidellm"),
    "JSON as CSV": (TURNS, ":1: is JSON, where the header of a CSV", "azure"),
    "CSV as JSON": (AZURE + AZURE_ROW, "not JSON: 2 (lines 1, 2)", "custom"),
    "same column twice": (b"prompt,Prompt\na,b\n", "names the column 'Prompt' twice", None),
    "nothing usable": (BURST + b"1,m,0,0,0,x\n" * 5, "is 0: 5 (lines 2, 3, 4, …)", None),
    "CR alone": (AZURE.replace(b"\n", b"\r") + AZURE_ROW, "CR alone", None),
    "latin-1 header": (b"prompt,gr\xf6\xdfe\nx,1\n", ":1: not UTF-8", None),
    "UTF-16": ("prompt,x\n".encode("utf-16"), "is UTF-16", None),
    "UTF-16 without a mark": ("prompt,x\n".encode("utf-16-le"), ":1: has NUL bytes", None),
    "NUL bytes": (AZURE + AZURE_ROW + b"\0\0\0\n", ":3: has NUL bytes", None),
    "NUL bytes in a list": (b"[" + TURNS + b",\0]", "has NUL bytes", None),
    "PNG": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "not UTF-8", None),
    "Parquet": (b"PAR1\x15\x04\x15", "is a Parquet file", None),
    "ZIP": (b"PK\x03\x04\x14", "is a ZIP archive", None),
    "zstd": (b"\x28\xb5\x2f\xfd\x04", "zstd", None),
    "xz": (b"\xfd7zXZ\0\0", "xz", None),
    "SQLite": (b"SQLite format 3\0", "SQLite", None),
    "cut gzip": (CUT_GZIP, "gzip data is cut off after line", None),
    "gzip header alone": (b"\x1f\x8b", "gzip data is cut off", None),
    "gzip of nonsense": (b"\x1f\x8b" + b"x" * 50, "gzip data is damaged", None),
    "spoilt gzip": (bytes(SPOILT_GZIP), "gzip data is damaged", "custom"),
    "gzip with rubbish behind": (
        gzip.compress(AZURE + AZURE_ROW) + b"rubbish", "gzip data is damaged", None,
    ),
    "list cut in an item": (b"[" + TURNS + b",\n" + TURNS[:40], ":2: is not one JSON", None),
    "list cut behind an item": (b"[" + TURNS, "it is cut off", None),
    "list cut behind a comma": (b"[" + TURNS + b",\n", "it is cut off", None),
    "list with no comma": (b"[" + TURNS + b"\n" + TURNS + b"]", ":2: is not one JSON", None),
    "list with a comma at its end": (b"[" + TURNS + b",]", "Expecting value", None),
    "more behind a list": (b"[" + TURNS + b"]\n" + TURNS, ":2: is not one JSON", None),
    "list of lists": (b"[" * 100_000, "nested too deeply", None),
    "list that is not UTF-8": (b"[" + TURNS + b',\n"\xff"]', ":2: not UTF-8", None),
    "quote never closed": (guidellm(b'"P,3,4\nQ,1,2'), ":3: a quote is never closed", None),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_ends_the_command_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    content, message, form = BAD_FILES[name]
    path = tmp_path / "traffic"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as leaving:
        main(["workload", str(path), *(["--format", form] if form else [])])
    captured = capsys.readouterr()
    assert leaving.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith(f"error: {path}")
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_there_are_at_least_sixty_damaged_files() -> None:
    assert len(BAD_ROWS) + len(BAD_FILES) >= 100


def test_path_that_is_no_readable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load(tmp_path / "absent")
    with pytest.raises(InputError, match="is not a file"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a file"):
        load(tmp_path / "pipe")
    plain = tmp_path / "plain.csv.gz"
    plain.write_bytes(AZURE + AZURE_ROW)
    with pytest.raises(InputError, match="is not gzip"):
        load(plain)


def test_file_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "secret"
    path.write_bytes(AZURE)
    monkeypatch.setattr(Path, "open", denied)  # root may read everything
    with pytest.raises(InputError, match=r"secret: cannot be read: Permission denied"):
        load(path)


def test_disk_that_fails_while_reading_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, _: Any) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(opening, "_opened", lambda _: io.BufferedReader(Failing()))
    with pytest.raises(InputError, match="cannot be read: Input/output error"):
        load(tmp_path / "file")


def test_over_long_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.load.traces.opening.LONGEST_LINE", 2**20)
    path = tmp_path / "long"
    path.write_bytes(b'{"prompt": "P"}\n{"prompt": "' + b"x" * 2**20 + b'"}\n')
    with pytest.raises(InputError, match=r":2: is longer than 1 MiB"):
        load(path)


def test_duplicate_keys_take_the_last_value(tmp_path: Path) -> None:
    path = tmp_path / "twice"
    path.write_bytes(b'{"prompt": "a", "prompt": "b"}\n')
    assert load(path).requests[0].prompt == "b"


WORDS = [
    *AZURE.decode().strip().split(","), *BURST.decode().strip().split(","), "prompt", "messages",
    "conversations", "role", "content", "from", "value", "user", "gpt", "input_length", "hash_ids",
    "timestamp", "custom_id", "body", "url", "method", "POST", "/v1/completions", "system", "1",
    "2023-11-16 18:15:46", "0001-01-01T00:00:00+23:59", "-0", "1e308", '"', "", "\n", "[", "{",
    "\r",
]  # fmt: skip
words = st.sampled_from(WORDS)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=5),
    max_leaves=10,
)
contents = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=50).map(gzip.compress),
    st.lists(st.lists(words, max_size=7).map(",".join), max_size=5).map(
        lambda lines: "\n".join(lines).encode()
    ),
    st.lists(values, max_size=4).map(lambda rows: json.dumps(rows).encode()),
    st.lists(st.dictionaries(words, values, max_size=6), max_size=4).map(
        lambda rows: "\n".join(map(json.dumps, rows)).encode()
    ),
    st.lists(st.lists(words, min_size=3, max_size=3).map(",".join), max_size=4).map(
        lambda lines: AZURE + "\n".join(lines).encode()
    ),
)


@settings(
    max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(content=contents, form=st.sampled_from([None, *TraceFormat]))
@example(content=b"[\xef\xbb", form=None)
@example(content=b"[1", form=TraceFormat.SHAREGPT)
def test_any_bytes_give_requests_or_an_input_error(
    tmp_path: Path, content: bytes, form: Any
) -> None:
    path = tmp_path / "any"
    path.write_bytes(content)
    try:
        summary = describe(TraceStream(path, form))
        trace = load(path, form)
    except InputError:
        return
    assert len(trace.requests) == summary.requests > 0
    assert trace.refused == summary.refused
    assert all(r.input_tokens or r.text for r in trace.requests)
