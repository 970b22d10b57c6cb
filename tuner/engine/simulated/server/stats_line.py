"""The line that vLLM writes every ten seconds: how fast it is, what runs and waits."""

from __future__ import annotations

import asyncio

from tuner.engine.simulated.profiles import Platform
from tuner.engine.simulated.server.engine_client import EngineClient
from tuner.engine.simulated.server.served import Served

INTERVAL_S = 10.0


async def tell_stats(served: Served, engine: EngineClient) -> None:
    """Write the line for ever; none while nothing has happened since the last."""
    device = "CPU" if served.settings.device.platform is Platform.CPU else "GPU"
    last = engine.counters
    while True:
        await asyncio.sleep(INTERVAL_S)
        now = engine.counters
        if now is last or served.command.args.get("disable-log-stats"):
            continue
        prompt = (now.prompt_tokens - last.prompt_tokens) / INTERVAL_S
        output = (now.generation_tokens - last.generation_tokens) / INTERVAL_S
        preempted = now.preemptions - last.preemptions
        hits = now.prefix_hits_tokens / max(1, now.prefix_queries_tokens)
        last = now
        served.log.say(
            "loggers.py:310",
            f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, "
            f"Avg generation throughput: {output:.1f} tokens/s, "
            f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, "
            + (f"Preemptions: {preempted}, " if preempted else "")
            + f"{device} KV cache usage: {now.kv_usage:.1%}, Prefix cache hit rate: {hits:.1%}",
        )
