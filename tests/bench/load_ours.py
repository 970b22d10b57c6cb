"""The tuner's own client as a process of the benchmark, as the peers are.

python tests/bench/load_ours.py URL PROMPTS STREAMS TOKENS RESULT
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tuner beside these tests

from tuner.load.client import LoadClient
from tuner.load.workload import Request
from tuner.types import RequestRecord


async def send_all(url: str, requests: Sequence[Request], streams: int) -> list[RequestRecord]:
    """Send all requests, `streams` at a time."""
    records: list[RequestRecord] = []
    queue = iter(requests)

    async with LoadClient(url, "benchmark", timeout_s=120.0) as client:

        async def work() -> None:
            for request in queue:
                record = await client.send(request)
                records.append(record)

        await asyncio.gather(*(work() for _ in range(streams)))
    return records


def main(arguments: Sequence[str]) -> None:
    """Send the prompts of a file, and write a list of (number, status, send, times)."""
    url, prompts, streams, tokens, result = arguments
    requests = [
        Request(number, prompt, None, int(tokens), ignore_eos=True)
        for number, prompt in enumerate(json.loads(Path(prompts).read_text()))
    ]
    records = asyncio.run(send_all(url, requests, int(streams)))
    rows = [(r.index, r.status, r.error, r.send_s, r.token_times_s) for r in records]
    Path(result).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
