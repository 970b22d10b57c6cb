"""One streaming completion at a time, timed chunk by chunk as it arrives.

Whatever the server does ends in a `RequestRecord`: an answer cut short, an error in the
middle of a stream, a broken connection. Clock: `time.perf_counter`.
"""

from __future__ import annotations

import asyncio
import json
import time
from types import TracebackType
from urllib.parse import urlsplit

from tuner.load.connection import Disconnected
from tuner.load.http_answer import HTTP_OK, HttpAnswer
from tuner.load.pool import ConnectionPool
from tuner.load.stream import CompletionStream, error_text
from tuner.load.workload import NoTokenizer, Request, TokenizeError
from tuner.types import JsonValue, RequestRecord, RequestStatus

_MAX_TOKENIZED_BYTES = 1 << 26


class LoadClient:
    """Sends requests to one server over as many connections as are in flight.

    An async context manager; outside of it nothing can be sent.

    Args:
        base_url: `http://host:port`, without a trailing slash.
        model: the served model's name.
        timeout_s: longest time from sending a request to the end of its answer.

    Raises:
        ValueError: `base_url` is of another kind.
    """

    def __init__(self, base_url: str, model: str, timeout_s: float) -> None:
        url = urlsplit(base_url)
        if url.scheme != "http" or not url.hostname:
            raise ValueError(f"no http:// address of a server: {base_url!r}")
        self._host = url.hostname
        self._port = url.port or 80
        self._netloc = url.netloc.rpartition("@")[2]
        self._path = url.path
        self._model = model
        self._timeout_s = timeout_s
        self._pool: ConnectionPool | None = None

    async def __aenter__(self) -> LoadClient:
        self._pool = await ConnectionPool.open(self._host, self._port)
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
        if self._pool is not None:
            self._pool.close()

    async def send(self, request: Request) -> RequestRecord:
        """Send one request and follow its stream to the end.

        Never raises for what the server does; `tuner.load.pool.NoMoreConnections` is this
        machine's doing. The status is

        - REJECTED: a 4xx, or an answer cut off because prompt and answer exceed the
          context: older versions of vLLM refuse such a request, newer ones shorten it.
        - SERVER_ERROR: any other status, an error event, an answer that is no event stream, a
          stream without its usage.
        - DISCONNECTED: no connection, a broken one, a stream without its end.
        - EMPTY: an answer of no tokens.
        - WRONG_LENGTH: of more tokens than asked for, or of less with `ignore_eos`.
        - TIMEOUT: not ended within `timeout_s`.

        Times of a request that is sent at once over a new connection count its connecting.
        """
        payload = self._post("/v1/completions", self._completion(request))  # before the clock
        stream = CompletionStream(request.output_tokens, ignore_eos=request.ignore_eos)
        send_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._open_pool().post(payload, stream.feed)
            status, error = _verdict(answer, stream)
        except Disconnected as problem:
            status, error = RequestStatus.DISCONNECTED, str(problem)
        except TimeoutError:
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
            token_counts=stream.token_counts(),
        )

    async def tokenize(self, text: str) -> list[int]:
        """Ask the server for the token ids of `text`, without special ones.

        Raises:
            NoTokenizer: it has no `/tokenize`.
            TokenizeError: it gave no usable answer.
        """
        body: JsonValue = {"model": self._model, "prompt": text, "add_special_tokens": False}
        content = bytearray()

        def keep(data: bytes, _: float) -> bool:
            content.extend(data)
            return len(content) <= _MAX_TOKENIZED_BYTES

        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._open_pool().post(self._post("/tokenize", body), keep)
        except (Disconnected, TimeoutError) as problem:
            raise TokenizeError(f"/tokenize: {_describe(problem)}") from problem
        if answer.status in (404, 405):
            raise NoTokenizer("the server has no /tokenize")
        if answer.error:
            raise TokenizeError(f"/tokenize: {answer.error}")
        if answer.status != HTTP_OK:
            error = error_text(answer.error_body)
            raise TokenizeError(f"/tokenize: HTTP {answer.status}: {error}")
        return _token_ids(bytes(content))

    def _completion(self, request: Request) -> JsonValue:
        prompt: JsonValue = request.prompt if isinstance(request.prompt, str) else [*request.prompt]
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "ignore_eos": request.ignore_eos,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            # Tells how many tokens a chunk carries. Costs vLLM nothing; its
            # `continuous_usage_stats` cost 6 % of what its API server spends on a token.
            "return_token_ids": True,
        }

    def _post(self, path: str, body: JsonValue) -> bytes:
        content = json.dumps(body).encode()
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n"
            f"Host: {self._netloc}\r\n"
            "Content-Type: application/json\r\n"
            "Accept-Encoding: identity\r\n"
            f"Content-Length: {len(content)}\r\n"
            "\r\n"
        )
        return head.encode() + content

    def _open_pool(self) -> ConnectionPool:
        if self._pool is None:
            raise Disconnected("the client is closed")
        return self._pool


def _verdict(answer: HttpAnswer, stream: CompletionStream) -> tuple[RequestStatus, str]:
    """Status and error of an answer that was read as far as it made sense."""
    if answer.error:
        return RequestStatus.SERVER_ERROR, answer.error
    if answer.status == HTTP_OK:
        return stream.verdict()
    refused = 400 <= answer.status < 500
    status = RequestStatus.REJECTED if refused else RequestStatus.SERVER_ERROR
    return status, f"HTTP {answer.status}: {error_text(answer.error_body)}"


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
