"""Servers of completions that do as they are told, and a client of each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from tuner.load.client import LoadClient
from tuner.load.workload import Request
from tuner.types import RequestRecord

REQUEST = Request(index=5, prompt=(11, 12, 13), prompt_tokens=3, output_tokens=3, ignore_eos=True)
STOPPING = replace(REQUEST, ignore_eos=False)
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


def ids_token(ids: list[int], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": " a", "finish_reason": finish_reason, "token_ids": ids}
    return event({"id": "cmpl-1", "choices": [choice]})


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


async def record_of(
    handler: Handler, timeout_s: float = 10.0, request: Request = REQUEST
) -> RequestRecord:
    async with client_of(handler, timeout_s=timeout_s) as client:
        return await client.send(request)
