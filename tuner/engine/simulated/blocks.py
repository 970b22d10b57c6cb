"""The KV cache's blocks as vLLM's V1 `BlockPool` keeps them, and a host tier behind it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks by number, block 0 being the null block that nobody gets.

    A block that holds the KV of a known run of tokens (its hash chains all tokens before it)
    stays in the cache when it is freed: it goes to the end of the free queue and is found by
    later requests until it is handed out anew. One that holds nothing of use goes to the front.

    Args:
        num_blocks: the null block included.
        caching: whether prefix caching is on.
    """

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        # vLLM has one queue; in order of its front these are its three parts.
        self._reusable: list[int] = []  # freed without a hash; the last one is the front
        self._untouched = 1  # from here on, never handed out
        self._evictable: OrderedDict[int, None] = OrderedDict()  # freed with a hash, LRU first
        self._references = [0] * num_blocks
        self._hashes: list[int | None] = [None] * num_blocks
        # A hash may be that of several blocks: requests that came together computed it twice.
        self._cached: dict[int, dict[int, None]] = {}

    @property
    def free(self) -> int:
        """How many blocks can be handed out."""
        return len(self._reusable) + self.num_blocks - self._untouched + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, as the metric has it."""
        usable = self.num_blocks - 1
        return 1.0 - self.free / usable if usable else 0.0

    def take(self, count: int) -> list[int]:
        """Hand out blocks from the front of the queue; what they held is forgotten.

        Raises:
            IndexError: there are not so many.
        """
        if count > self.free:
            raise IndexError(f"{count} blocks of {self.free}")
        reusable, references = self._reusable, self._references
        taken = []
        for _ in range(count):
            if reusable:
                block = reusable.pop()
            elif self._untouched < self.num_blocks:
                block = self._untouched
                self._untouched += 1
            else:
                block, _ = self._evictable.popitem(last=False)
                self._forget(block)
            references[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give back one reference to each; those given back first are reused first."""
        references, hashes = self._references, self._hashes
        useless = []
        for block in blocks:
            references[block] -= 1
            if references[block] == 0:
                if hashes[block] is None or not self.caching:
                    useless.append(block)
                else:
                    self._evictable[block] = None
        useless.reverse()
        self._reusable += useless

    def touch(self, blocks: Iterable[int]) -> None:
        """Take one more reference to cached blocks, which leave the free queue."""
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def remember(self, block: int, block_hash: int) -> None:
        """A block in use is full: later requests with the same tokens may use it."""
        self._hashes[block] = block_hash
        blocks = self._cached.get(block_hash)
        if blocks is None:
            self._cached[block_hash] = {block: None}
        else:
            blocks[block] = None

    def find(self, hashes: Iterable[int]) -> list[int]:
        """The cached blocks of the longest run of `hashes` from their start."""
        found = []
        for block_hash in hashes:
            blocks = self._cached.get(block_hash)
            if not blocks:
                break
            found.append(next(iter(blocks)))
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of these cached blocks are in the free queue."""
        references = self._references
        return sum(references[block] == 0 for block in blocks)

    def reset(self) -> bool:
        """Forget all hashes; False, and nothing happens, while blocks are in use."""
        if self.free != self.num_blocks - 1:
            return False
        self._cached.clear()
        for block in self._evictable:
            self._hashes[block] = None
        return True

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is None:  # after a reset
            return
        self._hashes[block] = None
        blocks = self._cached[block_hash]
        del blocks[block]
        if not blocks:
            del self._cached[block_hash]


class HostTier:
    """Host memory with copies of KV blocks, least recently used first to go.

    Args:
        capacity: blocks that fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def store(self, block_hash: int) -> bool:
        """Copy a block to the host; False if it is there already (or nothing fits)."""
        if self.capacity == 0:
            return False
        if block_hash in self._held:
            self._held.move_to_end(block_hash)
            return False
        if len(self._held) >= self.capacity:
            self._held.popitem(last=False)
        self._held[block_hash] = None
        return True

    def run_length(self, hashes: Iterable[int]) -> int:
        """How many of `hashes` from their start are held."""
        length = 0
        for block_hash in hashes:
            if block_hash not in self._held:
                break
            self._held.move_to_end(block_hash)
            length += 1
        return length

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
