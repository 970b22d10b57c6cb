"""A request inside the engine."""

from __future__ import annotations

from collections.abc import Sequence

_SALT_BITS = 32


class LiveRequest:
    """A request that is waiting or running.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: prompt and output so far.
        last: `tokens` at which it ends: `max_tokens` are out or the context is full.
        computed: tokens whose KV is in the cache.
        blocks: of the pool, in the order of its tokens.
        capacity: tokens that `blocks` hold.
        remembered: how many of `blocks`, from the start, are in the prefix cache.
        preemptions: how often it lost its blocks.
    """

    __slots__ = (
        "_block_size",
        "_hashes",
        "_prompt",
        "_salt",
        "blocks",
        "capacity",
        "computed",
        "last",
        "preemptions",
        "prompt_tokens",
        "remembered",
        "request_id",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int] | int,
        *,
        last: int,
        block_size: int,
        number: int,
    ) -> None:
        """Queue nothing yet.

        Args:
            prompt: token ids, or only their number for a prompt like no other.
            number: of no other request of this engine.
        """
        self.request_id = request_id
        self._prompt: Sequence[int] | None = None if isinstance(prompt, int) else prompt
        self.prompt_tokens = prompt if isinstance(prompt, int) else len(prompt)
        self.tokens = self.prompt_tokens
        self.last = last
        self.computed = 0
        self.blocks: list[int] = []
        self.capacity = 0
        self.remembered = 0
        self.preemptions = 0
        self._block_size = block_size
        self._salt = number << _SALT_BITS
        self._hashes: list[int] = []

    def hashes(self, first: int, end: int) -> Sequence[int]:
        """Hashes of its blocks `first..end - 1`, each chaining all tokens before it.

        Output tokens are like no others': a prompt that continues another's answer shares
        only the blocks of the first prompt.
        """
        if self._prompt is None:
            return range(self._salt + first, self._salt + end)
        known, size = self._hashes, self._block_size
        while len(known) < end:
            start = len(known) * size
            before = known[-1] if known else 0
            if start + size <= self.prompt_tokens:
                known.append(hash((before, tuple(self._prompt[start : start + size]))))
            else:
                known.append(hash((before, self._salt)))
        return known[first:end]

    def drop_blocks(self) -> list[int]:
        """Lose all blocks; they are given back from the tail on, as vLLM frees them."""
        blocks, self.blocks = self.blocks, []
        self.capacity = self.computed = self.remembered = 0
        blocks.reverse()
        return blocks
