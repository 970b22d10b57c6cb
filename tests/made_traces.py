"""Small traces in the format and of the kind of the public ones, drawn by a seed."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

MOONCAKE_BLOCK = 512
"""Tokens that a name of `hash_ids` stands for."""

_BEGIN = datetime(2023, 11, 16, 18, 15, 46)


def write_azure(path: Path, rows: int, *, rate: float = 4.0, seed: int = 0) -> None:
    """As Azure's of 2023: CRLF, seven-digit fractions, no final newline; wide lengths of a chat
    service, at `rate` a second on average."""
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / rate, rows))
    sent = np.clip(rng.lognormal(6.5, 1.0, rows), 3, 6000).astype(int)
    asked = np.clip(rng.lognormal(5.1, 0.8, rows), 2, 1000).astype(int)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for at_s, *lengths in zip(due_s, sent, asked, strict=True):
        at = _BEGIN + timedelta(seconds=float(at_s))
        lines.append(f"{at:%Y-%m-%d %H:%M:%S.%f}0,{lengths[0]},{lengths[1]}")
    path.write_bytes("\r\n".join(lines).encode())


def write_mooncake(path: Path, rows: int, *, every_ms: int = 250, seed: int = 0) -> None:
    """As Mooncake's: requests of a few groups, each with a beginning of whole blocks of its own
    and a question that nobody else asks."""
    rng = np.random.default_rng(seed)
    blocks = iter(range(1_000_000))
    groups = [[next(blocks) for _ in range(length)] for length in (3, 4, 5)]
    lines = []
    for row in range(rows):
        beginning = groups[int(rng.integers(len(groups)))]
        own = int(rng.integers(200, 3 * MOONCAKE_BLOCK))
        names = [*beginning, *(next(blocks) for _ in range(-(-own // MOONCAKE_BLOCK)))]
        request = {
            "timestamp": row * every_ms + int(rng.integers(every_ms)),
            "input_length": len(beginning) * MOONCAKE_BLOCK + own,
            "output_length": int(rng.integers(40, 400)),
            "hash_ids": names,
        }
        lines.append(json.dumps(request))
    path.write_text("\n".join(lines) + "\n")
