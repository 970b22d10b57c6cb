"""Recorded conversations: what is used of a file, and what is said of a bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import loaded_traces
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.errors import InputError
from tuner.load.traces.trace import TraceFormat


def write(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "file.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(json.dumps(content))
    return path


def load(path: Path) -> tuple[list[tuple[str | None, str | None]], int]:
    """Questions with their replies, and how many rows have none."""
    found = loaded_traces.load(path, TraceFormat.SHAREGPT)
    return [(row.prompt, row.reply) for row in found.requests], found.refused.total


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


def messages(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


@pytest.mark.parametrize(
    "row",
    [
        turns(("human", "Why?"), ("gpt", "So.")),
        turns(("user", "Why?"), ("assistant", "So.")),
        turns(("system", "!"), ("human", "Why?"), ("gpt", "So."), ("human", "?"), ("gpt", "")),
        turns(("gpt", "Hello!"), ("human", "Why?"), ("gpt", "So.")),
        turns(("human", "lost"), ("human", "Why?"), ("gpt", "So.")),
        messages(("system", "Be kind."), ("user", "Why?"), ("assistant", "So.")),
        {"id": "x", **messages(("USER", "Why?"), ("Assistant", "So."))},
    ],
)  # fmt: skip
def test_load_takes_the_first_question_that_a_reply_follows(tmp_path: Path, row: Any) -> None:
    assert load(write(tmp_path, [row])) == ([("Why?", "So.")], 0)


@pytest.mark.parametrize(
    "row",
    [
        None,
        3,
        "text",
        [],
        {},
        {"conversations": None},
        {"conversations": "text"},
        {"conversations": [None, 3, "x"]},
        turns(("human", "Why?")),
        turns(("gpt", "So."), ("human", "Why?")),
        turns(("human", "Why?"), ("gpt", "")),
        turns(("human", "  "), ("gpt", "So.")),
        turns(("human", 3), ("gpt", "So.")),
        turns(("human", "Why?"), ("gpt", ["So."])),
        turns(("human", "Why?"), ("tool", "{}"), ("gpt", "So.")),
        turns(("human", "\ud800"), ("gpt", "So.")),
        {"conversations": [{"from": {}, "value": "Why?"}, {"from": "gpt", "value": "So."}]},
    ],
)
def test_load_skips_and_counts_rows_it_cannot_use(tmp_path: Path, row: Any) -> None:
    found = load(write(tmp_path, [row, turns(("human", "Q"), ("gpt", "A"))]))
    assert found == ([("Q", "A")], 1)


def test_load_reads_one_row_a_line_too(tmp_path: Path) -> None:
    rows = [turns(("human", "Q"), ("gpt", "A")), messages(("user", "R"), ("assistant", "B"))]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    assert load(write(tmp_path, content)) == ([("Q", "A"), ("R", "B")], 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"{", "none of its 1 rows"),
        (b"\xff\xfe\x00", "is UTF-16"),
        (b'{"a": 1}\n{"a": 2}\n', "none of its 2 rows"),
        (b'[{"a": 1}', "is not one JSON document"),
        (b'[{"a": ' + b"9" * 5000 + b"}]", "is not one JSON document"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"conversations": []}', "none of its 1 rows"),
        (b"null", "none of its 1 rows"),
        (b"[]", "has no rows"),
        (b"[1, 2, {}]", "none of its 3 rows"),
    ],
)
def test_load_of_a_bad_file_names_it_and_its_fault(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load(write(tmp_path, content))
    assert "file.json" in caught.value.message


def test_load_of_no_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load(tmp_path / "absent.json")
    with pytest.raises(InputError, match="is not a file"):
        load(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["conversations", "from", "value", "messages", "role", "content"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(json_values)
def test_load_of_any_json_gives_exchanges_or_an_input_error(tmp_path: Path, value: Any) -> None:
    try:
        found = load(write(tmp_path, value))
    except InputError:
        return
    rows = value if isinstance(value, list) else [value]  # else it is one JSON line
    assert len(found[0]) + found[1] == len(rows)
