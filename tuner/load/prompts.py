"""Prompts that a prefix cache knows nothing of, but for what they are meant to share.

A server answers a prompt that it has seen before from its cache, so a load that repeats
prompts measures the cache and not the configuration. Every prompt therefore begins with a head
that no other prompt of any round has, ahead of the smallest cache block in use; what follows is
drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Generic, TypeVar

import numpy as np

from tuner.load.seeds import Stream, generator

Item = TypeVar("Item", str, int)

HEAD_ITEMS = 8
"""Prompts differ within this many first items: half of vLLM's smallest usual block of 16."""

MIN_VOCABULARY = 16
"""With fewer ids to draw from, heads of eight do not suffice for a study's rounds."""

_ROUND = 1 << 22
"""Numbers of heads in a round: more than the requests and warm-ups that a spec may ask for."""

_GOLDEN = 0.618033988749895
"""Multiples of this part of a space are spread evenly over it (Fibonacci hashing, Knuth)."""

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


class PromptMaker(Generic[Item]):
    """Makes the prompts of one round from a pool of different items.

    Heads are numbered; a number becomes `HEAD_ITEMS` digits to the base of the pool's size,
    mixed by a multiplication that maps the numbers one to one, so that heads are different by
    construction and yet look random. Shorter prompts are all head; they repeat when all of
    their length are used up.

    Args:
        pool: at least `MIN_VOCABULARY` items.
    """

    def __init__(self, pool: Sequence[Item], seed: int, round_number: int) -> None:
        self._pool: Sequence[Item] = pool
        self._seed = seed
        self._round = round_number
        self._prompts = generator(seed, Stream.PROMPTS, round_number)
        self._answers = generator(seed, Stream.ANSWERS, round_number)
        self._blocks: dict[int, list[Item]] = {}

    def own(self, slot: int, tokens: int) -> list[Item]:
        """Items like no others; `slot` numbers the prompts of a round, called in that order."""
        return self._headed(self._round * _ROUND + slot, tokens, self._prompts)

    def block(self, number: int, tokens: int) -> list[Item]:
        """Items of a shared block, the same for the same number; all of one round are as long."""
        if number not in self._blocks:
            rng = generator(self._seed, Stream.BLOCKS, self._round, number)
            # From the other end of the numbers, where no prompt's head comes.
            self._blocks[number] = self._headed(-1 - self._round * _ROUND - number, tokens, rng)
        return self._blocks[number]

    def answer(self, tokens: int) -> list[Item]:
        """Items that stand for an answer in a conversation."""
        return self._drawn(tokens, self._answers)

    def _headed(self, number: int, tokens: int, rng: np.random.Generator) -> list[Item]:
        head = self._head(number, min(tokens, HEAD_ITEMS))
        return head + self._drawn(tokens - len(head), rng)

    def _head(self, number: int, items: int) -> list[Item]:
        size = len(self._pool)
        space = size**items
        value = (number * _step(space) + self._seed) % space
        digits = []
        for _ in range(items):
            value, digit = divmod(value, size)
            digits.append(self._pool[digit])
        return digits[::-1]

    def _drawn(self, tokens: int, rng: np.random.Generator) -> list[Item]:
        picks = rng.integers(len(self._pool), size=max(0, tokens)).tolist()
        return list(map(self._pool.__getitem__, picks))


def _step(space: int) -> int:
    """A multiplier that is coprime to `space`, near its golden section."""
    step = max(1, int(space * _GOLDEN))
    while gcd(step, space) != 1:
        step += 1
    return step
