"""Connections: kept, broken, refused, and whatever HTTP comes over them."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from completion_server import (
    GOOD,
    REQUEST,
    client_of,
    raw_client_of,
    record_of,
    streaming,
    token,
)

from tuner.load import pool as pool_module
from tuner.load.client import LoadClient
from tuner.load.http_answer import MAX_ERROR_BODY_BYTES
from tuner.load.pool import NoMoreConnections, most_connections
from tuner.types import RequestRecord, RequestStatus


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
    monkeypatch.setattr(pool_module, "KEEPALIVE_S", keepalive_s)
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


async def test_send_calls_a_connection_broken_in_the_middle_disconnected() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(token())
        assert request.transport is not None
        request.transport.abort()
        return response

    record = await record_of(handler)
    assert record.status is RequestStatus.DISCONNECTED
    assert record.error
    assert len(record.token_times_s) == 1


HEAD = b"HTTP/1.1 200 OK\r\n"
BODY = b"".join(GOOD)


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        (b"", "disconnected", "closed the connection"),
        (HEAD, "disconnected", "closed the connection"),
        (HEAD + b"Content-Length: 5000\r\n\r\n" + token(), "disconnected", "closed"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nda", "disconnected", "closed"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nno", "server_error", "broken HTTP"),
        (b"\x00\xff nonsense\r\n\r\n", "server_error", "broken HTTP"),
        (b"HTTP/1.1 101 Switch\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "server_error", ""),
        (
            HEAD + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
            "server_error",
            "gzip",
        ),
        (HEAD + b"Content-Length: abc\r\n\r\n", "server_error", "broken HTTP"),
        (HEAD + b"Content-Length: -1\r\n\r\n", "server_error", "broken HTTP"),
        (HEAD + b"X: 1\r\n" * 20_000, "server_error", "headers without end"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 5000, "server_error", "headers without end"),
        (b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n", "server_error", "HTTP 999"),
    ],
)
async def test_send_tells_apart_what_went_wrong_with_http(
    answer: bytes, status: str, error: str
) -> None:
    async with raw_client_of(answer) as client:
        record = await client.send(REQUEST)
    assert record.status == status
    assert record.error
    assert error in record.error


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\n" + BODY,  # its end is the connection's
        HEAD + b"Connection: close\r\n\r\n" + BODY,
        HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + b"surplus",
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"\r\n" + BODY,
        HEAD
        + b"Content-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"%x;why=not\r\n" % len(BODY)
        + BODY
        + b"\r\n0\r\nTrailer: 1\r\n\r\n",
    ],
)
async def test_send_reads_http_of_any_framing(answer: bytes) -> None:
    async with raw_client_of(answer) as client:
        record = await client.send(REQUEST)
    assert (record.status, record.error) == ("ok", "")


async def test_send_does_not_read_a_gigabyte_of_an_error() -> None:
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x" * 1_000_000)
            sent += 1
        return response

    record = await record_of(handler)
    assert record.status is RequestStatus.SERVER_ERROR
    assert record.error.startswith("HTTP 500: xxx")
    assert sent * 1_000_000 < 2000 * MAX_ERROR_BODY_BYTES


async def test_send_hears_a_refusal_while_it_still_sends() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await writer.drain()
        await asyncio.sleep(30.0)  # and reads no more

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    huge = replace(REQUEST, prompt="x" * 30_000_000, prompt_tokens=None)
    async with server, LoadClient(f"http://127.0.0.1:{port}", "m", 10.0) as client:
        record = await client.send(huge)
        server.close()
    assert record.status is RequestStatus.REJECTED
    assert record.error == "HTTP 413: big"


async def test_send_delivers_a_prompt_larger_than_the_socket_takes() -> None:
    seen: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json())
        return await streaming(*GOOD)(request)

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/completions", handler)
    huge = replace(REQUEST, prompt="x" * 10_000_000, prompt_tokens=None)
    async with (
        TestServer(app) as server,
        LoadClient(str(server.make_url("")).rstrip("/"), "m", 10.0) as client,
    ):
        record = await client.send(huge)
    assert record.status is RequestStatus.OK
    assert len(seen["prompt"]) == 10_000_000


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_send_to_nobody_is_disconnected(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with LoadClient(f"http://{host}:{port}", "m", 5.0) as client:
        record = await client.send(REQUEST)
    assert record.status is RequestStatus.DISCONNECTED
    assert "cannot connect" in record.error
    assert "refused" in record.error


class Refusing:
    """`connect` of a machine that answers each address with another error."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    async def __call__(self, *_: Any) -> Any:
        raise OSError(self.codes.pop(0), "no")


async def sent_to(addresses: int, monkeypatch: pytest.MonkeyPatch, *codes: int) -> RequestRecord:
    """A request to a host of so many addresses."""
    async with LoadClient("http://127.0.0.1:9", "m", 5.0) as client:
        pool = client._pool
        assert pool is not None
        pool._addresses = pool._addresses[:1] * addresses
        monkeypatch.setattr(pool_module, "connect", Refusing(*codes))
        return await client.send(REQUEST)


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EADDRNOTAVAIL, "ip_local_port_range"),
    ],
)
async def test_send_does_not_blame_the_server_for_what_this_machine_lacks(
    code: int, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoMoreConnections, match="no further connection") as raised:
        await sent_to(1, monkeypatch, code)
    assert hint in raised.value.hint


async def test_send_to_an_address_of_a_kind_that_the_machine_has_not_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = await sent_to(2, monkeypatch, errno.EADDRNOTAVAIL, errno.ECONNREFUSED)
    assert record.status is RequestStatus.DISCONNECTED


def test_most_connections_leave_files_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"hard": 4096}
    monkeypatch.setattr(pool_module.resource, "getrlimit", lambda _: (1024, limits["hard"]))
    assert most_connections() == 4096 - 128
    limits["hard"] = 64
    assert most_connections() == 1
    limits["hard"] = resource.RLIM_INFINITY
    assert most_connections() == (1 << 16) - 128


async def test_send_finds_a_server_by_name() -> None:
    async with client_of(streaming(*GOOD)) as client:
        named = LoadClient(f"http://localhost:{client._port}", "m", 5.0)
        async with named:
            assert (await named.send(REQUEST)).status is RequestStatus.OK


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:8000", "http://", ""])
def test_client_refuses_an_address_that_it_cannot_speak_to(url: str) -> None:
    with pytest.raises(ValueError, match="no http:// address"):
        LoadClient(url, "m", 5.0)


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
    assert (record.status, record.error) == ("disconnected", "the client is closed")
    assert (after.status, after.error) == ("disconnected", "the client is closed")


async def test_send_when_cancelled_closes_its_connection() -> None:
    started, hung_up = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        started.set()
        await reader.read()
        hung_up.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, LoadClient(f"http://127.0.0.1:{port}", "m", 10.0) as client:
        task = asyncio.create_task(client.send(REQUEST))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(hung_up.wait(), 5.0)


async def test_send_does_not_reuse_a_connection_on_which_the_server_spoke_unasked() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + HEAD)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, LoadClient(f"http://127.0.0.1:{port}", "m", 10.0) as client:
        records = [await client.send(REQUEST) for _ in range(2)]
    assert [record.status for record in records] == ["ok", "ok"]
    assert connections == 2
