#!/usr/bin/env python3
"""How fast logs are read, beside splitting the same bytes into lines.

    python tests/bench/log_reader.py [--mib 32]

CPU time of this process, the best of three: other programs on the machine count little.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tuner.engine.logs import LogReader

CORPUS = Path(__file__).parents[1] / "data" / "logs" / "corpus"
PIECE = 4 * 2**20


def serving_lines(chance: random.Random) -> list[str]:
    """What a busy server writes: access log, requests, debug lines, statistics."""
    lines = []
    for number in range(5000):
        kind = chance.random()
        port, at = (
            chance.randint(30000, 60000),
            f"08-21 07:{number // 60 % 60:02d}:{number % 60:02d}",
        )
        if kind < 0.6:
            text = f'INFO:     127.0.0.1:{port} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
        elif kind < 0.8:
            prompt = "lorem ipsum dolor sit amet consectetur " * chance.randint(1, 8)
            text = (
                f"(APIServer pid=123) INFO {at} [logger.py:40] Received request cmpl-{number:08x}: "
                f"prompt: 'Write about {prompt}', params: SamplingParams(n=1), lora_request: None."
            )
        elif kind < 0.98:
            text = f"(EngineCore pid=77) DEBUG {at} [v1/engine/core.py:400] loop active {number}."
        else:
            text = (
                f"(APIServer pid=123) INFO {at} [loggers.py:123] Engine 000: Avg prompt "
                f"throughput: {number % 100}.1 tokens/s, Avg generation throughput: 12.0 "
                "tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%, "
                "Prefix cache hit rate: 0.0%"
            )
        lines.append(text)
    return lines


def wrapped(text: str, width: int) -> str:
    """As a terminal of that width breaks it."""
    return "\n".join(
        line[at : at + width] for line in text.split("\n") for at in range(0, len(line) or 1, width)
    )


def hex_dump(chance: random.Random) -> str:
    """Lines of one width that nobody broke."""
    return "".join(
        f"{at:08x}  {chance.randbytes(16).hex(' ')}  |................|\n" for at in range(4000)
    )


def logs(mib: int) -> dict[str, bytes]:
    """By name: logs of about that size."""
    lines = serving_lines(random.Random(0))
    start = (CORPUS / "none_0.29.0.log").read_text(encoding="utf-8")
    failed = (CORPUS / "unknown_0.8.5.log").read_text(encoding="utf-8")
    died = (CORPUS / "oom_runtime_0.33.0.log").read_text(encoding="utf-8")
    serving = "\n".join(lines) + "\n"
    debug = "".join(line + "\n" for line in lines if " DEBUG " in line)

    def filled(head: str, body: str) -> bytes:
        times = max(1, mib * 2**20 // len(body))
        return (head + body * times).encode()

    return {
        "a busy server": filled(start, serving),
        "an engine that died, and what follows": filled(died, failed),
        "a start that does not end": filled("", debug),
        "a start that fails again and again": filled("", failed),
        "one line without an end": filled(start, "lorem ipsum " * 10_000),
        "a hex dump": filled("", hex_dump(random.Random(1))),
        "lines of 70 letters": filled("", ("a" * 70 + "\n") * 1000),
        **{
            f"{name}, wrapped at {width}": filled(wrapped(head, width), wrapped(body, width))
            for width in (80, 120, 200)
            for name, head, body in (
                ("a busy server", start, serving),
                ("a start that does not end", "", debug),
                ("a start that fails again and again", "", failed),
            )
        },
    }


def split(raw: bytes) -> None:
    """The yardstick."""
    for at in range(0, len(raw), PIECE):
        for _ in raw[at : at + PIECE].decode("utf-8", "replace").split("\n"):
            pass


def read(raw: bytes) -> None:
    """The same with the log reader."""
    reader = LogReader()
    for at in range(0, len(raw), PIECE):
        reader.feed(raw[at : at + PIECE])
    reader.finish()
    reader.failure()


def seconds(work: Callable[[bytes], None], raw: bytes) -> float:
    """CPU time of one run, the best of three."""
    best = float("inf")
    for _ in range(3):
        begin = time.process_time()
        work(raw)
        best = min(best, time.process_time() - begin)
    return best


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=32, help="size of each log")
    mib = parser.parse_args(argv).mib
    print(f"{'log':52}{'read':>12}{'split':>12}{'ratio':>8}")
    for name, raw in logs(mib).items():
        size, reading, splitting = len(raw) / 2**20, seconds(read, raw), seconds(split, raw)
        print(
            f"{name:52}{size / reading:7.1f} MiB/s{size / splitting:7.0f} MiB/s"
            f"{reading / splitting:8.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
