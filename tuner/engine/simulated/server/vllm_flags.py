"""The flags of `vllm serve`: what the parser of vLLM 0.32.0 (CPU build) tells of itself.

`vllm_flags.json` is what `tuner/engine/probe/ask_vllm.py` was answered, less what is empty,
and less the defaults of flags that take JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tuner.engine.flags import FlagTable
from tuner.types import JsonValue

_FILE = Path(__file__).with_name("vllm_flags.json")

_LONGEST_SHORT_NAME = 3
"""Aliases up to this length have one dash (`-tp`, `-dpn`), longer ones two."""


@cache
def known_flags() -> FlagTable:
    """All flags, with the version of the vLLM that has them."""
    document = json.loads(_FILE.read_text(encoding="utf-8"))
    return FlagTable.from_json({**document, "flags": [_whole(f) for f in document["flags"]]})


def option_strings(name: str, aliases: tuple[str, ...]) -> list[str]:
    """How a flag is written on the command line, in the order in which vLLM's parser has it."""
    short = [a for a in aliases if len(a) <= _LONGEST_SHORT_NAME]
    return [*(f"--{a}" for a in (name, *aliases) if a not in short), *(f"-{a}" for a in short)]


def _whole(entry: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    empty: dict[str, JsonValue] = {
        "dest": str(entry["name"]).replace("-", "_"),
        "default": False if entry["kind"] == "switch" else None,
        "aliases": [],
        "choices": None,
        "nargs": None,
        "optional_value": False,
        "repeats": False,
        "deprecated": False,
    }
    return empty | dict(entry)
