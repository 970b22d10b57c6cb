"""vLLM's HTTP interface on the simulated engine."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from tuner.engine.simulated.server.completion_request import BadRequest, read_request
from tuner.engine.simulated.server.engine_client import Answer, EngineClient, EngineDead
from tuner.engine.simulated.server.faults import Faults
from tuner.engine.simulated.server.generation import Generation
from tuner.engine.simulated.server.metrics_page import CONTENT_TYPE, MALFORMED
from tuner.engine.simulated.server.replies import (
    DONE,
    ENGINE_DEAD,
    error_body,
    event,
    usage_of,
)
from tuner.engine.simulated.server.served import Served
from tuner.engine.simulated.server.toy_tokenizer import detokenize, tokenize
from tuner.types import JsonValue

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BAD_REQUEST = "BadRequestError"
_OPEN_PATHS = "/v1"
"""Only these ask for an API key."""

_LARGEST_BODY = 64 * 2**20


class Api:
    """The routes.

    Args:
        on_answered: called after each completion that was answered, with their number so far.

    Attributes:
        stopping: it is shutting down: new requests get a 500.
    """

    def __init__(
        self,
        served: Served,
        engine: EngineClient,
        faults: Faults,
        on_answered: Callable[[int], None],
    ) -> None:
        self.stopping = False
        self._served = served
        self._engine = engine
        self._faults = faults
        self._on_answered = on_answered
        self._metrics = served.metrics
        self._begun = 0
        self._answered = 0
        self._ready_s = time.monotonic()

    def app(self) -> web.Application:
        """For aiohttp's server."""
        app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[self._around])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/metrics", self._page),
                web.get("/metrics/", self._page),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
            ]
        )
        return app

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """API keys, errors in vLLM's form, and the access log."""
        keys = self._served.command.api_keys
        if keys and request.path.startswith(_OPEN_PATHS) and not _shows(request, keys):
            response: web.StreamResponse = web.json_response({"error": "Unauthorized"}, status=401)
        else:
            try:
                response = await handler(request)
            except BadRequest as problem:
                response = _error(str(problem), _BAD_REQUEST, 400)
            except EngineDead:
                response = _error(*ENGINE_DEAD)
            except web.HTTPException as problem:
                response = web.json_response({"detail": problem.reason}, status=problem.status)
        self._served.note_access(
            request.remote or "", request.method, request.path_qs, response.status
        )
        return response

    # --- of itself -----------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response(status=503 if self._engine.dead else 200)

    async def _version(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"version": self._served.version})

    async def _models(self, request: web.Request) -> web.Response:
        del request
        command, length = self._served.command, self._served.plan.max_model_len
        data = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": command.model,
                "parent": None,
                "max_model_len": length,
            }
            for name in command.served_names
        ]
        return web.json_response({"object": "list", "data": data})

    async def _page(self, request: web.Request) -> web.Response:
        """/metrics has all; /metrics/ is prometheus_client's own and knows `name[]`."""
        if self._faults.has("no_metrics"):
            raise web.HTTPNotFound
        only = request.query.getall("name[]", []) if request.path.endswith("/") else []
        text = self._metrics.page(self._engine.counters, frozenset(only))
        if self._faults.after("bad_metrics", self._answered):
            text += MALFORMED
        return web.Response(text=text, headers={"Content-Type": CONTENT_TYPE})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        del request
        done = await self._engine.reset_prefix_cache()
        return web.Response(status=200 if done else 503)

    # --- tokens --------------------------------------------------------------------------

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if isinstance(body.get("messages"), list):
            ids = read_request(body, chat=True, vocabulary=self._served.vocabulary).prompt
        else:
            ids = tokenize(str(body.get("prompt", "")), self._served.vocabulary)
        length = self._served.plan.max_model_len
        return web.json_response({"count": len(ids), "max_model_len": length, "tokens": ids})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await _body(request)).get("tokens")
        if not isinstance(tokens, list):
            raise BadRequest("tokens: Input should be a valid list")
        ids = [t for t in tokens if isinstance(t, int) and not isinstance(t, bool)]
        if len(ids) != len(tokens):
            raise BadRequest("tokens: Input should be a valid integer")
        return web.json_response({"prompt": detokenize(ids)})

    # --- completions ---------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=True)

    async def _complete(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        begin_s = time.monotonic()
        body = await _body(request)
        model = body.get("model")
        if model is not None and model not in self._served.command.served_names:
            return _error(f"The model `{model}` does not exist.", "NotFoundError", 404)
        number, self._begun = self._begun, self._begun + 1
        if (failed := self._fault_instead(number)) is not None:
            return failed
        asked = read_request(body, chat=chat, vocabulary=self._served.vocabulary)
        refusal = self._served.refuse(len(asked.prompt), asked.max_tokens)
        if refusal is not None:
            raise BadRequest(refusal.message)
        generation = Generation(self._served, asked, number)
        request_id, answer = self._engine.submit(asked.prompt, generation.tokens)
        ending = "abort"
        try:
            if asked.stream:
                response = await self._stream(request, answer, generation, begin_s)
            else:
                response = await self._whole(answer, generation, begin_s)
            ending = generation.reason
        finally:
            self._engine.abort(request_id)
            self._metrics.finished[ending] += 1
            self._metrics.e2e_s.observe(time.monotonic() - begin_s)
            self._metrics.request_prompt_tokens.observe(len(asked.prompt))
            self._metrics.request_generation_tokens.observe(generation.out)
            if (tpot_s := generation.tpot_s) is not None:
                self._metrics.tpot_s.observe(tpot_s)
        self._answered += 1
        self._on_answered(self._answered)
        return response

    def _fault_instead(self, number: int) -> web.Response | None:
        """An error that this completion is answered with on demand, or because of the end."""
        not_yet = self._faults.get("not_yet")
        early = not_yet and time.monotonic() < self._ready_s + not_yet.number("seconds")
        if self.stopping or early or self._faults.strikes("http_500", number):
            return _error("Internal server error", "InternalServerError", 500)
        if self._faults.strikes("http_429", number):
            return _error("Too many requests: the queue is full", "TooManyRequestsError", 429)
        return None

    async def _whole(self, answer: Answer, generation: Generation, begin_s: float) -> web.Response:
        ended = False
        while not ended:
            count, ended = await answer.more()
            self._observe(generation, count, begin_s)
        text = generation.text.words(0, generation.out)
        usage = self._usage(generation)
        return web.Response(
            body=generation.reply.whole(text, generation.reason, usage),
            content_type="application/json",
        )

    async def _stream(
        self, request: web.Request, answer: Answer, generation: Generation, begin_s: float
    ) -> web.StreamResponse:
        cut = self._faults.strikes("cut_stream", generation.number)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if opening := generation.reply.opening():
            await response.write(opening)
        try:
            ended = False
            while not ended:
                count, ended = await answer.more()
                self._observe(generation, count, begin_s)
                await response.write(generation.piece(count, last=ended))
                if cut and generation.out * 2 >= generation.tokens and request.transport:
                    request.transport.abort()
            usage = self._usage(generation)
            if generation.asked.with_usage and usage is not None:
                await response.write(generation.reply.usage(usage))
        except EngineDead:
            await response.write(event(error_body(*ENGINE_DEAD)))
        await response.write(DONE)
        return response

    def _observe(self, generation: Generation, count: int, begin_s: float) -> None:
        """Tokens have come; several at once came since the last ones."""
        now_s = time.monotonic()
        if generation.out == 0:
            self._metrics.ttft_s.observe(now_s - begin_s)
            generation.first_s = now_s
        else:
            self._metrics.itl_s.observe((now_s - generation.last_s) / count, count)
        generation.last_s = now_s
        generation.out += count

    def _usage(self, generation: Generation) -> dict[str, JsonValue] | None:
        if self._faults.strikes("no_usage", generation.number):
            return None
        if self._faults.strikes("wrong_usage", generation.number):
            return usage_of(-1, -generation.out)
        return usage_of(len(generation.asked.prompt), generation.out)


async def _body(request: web.Request) -> dict[str, JsonValue]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as problem:
        raise BadRequest(f"JSON decode error: {problem}") from None
    if not isinstance(body, dict):
        raise BadRequest("Input should be a valid dictionary")
    return body


def _error(message: str, kind: str, code: int) -> web.Response:
    return web.json_response(error_body(message, kind, code), status=code)


def _shows(request: web.Request, keys: tuple[str, ...]) -> bool:
    return request.headers.get("Authorization", "") in [f"Bearer {key}" for key in keys]
