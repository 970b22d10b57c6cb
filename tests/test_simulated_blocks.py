"""The block pool against a plain model of vLLM's queue, and the host tier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engine.simulated.blocks import BlockPool, HostTier


def test_pool_keeps_the_null_block_back():
    pool = BlockPool(5, caching=True)
    assert pool.free == 4
    assert pool.take(4) == [1, 2, 3, 4]
    assert (pool.free, pool.usage) == (0, 1.0)
    with pytest.raises(IndexError):
        pool.take(1)


def test_pool_reuses_blocks_without_content_first_and_last_freed_first():
    pool = BlockPool(6, caching=True)
    first, second = pool.take(2), pool.take(2)
    pool.release(reversed(first))
    pool.release(reversed(second))
    # vLLM puts a request's blocks at the front in the order in which they are given back.
    assert pool.take(5) == [4, 3, 2, 1, 5]


def test_pool_evicts_cached_blocks_last_and_in_order_of_their_release():
    pool = BlockPool(5, caching=True)
    one, two = pool.take(1), pool.take(1)
    pool.remember(one[0], 11)
    pool.remember(two[0], 22)
    pool.release(two)
    pool.release(one)
    assert pool.take(2) == [3, 4]
    assert pool.find([11]) == one
    assert pool.take(1) == two
    assert pool.find([22]) == []
    assert pool.find([11]) == one


def test_pool_finds_only_an_unbroken_run():
    pool = BlockPool(5, caching=True)
    blocks = pool.take(3)
    for block, block_hash in zip(blocks, (1, 2, 3), strict=True):
        pool.remember(block, block_hash)
    assert pool.find([1, 2, 3]) == blocks
    assert pool.find([1, 9, 3]) == blocks[:1]
    assert pool.find([9]) == []


def test_pool_shares_a_touched_block_until_its_last_release():
    pool = BlockPool(3, caching=True)
    block = pool.take(1)
    pool.remember(block[0], 7)
    pool.touch(block)
    pool.release(block)
    assert pool.idle(block) == 0
    pool.release(block)
    assert pool.idle(block) == 1
    assert pool.free == 2
    pool.touch(block)
    assert pool.free == 1


def test_pool_without_caching_forgets_at_once():
    pool = BlockPool(3, caching=False)
    block = pool.take(1)
    pool.release(block)
    assert pool.take(1) == block


def test_pool_reset_waits_for_blocks_in_use():
    pool = BlockPool(3, caching=True)
    block = pool.take(1)
    pool.remember(block[0], 7)
    assert not pool.reset()
    pool.release(block)
    assert pool.reset()
    assert pool.find([7]) == []
    assert sorted(pool.take(2)) == [1, 2]


class Queue:
    """vLLM's free queue as a plain list, its front first."""

    def __init__(self, count):
        self.order = list(range(1, count))
        self.hashes = {}

    def take(self, count):
        taken, self.order = self.order[:count], self.order[count:]
        for block in taken:
            self.hashes.pop(block, None)
        return taken

    def release(self, blocks):
        without = [block for block in blocks if block not in self.hashes]
        self.order = without + self.order + [block for block in blocks if block in self.hashes]


@given(st.data())
def test_pool_hands_out_blocks_in_the_order_of_one_queue(data):
    pool, queue = BlockPool(12, caching=True), Queue(12)
    held = []
    for number in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["take", "release", "remember", "touch"]))
        if action == "take":
            count = data.draw(st.integers(0, pool.free))
            blocks = pool.take(count)
            assert blocks == queue.take(count)
            held.append(blocks)
        elif action == "release" and held:
            blocks = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pool.release(reversed(blocks))
            queue.release(list(reversed(blocks)))
        elif action == "remember" and held:
            for index, block in enumerate(data.draw(st.sampled_from(held))):
                if block not in queue.hashes:
                    queue.hashes[block] = 100 * number + index
                    pool.remember(block, 100 * number + index)
        elif action == "touch":
            cached = [block for block in queue.order if block in queue.hashes][:2]
            if cached:
                pool.touch(cached)
                queue.order = [block for block in queue.order if block not in cached]
                held.append(cached)
        assert pool.free == len(queue.order)
        in_use = [block for blocks in held for block in blocks]
        assert len(in_use) == len(set(in_use)) == 11 - pool.free


# --- the host tier ---------------------------------------------------------------------


def test_host_tier_drops_what_was_used_longest_ago():
    tier = HostTier(2)
    assert tier.store(1)
    assert tier.store(2)
    assert tier.run_length([1]) == 1
    assert tier.store(3)
    assert tier.run_length([2]) == 0
    assert tier.run_length([1, 3, 2]) == 2
    assert not tier.store(3)
    assert len(tier) == 2


def test_host_tier_of_nothing_holds_nothing():
    tier = HostTier(0)
    assert not tier.store(1)
    assert len(tier) == 0
