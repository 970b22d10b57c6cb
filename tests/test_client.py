"""Whatever a server does with a request becomes one record, rightly named."""

from __future__ import annotations

import time
from typing import Any

import pytest
from aiohttp import web
from completion_server import (
    DONE,
    GOOD,
    STOPPING,
    answering,
    client_of,
    event,
    ids_token,
    record_of,
    streaming,
    token,
    usage,
)

from tuner.load.stream import MAX_LINE_BYTES
from tuner.load.workload import NoTokenizer, TokenizeError
from tuner.types import RequestStatus

# --- served ----------------------------------------------------------------------------


async def test_send_times_each_chunk_as_it_arrives() -> None:
    before_s = time.perf_counter()
    record = await record_of(
        streaming(0.05, token("a"), 0.1, token("b"), 0.1, token("c", "length"), usage(), DONE)
    )
    assert record.status is RequestStatus.OK
    assert record.error == ""
    assert (record.index, record.prompt_tokens, record.output_tokens) == (5, 3, 3)
    first, second, third = record.token_times_s
    assert before_s < record.send_s < first < second < third <= record.end_s
    assert first - record.send_s >= 0.045
    assert 0.08 < second - first < 5.0
    assert 0.08 < third - second < 5.0
    assert record.end_s <= time.perf_counter()


async def test_send_asks_for_what_the_workload_says() -> None:
    seen: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json())
        return await streaming(*GOOD)(request)

    await record_of(handler)
    assert seen == {
        "model": "m",
        "prompt": [11, 12, 13],
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


async def test_send_puts_chunks_together_that_were_cut_anywhere() -> None:
    whole = b"".join(GOOD)
    pieces = [whole[start : start + 7] for start in range(0, len(whole), 7)]
    record = await record_of(streaming(*pieces))
    assert record.status is RequestStatus.OK
    assert len(record.token_times_s) == 3


async def test_send_gives_chunks_that_arrive_together_one_time() -> None:
    record = await record_of(streaming(b"".join(GOOD)))
    assert record.status is RequestStatus.OK
    assert len(record.token_times_s) == 3
    assert len(set(record.token_times_s)) == 1


async def test_send_counts_a_token_without_visible_text() -> None:
    record = await record_of(streaming(token(""), token(""), token("", "length"), usage(), DONE))
    assert record.status is RequestStatus.OK
    assert len(record.token_times_s) == 3


async def test_send_reads_other_spellings_of_an_event_stream() -> None:
    record = await record_of(
        streaming(
            b": a comment\r\n\r\nevent: x\nid: 1\n",
            b'data:{"choices": [{"text": "a", "finish_reason": null}]}\r\n\r\n',
            b'data: {"choices": [{"text": "b", "finish_reason": "stop"}], "usage": {',
            b'"prompt_tokens": 4, "completion_tokens": 2}}\n\ndata: [DONE]',
            b"\n\n",
        ),
        request=STOPPING,
    )
    assert record.status is RequestStatus.OK
    assert (record.prompt_tokens, record.output_tokens) == (4, 2)
    assert len(record.token_times_s) == 2


async def test_send_counts_the_tokens_of_each_chunk() -> None:
    record = await record_of(
        streaming(
            ids_token([1]), ids_token([]), 0.01, ids_token([2, 3], "length"), usage(3, 3), DONE
        )
    )
    assert record.status is RequestStatus.OK
    assert len(record.token_times_s) == 2
    assert record.token_counts == (1, 2)


async def test_send_is_content_with_a_model_that_stops_early_by_itself() -> None:
    answer = streaming(token("a", "stop"), usage(3, 1), DONE)
    record = await record_of(answer, request=STOPPING)
    assert record.status is RequestStatus.OK
    assert record.output_tokens == 1


# --- not served ------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429])
async def test_send_calls_a_refused_request_rejected(status: int) -> None:
    record = await record_of(
        answering(status, {"error": {"message": "maximum context length is 512", "code": 400}})
    )
    assert record.status is RequestStatus.REJECTED
    assert record.error == f"HTTP {status}: maximum context length is 512"
    assert record.token_times_s == ()
    assert record.end_s > record.send_s


async def test_send_calls_an_answer_cut_off_by_the_context_rejected() -> None:
    record = await record_of(streaming(token("a"), token("b", "length"), usage(510, 2), DONE))
    assert record.status is RequestStatus.REJECTED
    assert "2 of 3 tokens" in record.error
    assert "max-model-len" in record.error


@pytest.mark.parametrize("status", [201, 302, 500, 503])
async def test_send_calls_any_other_status_an_error_of_the_server(status: int) -> None:
    record = await record_of(answering(status, b"EngineCore\n  encountered an issue"))
    assert record.status is RequestStatus.SERVER_ERROR
    assert record.error == f"HTTP {status}: EngineCore encountered an issue"


ENGINE_DEAD = event({"error": {"message": "EngineCore encountered an issue", "code": 500}})


NO_USAGE = event({"choices": [], "usage": {"prompt_tokens": 3}})
TOO_SHORT = (token(), token("b", "stop"), usage(3, 2), DONE)


@pytest.mark.parametrize(
    ("parts", "status", "error"),
    [
        ((token(), ENGINE_DEAD, DONE), "server_error", "EngineCore encountered an issue"),
        ((ENGINE_DEAD, *GOOD), "server_error", "EngineCore encountered an issue"),
        ((event({"error": "gone"}), DONE), "server_error", "gone"),
        ((token(), token(), token(None, "length"), usage()), "disconnected", "without [DONE]"),  # type: ignore[arg-type]
        ((token(), token(), token("c", "length"), DONE), "server_error", "without usage"),
        ((token(), NO_USAGE, DONE), "server_error", "without usage"),
        ((token(), event({"choices": [], "usage": [1]}), DONE), "server_error", "without usage"),
        ((token(), token("", "abort"), usage(3, 1), DONE), "server_error", "abort"),
        ((token("", "abort"), usage(3, 0), DONE), "server_error", "abort"),
        ((usage(3, 3), DONE), "empty", "empty"),
        ((token("", "stop"), usage(3, 0), DONE), "empty", "empty"),
        ((DONE,), "empty", "empty"),
        ((), "empty", "empty"),
        ((b"hello",), "empty", "empty"),
        ((b'{"id": "x", "choices": []}\n',), "empty", "empty"),
        (TOO_SHORT, "wrong_length", "2 tokens, where 3 were asked for"),
        ((*GOOD[:3], usage(3, 4), DONE), "wrong_length", "4 tokens, where 3 were asked for"),
        ((b"data: {\n\n", *GOOD), "server_error", "no JSON object: {"),
        ((b"data: [1]\n\n", *GOOD), "server_error", "no JSON object: [1]"),
        ((b"data: \xff\xfe\n\n", *GOOD), "server_error", "no JSON object"),
        ((b"data: " + b"[" * 100_000 + b"\n\n", *GOOD), "server_error", "no JSON object"),
        ((b"x" * (MAX_LINE_BYTES + 1),), "server_error", "not an event stream"),
        ((token() * 100,), "server_error", "an answer without end"),
    ],
)
async def test_send_tells_apart_what_went_wrong_with_a_stream(
    parts: tuple[bytes, ...], status: str, error: str
) -> None:
    record = await record_of(streaming(*parts))
    assert record.status == status
    assert record.status.failed
    assert error in record.error
    assert len(record.error) < 400
    assert record.end_s >= record.send_s


@pytest.mark.parametrize("parts", [(30.0,), (token(), 30.0), (*GOOD[:4], 30.0)])
async def test_send_gives_up_after_the_timeout(parts: tuple[bytes | float, ...]) -> None:
    record = await record_of(streaming(*parts), timeout_s=0.2)
    assert record.status is RequestStatus.TIMEOUT
    assert record.error == "no complete answer within 0.2 s"
    assert 0.15 < record.end_s - record.send_s < 5.0


# --- tokenize --------------------------------------------------------------------------


async def test_tokenize_asks_for_ids_without_special_ones() -> None:
    seen: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json())
        return web.json_response({"count": 2, "max_model_len": 512, "tokens": [7, 8]})

    async with client_of(handler, "/tokenize") as client:
        assert await client.tokenize("two words") == [7, 8]
    assert seen == {"model": "m", "prompt": "two words", "add_special_tokens": False}


@pytest.mark.parametrize("status", [404, 405])
async def test_tokenize_of_a_server_without_it_says_so(status: int) -> None:
    async with client_of(answering(status, b"Not Found"), "/tokenize") as client:
        with pytest.raises(NoTokenizer):
            await client.tokenize("text")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, {"error": {"message": "broken"}}),
        (200, b"nonsense"),
        (200, b"[" * 100_000),
        (200, {"count": 3}),
        (200, {"tokens": [1, "2"]}),
        (200, {"tokens": [1, True]}),
        (200, b"[1, 2]"),
    ],
)
async def test_tokenize_of_a_broken_server_is_an_error(
    status: int, body: bytes | dict[str, Any]
) -> None:
    async with client_of(answering(status, body), "/tokenize") as client:
        with pytest.raises(TokenizeError) as caught:
            await client.tokenize("text")
    assert type(caught.value) is TokenizeError


async def test_tokenize_of_a_silent_server_is_an_error() -> None:
    async with client_of(streaming(30.0), "/tokenize", timeout_s=0.2) as client:
        with pytest.raises(TokenizeError, match="TimeoutError"):
            await client.tokenize("text")
