"""The HTTP side of the stand-in; see `fake_vllm.py`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
import zlib

from aiohttp import web
from fake_vllm_engine import VERSION, Engine, fault, say


def token_ids(prompt: str | list[int]) -> list[int]:
    """One token a word; `w17` is token 17, other words hash."""
    if not isinstance(prompt, str):
        return list(prompt)
    return [
        int(w[1:]) if re.fullmatch(r"w\d+", w) else zlib.crc32(w.encode()) % 2048
        for w in prompt.split()
    ]


def error(status: int, message: str, kind: str = "BadRequestError") -> web.Response:
    """An error in vLLM's form."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)


class Api:
    """The HTTP side; one instance a process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.slots = asyncio.Semaphore(engine.max_num_seqs)
        self.step_s = float(os.environ.get("FAKE_VLLM_STEP_S", "0.001"))
        self.fault_after = int(os.environ.get("FAKE_VLLM_FAULT_AFTER", "8"))

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.dead else 200)

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def models(self, request: web.Request) -> web.Response:
        entry = {
            "id": self.engine.model,
            "object": "model",
            "max_model_len": self.engine.max_model_len,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def tokenize(self, request: web.Request) -> web.Response:
        ids = token_ids((await request.json())["prompt"])
        body = {"count": len(ids), "max_model_len": self.engine.max_model_len, "tokens": ids}
        return web.json_response(body)

    async def detokenize(self, request: web.Request) -> web.Response:
        ids = (await request.json())["tokens"]
        return web.json_response({"prompt": " ".join(f"w{i}" for i in ids)})

    async def metrics(self, request: web.Request) -> web.Response:
        e = self.engine
        label = f'{{engine="0",model_name="{e.model}"}}'
        values = {
            "num_preemptions_total": ("counter", e.preemptions),
            "prompt_tokens_total": ("counter", e.prompt_tokens),
            "generation_tokens_total": ("counter", e.generation_tokens),
            "prefix_cache_queries_total": ("counter", e.prefix_queries),
            "prefix_cache_hits_total": ("counter", e.prefix_hits),
            "kv_cache_usage_perc": ("gauge", min(1.0, e.kv_used / e.kv_tokens)),
            "num_requests_running": ("gauge", e.running),
            "num_requests_waiting": ("gauge", e.waiting),
        }
        lines = []
        for name, (kind, value) in values.items():
            lines.append(f"# HELP vllm:{name.removesuffix('_total')} help")
            lines.append(f"# TYPE vllm:{name.removesuffix('_total')} {kind}")
            lines.append(f"vllm:{name}{label} {float(value)}")
        info = {
            "block_size": e.block_size,
            "cache_dtype": e.cache_dtype,
            "engine": "0",
            "kv_cache_size_tokens": e.kv_tokens,
            "num_gpu_blocks": e.kv_tokens // e.block_size + 1,
            "kv_cache_max_concurrency": e.kv_tokens / e.max_model_len,
        }
        labels = ",".join(f'{key}="{value}"' for key, value in info.items())
        lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{labels}}} 1.0"]
        return web.Response(text="\n".join(lines) + "\n")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        e = self.engine
        if body.get("model") not in (None, e.model):
            return error(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        if e.dead or fault("server_error"):
            return error(500, "EngineCore encountered an issue.", "InternalServerError")
        if fault("slow_ready") and time.monotonic() < e.ready_at + 0.7:
            return error(500, "not yet", "InternalServerError")
        ids = token_ids(body.get("prompt", ""))
        limit = body.get("max_tokens", 16)
        if len(ids) + limit > e.max_model_len:
            return error(
                400,
                f"This model's maximum context length is {e.max_model_len} tokens. However, "
                f"you requested {limit} output tokens and your prompt contains {len(ids)} "
                "input tokens.",
            )
        count = limit if body.get("ignore_eos") else max(1, limit * 3 // 4)
        e.waiting += 1
        async with self.slots:
            e.waiting -= 1
            e.running += 1
            e.kv_used += len(ids) + count
            try:
                return await self.generate(request, body, ids, count)
            finally:
                e.running -= 1
                e.kv_used -= len(ids) + count

    def account(self, ids: list[int], count: int) -> None:
        """Counters of one finished request, and the faults that come under load."""
        e = self.engine
        e.preemptions += e.max_num_seqs * (len(ids) + count) > e.kv_tokens
        e.prompt_tokens += len(ids)
        e.generation_tokens += count
        e.prefix_queries += len(ids)
        key = hash(tuple(ids))
        e.prefix_hits += (len(ids) - 1) // e.block_size * e.block_size if key in e.seen else 0
        e.seen.add(key)
        e.finished += 1
        if e.finished == self.fault_after:
            if fault("killed_under_load"):
                os.kill(os.getpid(), signal.SIGKILL)
            if fault("oom_under_load"):
                die(
                    e,
                    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 "
                    "has a total capacity of 1.00 GiB of which 12.00 MiB is free.",
                    leave=True,
                )

    async def generate(
        self, request: web.Request, body: dict[str, object], ids: list[int], count: int
    ) -> web.StreamResponse:
        """One completion, streamed or whole."""
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": count,
            "total_tokens": len(ids) + count,
        }
        head = {
            "id": f"cmpl-{self.engine.finished}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.engine.model,
        }
        finish = "length" if body.get("ignore_eos") else "stop"
        await asyncio.sleep(self.step_s + len(ids) * self.step_s / 100)
        if not body.get("stream"):
            await asyncio.sleep(count * self.step_s)
            self.account(ids, count)
            choice = {"index": 0, "text": " w1" * count, "finish_reason": finish}
            return web.json_response({**head, "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(count):
            await asyncio.sleep(self.step_s if i else 0)
            if self.engine.dead:
                event = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
                return response
            last = i == count - 1
            choice = {"index": 0, "text": f" w{i}", "finish_reason": finish if last else None}
            await response.write(f"data: {json.dumps({**head, 'choices': [choice]})}\n\n".encode())
        self.account(ids, count)
        if (body.get("stream_options") or {}).get("include_usage"):
            event = {**head, "choices": [], "usage": usage}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def die(engine: Engine, root: str, *, leave: bool) -> None:
    """The engine's death as vLLM tells it; the API server exits 0 a moment later."""
    engine.dead = True
    say(
        f"EngineCore encountered a fatal error.\nTraceback (most recent call last):\n{root}",
        level="ERROR",
    )
    say(
        "AsyncLLM output_handler failed.\nvllm.v1.engine.exceptions.EngineDeadError: EngineCore "
        "encountered an issue. See stack trace (above) for the root cause.",
        "(APIServer pid=4241)",
        "ERROR",
    )
    if leave:
        asyncio.get_running_loop().call_later(0.1, os._exit, 0)
