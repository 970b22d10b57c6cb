"""Each format as its tools write it: what is taken, by name, plain and compressed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loaded_traces import load

from tuner.load.traces import json_rows
from tuner.load.traces.detect import detect
from tuner.load.traces.opening import open_text
from tuner.load.traces.reading import TraceStream
from tuner.load.traces.trace import Message, Reason, TraceFormat, TraceRequest

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a file: text, bytes, or values as JSON lines."""

    def write_it(content: Any, name: str = "file") -> Path:
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        data = content if isinstance(content, bytes) else content.encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write_it


def lengths(path: Path) -> list[tuple[float | None, int | None, int | None]]:
    return [(r.arrival_s, r.input_tokens, r.output_tokens) for r in load(path).requests]


# --- Azure -------------------------------------------------------------------------------

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-12 00:00:10+00:00,10,1\n"
    "2024-05-12 02:00:11.5+02:00,11,2\n"
    "2024-05-12 00:00:12Z,12,3\n"
)
AZURE_2025 = (
    "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
    "2024-10-15 00:00:01.000,0,10,1\n"
    "2024-10-15 00:00:02.000,2,11,2\n"
    "2024-10-15 00:00:03.000,0,12,3\n"
)


def test_azure_of_2023_has_seven_digits_crlf_and_no_last_line_end(write: Write) -> None:
    trace = load(write(AZURE_2023))
    assert trace.format is TraceFormat.AZURE
    assert [r.input_tokens for r in trace.requests] == [374, 396]
    assert [r.output_tokens for r in trace.requests] == [44, 109]
    assert [r.arrival_s for r in trace.requests] == pytest.approx([0, 4.314579], abs=1e-6)
    assert [r.line for r in trace.requests] == [2, 3]


def test_azure_of_2024_has_time_zones(write: Write) -> None:
    assert lengths(write(AZURE_2024)) == [(0, 10, 1), (1.5, 11, 2), (2, 12, 3)]


def test_azure_of_2025_refuses_rows_with_images(write: Write) -> None:
    trace = load(write(AZURE_2025, "trace.csv.gz"))
    assert [r.input_tokens for r in trace.requests] == [10, 12]
    assert trace.refused.counts == {Reason.MEDIA: 1}
    assert trace.refused.lines == {Reason.MEDIA: (3,)}


def test_azure_columns_are_found_by_name(write: Write) -> None:
    text = "GeneratedTokens;extra;timestamp;Context Tokens\n7;x;2023-11-16 18:15:46;9\n"
    assert lengths(write(text)) == [(0, 9, 7)]


# --- BurstGPT ----------------------------------------------------------------------------

SIX = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
EIGHT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)


def test_burstgpt_of_six_columns_refuses_failed_requests(write: Write) -> None:
    rows = "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,12,0,12,API log\n110.5,GPT-4,3,4,7,x\n"
    trace = load(write(SIX + rows))
    assert trace.format is TraceFormat.BURSTGPT
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in trace.requests] == [
        (0, 472, 18),
        (105.5, 3, 4),
    ]
    assert trace.refused.counts == {Reason.NO_OUTPUT: 1}


def test_burstgpt_of_eight_columns_takes_the_same_names(write: Write) -> None:
    rows = "5,abc,7.2,ChatGPT,472,18,490,Conversation log\n6,,1.0,GPT-4,20,30,50,API log\n"
    trace = load(write(EIGHT + rows))
    assert [(r.input_tokens, r.output_tokens) for r in trace.requests] == [(472, 18), (20, 30)]
    assert [r.session for r in trace.requests] == ["abc", None]


# --- Mooncake ----------------------------------------------------------------------------


def test_mooncake_times_are_milliseconds_and_may_tie(write: Write) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 655, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [46]},
        {"timestamp": 4500, "input_length": 513, "output_length": 2, "hash_ids": [46, 9]},
    ]
    trace = load(write(rows))
    assert trace.format is TraceFormat.MOONCAKE
    assert [r.arrival_s for r in trace.requests] == [0, 0, 1.5]
    assert [r.hash_ids for r in trace.requests] == [(46, 47), (46,), (46, 9)]


def test_mooncake_rows_may_have_text_or_a_session_with_a_delay(write: Write) -> None:
    rows = [
        {"text_input": "Why?", "output_length": 20, "timestamp": 0, "session_id": "a"},
        {"input_length": 10, "delay": 1500, "session_id": "a"},
        {"messages": [{"role": "user", "content": "Hi"}], "output_length": 4},
    ]
    first, second, third = load(write(rows)).requests
    assert (first.prompt, first.input_tokens, first.session) == ("Why?", None, "a")
    assert (second.delay_s, second.arrival_s, second.output_tokens) == (1.5, None, None)
    assert third.messages == (Message("user", "Hi"),)


# --- conversations -----------------------------------------------------------------------

SYSTEM_CHAT = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "That."},
    ]
}
SHAREGPT = {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}


@pytest.mark.parametrize("key", ["messages", "items", "conversations"])
def test_sharegpt_takes_the_first_question_and_its_reply_in_both_key_styles(
    write: Write, key: str
) -> None:
    trace = load(write([{key: SYSTEM_CHAT["messages"]}, SHAREGPT]))
    first, second = trace.requests
    assert trace.format is TraceFormat.SHAREGPT
    assert (first.prompt, first.reply) == ("Why?", "So.")
    assert first.messages == (Message("system", "Be kind."), Message("user", "Why?"))
    assert second == TraceRequest(2, None, None, None, prompt="Q", reply="A")
    assert all(row.text is not None for row in trace.requests)


@pytest.mark.parametrize("indent", [None, 2])
def test_sharegpt_list_keeps_the_lines_of_its_rows(write: Write, indent: int | None) -> None:
    rows = [SHAREGPT, {"conversations": []}, SHAREGPT]
    text = json.dumps(rows, indent=indent)
    trace = load(write("\n\n" + text))
    begins = [n for n, line in enumerate(text.splitlines(), 3) if line.startswith("  {")]
    expected = begins if indent else [3, 3, 3]
    assert [r.line for r in trace.requests] == [expected[0], expected[2]]
    assert trace.refused.lines == {Reason.NO_REPLY: (expected[1],)}


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 10**6])
def test_json_list_does_not_depend_on_where_it_is_cut(
    write: Write, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    rows = [{"a": 'ü"\\ \u2028 [{,', "b": [1.5e3, -2, True, None]}, {"c": {"d": "x" * 99}}, 12, "é"]
    path = write(json.dumps(rows, ensure_ascii=False))
    monkeypatch.setattr(json_rows, "_PIECE", piece)
    with open_text(path) as file:
        found = [row for _, row in json_rows.json_rows(file)]
    assert found == [rows[0], rows[1], Reason.NOT_OBJECT, Reason.NOT_OBJECT]


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text() | st.integers(), max_size=3)))
def test_json_list_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "list.json"
    path.write_text(json.dumps(rows))
    with open_text(path) as file:
        assert [row for _, row in json_rows.json_rows(file)] == rows


# --- custom, OpenAI batch ----------------------------------------------------------------


def test_custom_keeps_digits_in_quotes_as_text(write: Write) -> None:
    rows = [{"prompt": "12", "output_tokens": 7}, {"prompt": "Why?"}, {"prompt": 12}]
    trace = load(write(rows))
    assert trace.format is TraceFormat.CUSTOM
    assert [(r.prompt, r.output_tokens) for r in trace.requests] == [("12", 7), ("Why?", None)]
    assert trace.refused.counts == {Reason.NO_PROMPT: 1}


def batch(name: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]


def test_openai_batch_url_decides_between_chat_and_completion(write: Write) -> None:
    rows = [
        batch("1", messages=CHAT, max_tokens=5),
        batch("2", messages=CHAT, max_tokens=5, max_completion_tokens=6),
        batch("3", "/v1/completions", prompt="P"),
        batch("4", "/v1/completions", prompt=[5, 6, 7], max_tokens=2),
        batch("5", "/v1/embeddings", input="x"),
        batch("1", messages=CHAT),
    ]
    trace = load(write(rows))
    assert trace.format is TraceFormat.OPENAI_BATCH
    chat, newer, completion, ids = trace.requests
    assert (chat.prompt, chat.output_tokens) == ("U", 5)
    assert chat.messages == (Message("system", "S"), Message("user", "U"))
    assert newer.output_tokens == 6
    assert (completion.prompt, completion.messages) == ("P", ())
    assert (ids.prompt, ids.input_tokens) == (None, 3)
    assert trace.refused.counts == {Reason.OTHER_REQUEST: 1, Reason.REPEATED_ID: 1}


def test_openai_batch_joins_text_parts_and_refuses_images(write: Write) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
    rows = [
        batch("1", messages=[{"role": "user", "content": parts}]),
        batch("2", messages=[{"role": "user", "content": image}]),
    ]
    trace = load(write(rows))
    assert [r.prompt for r in trace.requests] == ["a\nb"]
    assert trace.refused.counts == {Reason.MEDIA: 1}


# --- GuideLLM ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("prompt,output_tokens_count", ("Why?", None, 9)),
        ("Text,completion_tokens", ("Why?", None, 9)),
        ("instruction,osl", ("Why?", None, 9)),
        ("input,max_tokens", ("Why?", None, 9)),
    ],
)
def test_guidellm_csv_takes_any_usual_name(
    write: Write, header: str, expected: tuple[str | None, int | None, int | None]
) -> None:
    trace = load(write(f"{header}\nWhy?,9\n"))
    assert trace.format is TraceFormat.GUIDELLM
    (found,) = trace.requests
    assert (found.prompt, found.input_tokens, found.output_tokens) == expected


def test_guidellm_lengths_alone_are_enough_and_times_are_seconds(write: Write) -> None:
    text = "timestamp,input_length,output_length\n1,10,1\n2.5,20.0,2\n"
    assert lengths(write(text)) == [(0, 10, 1), (1.5, 20, 2)]


def test_guidellm_csv_cells_may_have_commas_quotes_and_line_ends(write: Write) -> None:
    text = 'prompt,prompt_tokens_count\n"a, ""b""\nc",3\n\nnext,4\n'
    trace = load(write(text))
    assert [(r.line, r.prompt, r.input_tokens) for r in trace.requests] == [
        (2, 'a, "b"\nc', 3),
        (5, "next", 4),
    ]


def test_guidellm_json_lines_take_a_system_prompt(write: Write) -> None:
    rows = [{"question": "Why?", "system_prompt": "Be kind.", "input_tokens": 5}]
    trace = load(write(rows))
    assert trace.format is TraceFormat.GUIDELLM
    assert trace.requests[0].messages == (Message("system", "Be kind."), Message("user", "Why?"))
    assert trace.requests[0].input_tokens == 5


# --- all of them -------------------------------------------------------------------------

GOOD: dict[TraceFormat, Any] = {
    TraceFormat.AZURE: AZURE_2023,
    TraceFormat.BURSTGPT: SIX + "5,ChatGPT,472,18,490,Conversation log\n",
    TraceFormat.MOONCAKE: [{"timestamp": 1, "input_length": 9, "hash_ids": [0]}],
    TraceFormat.SHAREGPT: [SHAREGPT],
    TraceFormat.CUSTOM: [{"prompt": "P"}],
    TraceFormat.OPENAI_BATCH: [batch("1", messages=CHAT)],
    TraceFormat.GUIDELLM: "prompt,output_tokens\nP,3\n",
}


@pytest.mark.parametrize("form", TraceFormat)
def test_every_format_is_told_by_content_and_read_compressed(
    write: Write, form: TraceFormat
) -> None:
    plain, packed = write(GOOD[form], "a.txt"), write(GOOD[form], "a.txt.gz")
    assert detect(plain) is detect(packed) is form
    assert load(plain).requests == load(packed).requests == load(plain, form).requests


@pytest.mark.parametrize("form", TraceFormat)
def test_every_format_may_begin_with_a_byte_order_mark(write: Write, form: TraceFormat) -> None:
    plain = write(GOOD[form])
    marked = write(b"\xef\xbb\xbf" + plain.read_bytes(), "marked")
    assert load(marked).requests == load(plain).requests


def test_stream_can_be_read_twice(write: Write) -> None:
    stream = TraceStream(write([{"prompt": "a"}, {}]))
    assert list(stream) == list(stream)
    assert stream.refused.counts == {Reason.NO_PROMPT: 1}
