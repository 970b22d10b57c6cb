"""What is made of the events of an answer."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.load.event_shape import NO_SHAPE, shape_of
from tuner.load.stream import CompletionStream
from tuner.types import RequestStatus

DONE = b"data: [DONE]\n\n"


def event(message: Any) -> bytes:
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


def token(text: str = " a", finish_reason: str | None = None, **more: Any) -> bytes:
    """As vLLM 0.32 writes it."""
    choice = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": None,
    }
    return event(
        {
            "id": "cmpl-a619c84e79b26838",
            "object": "text_completion",
            "created": 1796116837,
            "model": "./models/tiny",
            "choices": [choice | more],
        }
    )


def usage(output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": output}})


def fed(asked: int, *parts: bytes) -> CompletionStream:
    """A stream that took each part a second after the last."""
    stream = CompletionStream(asked, ignore_eos=True)
    for number, part in enumerate(parts):
        assert stream.feed(part, float(number))
    return stream


@given(st.lists(st.text(), min_size=1, max_size=8))
def test_stream_counts_a_token_of_any_text(texts: list[str]) -> None:
    parts = [token(text) for text in texts]
    stream = fed(len(texts), *parts, usage(len(texts)), DONE)
    assert stream.token_times_s == list(map(float, range(len(texts))))
    assert stream.verdict() == (RequestStatus.OK, "")
    assert stream.token_counts() == ()


@given(
    st.lists(
        st.tuples(st.text(), st.lists(st.integers(0, 10**6), max_size=4)), min_size=1, max_size=8
    )
)
def test_stream_counts_the_ids_of_any_chunk(chunks: list[tuple[str, list[int]]]) -> None:
    counts = [len(ids) for _, ids in chunks if ids]
    parts = [token(text, token_ids=ids) for text, ids in chunks]
    stream = fed(sum(counts), *parts, usage(sum(counts)), DONE)
    times = [float(number) for number, (_, ids) in enumerate(chunks) if ids]
    assert stream.token_times_s == times
    assert stream.token_counts() == (tuple(counts) if set(counts) - {1} else ())


@given(st.data(), st.lists(st.text(), min_size=1, max_size=5))
def test_stream_cut_anywhere_is_the_same_stream(data: st.DataObject, texts: list[str]) -> None:
    whole = b"".join(token(text, token_ids=[1, 2]) for text in texts)
    whole += usage(2 * len(texts)) + DONE
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    bounds = [0, *cuts, len(whole)]
    parts = [whole[start:end] for start, end in pairwise(bounds)]
    stream = fed(2 * len(texts), *parts)
    assert stream.verdict() == (RequestStatus.OK, "")
    assert len(stream.token_times_s) == len(texts)
    assert stream.token_counts() == (2,) * len(texts)


def test_stream_spreads_tokens_where_the_server_names_none() -> None:
    stream = fed(8, token(), token(), token("c", "length"), usage(8), DONE)
    assert stream.verdict() == (RequestStatus.OK, "")
    assert stream.token_counts() == (2, 3, 3)


def test_stream_does_not_trust_ids_that_the_usage_belies() -> None:
    stream = fed(6, token(token_ids=[1]), token(token_ids=[1]), usage(6), DONE)
    assert stream.token_counts() == (3, 3)


def test_stream_reads_an_error_that_comes_between_tokens_alike() -> None:
    dead = event({"error": {"message": "EngineCore died", "code": 500}})
    stream = fed(4, token(), token(), dead, token(), DONE)
    assert stream.verdict() == (RequestStatus.SERVER_ERROR, "EngineCore died")


def test_stream_ends_an_answer_without_end() -> None:
    stream = CompletionStream(10)
    taken = sum(stream.feed(token(), 0.0) for _ in range(1000))
    assert 20 < taken < 200
    assert "without end" in stream.verdict()[1]


@given(
    st.lists(
        st.binary(max_size=60)
        | st.sampled_from([b"data: ", b"\n", token(), token(token_ids=[1, 2]), usage(3), DONE]),
        max_size=12,
    )
)
def test_stream_of_any_bytes_has_a_verdict(parts: list[bytes]) -> None:
    stream = CompletionStream(3)
    for number, part in enumerate(parts):
        stream.feed(part, float(number))
    status, error = stream.verdict()
    assert (status is RequestStatus.OK) == (error == "")
    counts = stream.token_counts()
    assert not counts or len(counts) == len(stream.token_times_s)


# --- events alike ----------------------------------------------------------------------


def shape(example: bytes) -> Any:
    return shape_of(example[6:-2], json.loads(example[6:-2])) or NO_SHAPE


@pytest.mark.parametrize(
    ("example", "other", "tokens"),
    [
        (token(), token(" other"), 1),
        (token(), token('" \\ \n ü'), 1),
        (token(token_ids=[7]), token("b", token_ids=[123]), 1),
        (token(token_ids=[7]), token("[b]", token_ids=[1, 2, 3]), 3),
        (token(token_ids=[7, 8, 9]), token(token_ids=[1]), 1),
        (token(token_ids=[7]), token(token_ids=[]), 0),
        (token(token_ids=[7]), token(), 0),
        (token(), token(token_ids=[7]), 0),
        (token(), token("", "length"), 0),
        (token("", "length"), token("", "length"), 0),
        (token(), token().replace(b"cmpl-a", b"cmpl-b"), 0),
        (token(), token() + token(), 0),
        (token(), token()[:-1], 0),
        (token(), token()[5:], 0),
        (token(), usage(1), 0),
        (token(), DONE, 0),
        (token(), b"", 0),
        (event({"error": "x", "choices": [{"text": "a"}]}), token(), 0),
        (event({"choices": [{"text": "a"}, {"text": "b"}]}), token(), 0),
    ],
)
def test_shape_tells_the_tokens_of_events_alike_and_of_no_others(
    example: bytes, other: bytes, tokens: int
) -> None:
    assert shape(example).tokens_in(other) == tokens


@given(st.text(), st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_shape_knows_any_text_and_ids(text: str, ids: list[int]) -> None:
    assert shape(token(token_ids=[5])).tokens_in(token(text, token_ids=ids)) == len(ids)
