"""How much of a trace's prompts begins as an earlier prompt did: what a prefix cache can save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tuner.load.traces.trace import HASH_BLOCK_TOKENS, TraceRequest

TEXT_BLOCK_CHARACTERS = 64
"""About the 16 tokens of a block of vLLM's KV cache, at four characters a token."""

_MOST_BLOCKS = 3_000_000
"""So many different blocks are remembered (some 250 MB); prefixes behind count as new."""


class PrefixCount:
    """Counts shared prefixes while a trace is read, in the file's order.

    Of requests with `hash_ids` by these, in tokens; of texts by whole blocks of characters. A
    block is shared if it, and all before it in its prompt, came in an earlier request: an
    unlimited cache would have them. Blocks are known by a hash that is chained over the prompt.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._shared = 0
        self._all = 0
        self._is_known = True

    def add(self, request: TraceRequest) -> None:
        """Count one request."""
        if not self._is_known:
            return
        if request.hash_ids and request.input_tokens is not None:
            tokens = HASH_BLOCK_TOKENS * self._known_blocks(request.hash_ids)
            self._shared += min(tokens, request.input_tokens)
            self._all += request.input_tokens
        elif (text := request.text) is not None:
            blocks = self._known_blocks(_text_blocks(text))
            self._shared += blocks * TEXT_BLOCK_CHARACTERS
            self._all += len(text)
        else:
            self._is_known = False
            self._seen.clear()

    def fraction(self) -> float | None:
        """Share of all prompts, 0 to 1; None if of some request only the length is known."""
        return self._shared / self._all if self._is_known and self._all else None

    def _known_blocks(self, blocks: Iterable[object]) -> int:
        """How many of a prompt's first blocks were seen before; all are from now on."""
        known, chain = 0, 0
        is_prefix = True
        for block in blocks:
            chain = hash((chain, block))
            is_prefix = is_prefix and chain in self._seen
            known += is_prefix
            if not is_prefix and len(self._seen) < _MOST_BLOCKS:
                self._seen.add(chain)
        return known


def _text_blocks(text: str) -> Iterator[str]:
    whole = len(text) - len(text) % TEXT_BLOCK_CHARACTERS
    for begin in range(0, whole, TEXT_BLOCK_CHARACTERS):
        yield text[begin : begin + TEXT_BLOCK_CHARACTERS]
