"""What vLLM says while it starts: how far it is, and the sizes it finds.

Wordings are those of the sources of vLLM 0.4 to 0.33; where two are named, the older is in
brackets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from tuner.types import MemoryFacts, Stage

# --- stages ----------------------------------------------------------------------------

_STAGE_LINES: tuple[tuple[re.Pattern[str], Stage], ...] = tuple(
    (re.compile(pattern), stage)
    for pattern, stage in (
        (r"Starting to load model|Loading (?:safetensors|pt) checkpoint shards", Stage.LOADING),
        (r"Using model weights format|Loading weights took", Stage.LOADING),
        # The profile run follows at once; the CPU build has only the last wording.
        (
            r"Model loading took|Loading model weights took|Initializing model took"
            r"|Starting profile run for multi-modal models",
            Stage.PROFILING,
        ),
        (r"Start compiling function|Dynamo bytecode transform|Compiling a graph", Stage.COMPILING),
        (r"torch\.compile (?:takes|took)|Graph compilation (?:took|finished)", Stage.PROFILING),
        (
            r"Available KV cache memory:|# (?:GPU|CPU|cuda) blocks:|KV cache size: [\d,]+ tokens"
            r"|Memory profiling takes|GiB for KV cache on node",
            Stage.KV_ALLOCATION,
        ),
        (
            r"Capturing (?:the model for CUDA graphs|(?:a )?cudagraphs? |CUDA graphs?)",
            Stage.GRAPH_CAPTURE,
        ),
        (r"Graph capturing finished|init engine \(", Stage.WARMUP),
        (r"Application startup complete|Uvicorn running on", Stage.READY),
        # A log that was cut at its front shows only that the server serves.
        (r"Avg prompt throughput: |\"POST /[\w/.-]+ HTTP/1\.[01]\" 200", Stage.READY),
    )
)

# Loading is reported by every rank; a straggler does not set the stage back. Compiling and
# profiling alternate.
_ORDER = {
    Stage.LAUNCH: 0,
    Stage.LOADING: 1,
    Stage.PROFILING: 2,
    Stage.COMPILING: 2,
    Stage.KV_ALLOCATION: 3,
    Stage.GRAPH_CAPTURE: 4,
    Stage.WARMUP: 5,
    Stage.READY: 6,
    Stage.LOAD: 7,
}


def next_stage(stage: Stage, text: str) -> Stage:
    """The stage after the line `text`, given the one before it."""
    if not _STAGE_WORDS.search(text):
        return stage
    for pattern, reached in _STAGE_LINES:
        if pattern.search(text):
            if reached is Stage.GRAPH_CAPTURE and _ORDER[stage] < _ORDER[Stage.KV_ALLOCATION]:
                # From 0.21 on the profile run captures a few graphs to learn their size.
                reached = Stage.PROFILING
            return reached if _ORDER[reached] >= _ORDER[stage] else stage
    return stage


_STAGE_WORDS = re.compile(
    "oading|odel|ompil|Dynamo|KV |blocks|Memory|Capturing|capturing|engine|startup|Uvicorn"
    "|throughput|POST "
)
"""Some part of every line in the table, found faster than the table is read."""

STAGE_WORDS = {
    Stage.LAUNCH: "starting Python and importing vLLM",
    Stage.LOADING: "loading the weights",
    Stage.COMPILING: "compiling",
    Stage.PROFILING: "profiling memory",
    Stage.KV_ALLOCATION: "allocating the KV cache",
    Stage.WARMUP: "warming up",
    Stage.GRAPH_CAPTURE: "capturing CUDA graphs",
    Stage.READY: "waiting for the first answer",
    Stage.LOAD: "serving",
}
"""For people."""


# --- facts -----------------------------------------------------------------------------

_LONGEST_NUMBER = 30

_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"

Combine = Callable[[float, float], float]


def _latest(old: float, new: float) -> float:
    del old
    return new


@dataclass(frozen=True, slots=True)
class _Fact:
    """A number in a line.

    Attributes:
        field: of MemoryFacts.
        combine: of what is known and what another rank or engine says.
    """

    field: str
    pattern: re.Pattern[str]
    combine: Combine


_FACTS = (
    _Fact("weights_gib", re.compile(rf"Model loading took {_NUMBER} G(?:i?)B"), max),
    _Fact("weights_gib", re.compile(rf"Loading model weights took {_NUMBER} GB"), max),
    _Fact("kv_cache_gib", re.compile(rf"Available KV cache memory: {_NUMBER} GiB"), min),
    _Fact("kv_cache_gib", re.compile(rf"reserved {_NUMBER} GiB memory for KV Cache as"), min),
    _Fact(
        "kv_cache_gib",
        re.compile(rf"(?:Auto|Explicitly) set \({_NUMBER}/[\d.]+\) GiB for KV cache on node"),
        min,
    ),
    _Fact(
        "kv_cache_gib",
        re.compile(rf"the rest of the memory reserved for KV Cache is {_NUMBER} ?GiB"),
        min,
    ),
    _Fact("kv_cache_tokens", re.compile(rf"KV cache size: {_NUMBER} tokens"), min),
    _Fact(
        "max_concurrency",
        re.compile(rf"Maximum concurrency for [\d,]+ tokens per request: {_NUMBER}x"),
        min,
    ),
    _Fact(
        "max_model_len_tokens",
        re.compile(rf"Maximum concurrency for {_NUMBER} tokens per request"),
        _latest,
    ),
    _Fact("max_model_len_tokens", re.compile(rf"Using max model len {_NUMBER}"), _latest),
    _Fact(
        "max_model_len_tokens",
        re.compile(rf"Auto-fit max_model_len: reduced from \d+ to {_NUMBER}"),
        _latest,
    ),
    _Fact(
        "graph_gib",
        re.compile(rf"Graph capturing finished in \d+ secs?, took {_NUMBER} GiB"),
        max,
    ),
)

_RELEASE = r"\d+(?:\.\d+)+(?:\.?(?:post|dev|rc|a|b)\d+)*(?:\+[\w.]+)?"

_VERSION = re.compile(
    rf"vLLM (?:API )?server version (?P<server>{_RELEASE})"
    rf"|LLM engine \(v(?P<engine>{_RELEASE})\)"
    rf"|vLLM [Vv]ersion:? (?P<said>{_RELEASE})"
    # The banner of 0.14 and newer; NCCL says "NCCL version 2.21.5".
    rf"|(?<![A-Za-z] )\bversion (?P<banner>{_RELEASE})\s*$"
)

SIMULATED = "+simulated"
"""Ends the version of which the stand-in server tells (`tuner.engine.simulated`)."""

_WHOLE = frozenset({"kv_cache_tokens", "max_model_len_tokens"})


def with_facts(facts: MemoryFacts, text: str) -> MemoryFacts:
    """`facts` and what the line `text` adds to it."""
    if "ersion" in text or "LLM engine" in text:
        facts = _with_version(facts, text)
    if not _FACT_WORDS.search(text):
        return facts
    found: dict[str, float] = {}
    for fact in _FACTS:
        if match := fact.pattern.search(text):
            number = float(match[1].replace(",", "")[:_LONGEST_NUMBER])
            known = getattr(facts, fact.field)
            value = number if known is None else fact.combine(known, number)
            found[fact.field] = int(value) if fact.field in _WHOLE else value
    return replace(facts, **found) if found else facts  # type: ignore[arg-type]  # numbers only


def _with_version(facts: MemoryFacts, text: str) -> MemoryFacts:
    match = _VERSION.search(text)
    if match is None:
        return facts
    version = next(group for group in match.groups() if group)
    known = facts.vllm_version
    # A line that a terminal broke comes a second time, put together.
    if known is not None and not (version.startswith(known) and version != known):
        return facts
    return replace(facts, vllm_version=version, simulated=SIMULATED in version)


def may_tell(text: str) -> bool:
    """Quick: whether `next_stage` or `with_facts` may find something in the text."""
    return (
        _STAGE_WORDS.search(text) is not None
        or _FACT_WORDS.search(text) is not None
        or "ersion" in text
    )


def begins_anew(text: str) -> bool:
    """Whether a server says here that it begins: a log may hold several lives."""
    if "ersion" not in text:
        return False
    match = _VERSION.search(text)
    return match is not None and (match["server"] or match["banner"]) is not None


_FACT_WORDS = re.compile("took|memory|Memory|KV |tokens|model len|max_model_len")

assert {fact.field for fact in _FACTS} <= {field.name for field in fields(MemoryFacts)}
