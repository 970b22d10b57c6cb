"""One streaming completion at a time, timed chunk by chunk as it arrives.

Whatever the server does ends in a `RequestRecord`: an answer cut short, an error in the
middle of a stream, a broken connection. Clock: `time.perf_counter`.
"""

from __future__ import annotations

import asyncio
import json
import time
from types import TracebackType

import aiohttp

from tuner.load.stream import CompletionStream, error_text
from tuner.load.workload import NoTokenizer, Request, TokenizeError
from tuner.types import JsonValue, RequestRecord, RequestStatus

KEEPALIVE_S = 2.0
"""How long an idle connection is kept. vLLM closes its end after 5 s
(VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request sent into a connection that is just being closed
would be held against the configuration."""

_ERROR_BODY_BYTES = 16 * 1024
_HTTP_OK = 200


class LoadClient:
    """Sends requests to one server over as many connections as are in flight.

    An async context manager; outside of it nothing can be sent.

    Args:
        base_url: without a trailing slash.
        model: the served model's name.
        timeout_s: longest time from sending a request to the end of its answer.
    """

    def __init__(self, base_url: str, model: str, timeout_s: float) -> None:
        self._base_url = base_url
        self._model = model
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> LoadClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections at once, those of requests in flight too (they fail)."""
        if self._session is not None:
            await self._session.close()

    async def send(self, request: Request) -> RequestRecord:
        """Send one request and follow its stream to the end.

        Never raises for what the server does. The status is

        - REJECTED: a 4xx, or an answer cut off because prompt and answer exceed the
          context: older versions of vLLM refuse such a request, newer ones shorten it.
        - FAILED: any other status, an error event, a broken connection, a stream without
          its end or its usage, an answer of no tokens.
        - TIMEOUT: not ended within `timeout_s`.
        """
        body = self._completion_body(request)  # before the clock starts
        stream = CompletionStream(request.output_tokens)
        status: RequestStatus | None = None
        error = ""
        send_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                status, error = await self._exchange(body, stream)
        except (aiohttp.ClientError, OSError) as problem:
            status, error = RequestStatus.FAILED, _describe(problem)
            if limit.expired():
                status = RequestStatus.TIMEOUT
                error = f"no complete answer within {self._timeout_s:g} s"
        end_s = time.perf_counter() if stream.end_s is None else stream.end_s
        return RequestRecord(
            index=request.index,
            status=status,
            send_s=send_s,
            end_s=end_s,
            prompt_tokens=stream.prompt_tokens,
            output_tokens=stream.output_tokens,
            token_times_s=tuple(stream.token_times_s),
            error=error,
        )

    async def tokenize(self, text: str) -> list[int]:
        """Ask the server for the token ids of `text`, without special ones.

        Raises:
            NoTokenizer: it has no `/tokenize`.
            TokenizeError: it gave no usable answer.
        """
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._open_session().post(f"{self._base_url}/tokenize", json=body) as response,
            ):
                content = await response.read()
        except (aiohttp.ClientError, OSError) as problem:
            raise TokenizeError(f"/tokenize: {_describe(problem)}") from problem
        if response.status in (404, 405):
            raise NoTokenizer("the server has no /tokenize")
        if response.status != _HTTP_OK:
            raise TokenizeError(f"/tokenize: HTTP {response.status}: {error_text(content)}")
        return _token_ids(content)

    async def _exchange(self, body: bytes, stream: CompletionStream) -> tuple[RequestStatus, str]:
        url = f"{self._base_url}/v1/completions"
        session = self._open_session()
        async with session.post(url, data=body, allow_redirects=False) as response:
            if response.status != _HTTP_OK:
                content = await response.content.read(_ERROR_BODY_BYTES)
                refused = 400 <= response.status < 500
                status = RequestStatus.REJECTED if refused else RequestStatus.FAILED
                return status, f"HTTP {response.status}: {error_text(content)}"
            async for data in response.content.iter_any():
                if not stream.feed(data, time.perf_counter()):
                    break
        return stream.verdict()

    def _completion_body(self, request: Request) -> bytes:
        return json.dumps(
            {
                "model": self._model,
                "prompt": request.prompt,
                "max_tokens": request.output_tokens,
                "ignore_eos": request.ignore_eos,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            raise aiohttp.ClientConnectionError("the client is closed")
        return self._session


def _token_ids(content: bytes) -> list[int]:
    try:
        answer: JsonValue = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise TokenizeError("/tokenize: the answer is not JSON") from problem
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list):
        raise TokenizeError("/tokenize: the answer has no list `tokens`")
    ids = [token for token in tokens if type(token) is int]
    if len(ids) != len(tokens):
        raise TokenizeError("/tokenize: the answer has tokens that are no numbers")
    return ids


def _describe(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
