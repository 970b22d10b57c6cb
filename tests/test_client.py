"""Whatever a server does with a request becomes one record, rightly named."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from tuner.load import client as client_module
from tuner.load.client import LoadClient
from tuner.load.stream import MAX_LINE_BYTES, CompletionStream
from tuner.load.workload import NoTokenizer, Request, TokenizeError
from tuner.types import RequestRecord, RequestStatus

REQUEST = Request(index=5, prompt=(11, 12, 13), prompt_tokens=3, output_tokens=3, ignore_eos=True)
DONE = b"data: [DONE]\n\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(message: Any) -> bytes:
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


def token(text: str = " a", finish_reason: str | None = None) -> bytes:
    return event(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": finish_reason,
                    "stop_reason": None,
                }
            ],
            "usage": None,
        }
    )


def usage(prompt: int = 3, output: int = 3) -> bytes:
    return event(
        {
            "id": "cmpl-1",
            "choices": [],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
            },
        }
    )


GOOD = (token("a"), token("b"), token("c", "length"), usage(), DONE)


def streaming(*parts: bytes | float) -> Handler:
    """A server that sends each of the bytes and sleeps each of the numbers."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            if isinstance(part, bytes):
                await response.write(part)
            else:
                await asyncio.sleep(part)
        return response

    return handler


def answering(status: int, body: bytes | dict[str, Any]) -> Handler:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=content, headers={"Location": "/elsewhere"})

    return handler


@asynccontextmanager
async def client_of(
    handler: Handler, path: str = "/v1/completions", timeout_s: float = 10.0
) -> AsyncIterator[LoadClient]:
    app = web.Application()
    app.router.add_post(path, handler)
    async with (
        TestServer(app) as server,
        LoadClient(str(server.make_url("")).rstrip("/"), "m", timeout_s) as client,
    ):
        yield client


@asynccontextmanager
async def raw_client_of(answer: bytes, timeout_s: float = 10.0) -> AsyncIterator[LoadClient]:
    """A server that answers anything with these bytes and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, LoadClient(f"http://127.0.0.1:{port}", "m", timeout_s) as client:
        yield client


async def record_of(handler: Handler, timeout_s: float = 10.0) -> RequestRecord:
    async with client_of(handler, timeout_s=timeout_s) as client:
        return await client.send(REQUEST)


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
        )
    )
    assert record.status is RequestStatus.OK
    assert (record.prompt_tokens, record.output_tokens) == (4, 2)
    assert len(record.token_times_s) == 2


async def test_send_is_content_with_a_model_that_stops_early_by_itself() -> None:
    record = await record_of(streaming(token("a", "stop"), usage(3, 1), DONE))
    assert record.status is RequestStatus.OK
    assert record.output_tokens == 1


async def test_send_takes_requests_side_by_side_without_limit() -> None:
    waiting = 0
    all_there = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal waiting
        waiting += 1
        if waiting == 150:
            all_there.set()
        await all_there.wait()
        return await streaming(*GOOD)(request)

    async with client_of(handler) as client:
        records = await asyncio.gather(*(client.send(REQUEST) for _ in range(150)))
    assert {record.status for record in records} == {RequestStatus.OK}


@pytest.mark.parametrize(("keepalive_s", "connections"), [(30.0, 1), (0.05, 2)])
async def test_send_does_not_reuse_a_connection_that_the_server_may_be_closing(
    keepalive_s: float, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "KEEPALIVE_S", keepalive_s)
    seen = set()

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        seen.add(request.transport.get_extra_info("peername"))
        return await streaming(*GOOD)(request)

    async with client_of(handler) as client:
        for _ in range(2):
            assert (await client.send(REQUEST)).status is RequestStatus.OK
            await asyncio.sleep(0.2)
    assert len(seen) == connections


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
async def test_send_calls_any_other_status_failed(status: int) -> None:
    record = await record_of(answering(status, b"EngineCore\n  encountered an issue"))
    assert record.status is RequestStatus.FAILED
    assert record.error == f"HTTP {status}: EngineCore encountered an issue"


ENGINE_DEAD = event({"error": {"message": "EngineCore encountered an issue", "code": 500}})


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ((token(), ENGINE_DEAD, DONE), "EngineCore encountered an issue"),
        ((ENGINE_DEAD, *GOOD), "EngineCore encountered an issue"),
        ((event({"error": "gone"}), DONE), "gone"),
        ((token(), token(), token(None, "length"), usage()), "without [DONE]"),  # type: ignore[arg-type]
        ((token(), token(), token("c", "length"), DONE), "without usage"),
        ((token(), event({"choices": [], "usage": {"prompt_tokens": 3}}), DONE), "without usage"),
        ((token(), event({"choices": [], "usage": [1]}), DONE), "without usage"),
        ((usage(3, 3), DONE), "empty"),
        ((token("", "stop"), usage(3, 0), DONE), "empty"),
        ((token(), token("", "abort"), usage(3, 1), DONE), "abort"),
        ((DONE,), "without usage"),
        ((), "without [DONE]"),
        ((b"hello",), "without [DONE]"),
        ((b'{"id": "x", "choices": []}\n',), "without [DONE]"),
        ((b"data: {\n\n", *GOOD), "no JSON object: {"),
        ((b"data: [1]\n\n", *GOOD), "no JSON object: [1]"),
        ((b"data: \xff\xfe\n\n", *GOOD), "no JSON object"),
        ((b"data: " + b"[" * 100_000 + b"\n\n", *GOOD), "no JSON object"),
        ((b"x" * (MAX_LINE_BYTES + 1),), "not an event stream"),
    ],
)
async def test_send_calls_a_stream_that_went_wrong_failed(
    parts: tuple[bytes, ...], error: str
) -> None:
    record = await record_of(streaming(*parts))
    assert record.status is RequestStatus.FAILED
    assert error in record.error
    assert len(record.error) < 400
    assert record.end_s >= record.send_s


async def test_send_calls_a_connection_broken_in_the_middle_failed() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(token())
        assert request.transport is not None
        request.transport.abort()
        return response

    record = await record_of(handler)
    assert record.status is RequestStatus.FAILED
    assert record.error
    assert len(record.token_times_s) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + token(),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nnot a chunk",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X" * 70_000 + b": 1\r\n\r\n",
        b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_send_calls_broken_http_failed(answer: bytes) -> None:
    async with raw_client_of(answer) as client:
        record = await client.send(REQUEST)
    assert record.status is RequestStatus.FAILED
    assert record.error


async def test_send_to_nobody_fails() -> None:
    async with raw_client_of(b"") as client:
        pass
    async with LoadClient(client._base_url, "m", 5.0) as late:
        record = await late.send(REQUEST)
    assert record.status is RequestStatus.FAILED
    assert "Connect" in record.error


@pytest.mark.parametrize("parts", [(30.0,), (token(), 30.0), (*GOOD[:4], 30.0)])
async def test_send_gives_up_after_the_timeout(parts: tuple[bytes | float, ...]) -> None:
    record = await record_of(streaming(*parts), timeout_s=0.2)
    assert record.status is RequestStatus.TIMEOUT
    assert record.error == "no complete answer within 0.2 s"
    assert 0.15 < record.end_s - record.send_s < 5.0


async def test_close_ends_requests_in_flight_at_once() -> None:
    started = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        started.set()
        return await streaming(token(), 30.0)(request)

    async with client_of(handler) as client:
        task = asyncio.create_task(client.send(REQUEST))
        await started.wait()
        await client.close()
        record = await asyncio.wait_for(task, 5.0)
        after = await client.send(REQUEST)
    assert record.status is RequestStatus.FAILED
    assert after.status is RequestStatus.FAILED
    assert "closed" in after.error


# --- the stream itself -----------------------------------------------------------------


@given(st.text())
def test_stream_counts_a_token_of_any_text(text: str) -> None:
    stream = CompletionStream(2)
    stream.feed(token(text) + token(text, "length") + usage(1, 2) + DONE, 1.0)
    assert stream.token_times_s == [1.0, 1.0]
    assert stream.verdict() == (RequestStatus.OK, "")


@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"data: ", b"\n", *GOOD]), max_size=12))
def test_stream_of_any_bytes_has_a_verdict(parts: list[bytes]) -> None:
    stream = CompletionStream(3)
    for number, part in enumerate(parts):
        stream.feed(part, float(number))
    status, error = stream.verdict()
    assert (status is RequestStatus.OK) == (error == "")


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
