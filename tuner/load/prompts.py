"""Prompts that a prefix cache knows nothing of.

A server answers a prompt that it has seen before from its cache, so a load that repeats
prompts measures the cache and not the configuration. Prompts are therefore drawn at random
and made to differ within their first ids, ahead of the smallest cache block in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Item = TypeVar("Item", str, int)

HEAD_ITEMS = 8
"""Prompts differ within this many first items: half of vLLM's smallest usual block of 16."""

MIN_VOCABULARY = 16
"""With fewer ids to draw from, a head of eight no longer tells prompts apart reliably."""

_REDRAWS = 100
"""Tries for a new head. Only prompts of one or two items run out of them, and a prompt
shorter than a cache block is not cached at all."""

WORDS_TEXT = """
the quick brown fox jumps over a lazy dog while seven old friends walk along the river and talk
about how water moves under every bridge in town when summer comes people open their windows early
to let in fresh air children play near the market where farmers sell bread fruit cheese and honey
from their own land each morning a train leaves the station for the coast it takes about three hours
and passes through green hills dark forests and small villages with white churches some passengers
read books or newspapers others sleep or look out at fields of yellow corn my brother works as an
engineer for a company that builds machines which measure light and sound he says that most of his
time goes into finding out why something does not work as it should rather than making new things
last winter snow fell for eleven days without pause so schools were closed and nobody could drive
we burned wood in the kitchen stove cooked soup played cards and told stories until late at night
science is a way of asking questions about nature in such a form that an answer can be checked by
anyone who cares to repeat the experiment good teachers know this and let students try before they
explain history on the other hand cannot be repeated but it may still be compared with what other
witnesses wrote down at that moment music needs no translation a simple song can make strangers
smile across a crowded room doctors believe that regular exercise enough sleep and careful eating
help against many diseases yet few of us follow such advice for long money buys comfort not peace
governments collect taxes to pay for roads hospitals police courts and defense whether they spend
them wisely is one subject of almost every election computers store numbers as patterns of tiny
electric charges programs tell them what should happen next and in which order memory is fast but
limited disks are large but slow networks connect distant places within a fraction of a second
birds travel thousands of miles between continents using stars magnetic fields and familiar
mountains as guides gardeners plant seeds in spring remove weeds during june and gather vegetables
before autumn frost painters mix blue with red to get purple and add black only when they must
law protects weak against strong customs protect habit against change perhaps both are necessary
"""
"""Plain English. What a model's tokenizer makes of it are ordinary ids, never special ones."""


def words() -> list[str]:
    """The different words of `WORDS_TEXT`, in the order of the alphabet."""
    return sorted(set(WORDS_TEXT.split()))


def unique_sequences(
    pool: Sequence[Item], lengths: Sequence[int], rng: np.random.Generator
) -> list[tuple[Item, ...]]:
    """Draw one sequence from `pool` for each length, no two with the same head.

    A sequence shorter than `HEAD_ITEMS` is its own head. Where a length is so short that
    all its sequences are taken, sequences repeat.
    """
    seen: set[tuple[int, ...]] = set()
    sequences = []
    for length in lengths:
        picks = rng.integers(len(pool), size=length).tolist()
        for _ in range(_REDRAWS):
            if tuple(picks[:HEAD_ITEMS]) not in seen:
                break
            picks[:HEAD_ITEMS] = rng.integers(len(pool), size=min(HEAD_ITEMS, length)).tolist()
        seen.add(tuple(picks[:HEAD_ITEMS]))
        sequences.append(tuple(map(pool.__getitem__, picks)))
    return sequences
