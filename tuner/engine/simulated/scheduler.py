"""Which tokens of which requests make up the next step, by vLLM V1's rules.

The rules of `vllm/v1/core/sched/scheduler.py` (0.32) for a decoder with full attention, first
come first served, without speculative decoding, and with synchronous scheduling:

- A step has a budget of `max-num-batched-tokens`. Running requests come first, in the order
  in which they were admitted; each gets what is left to compute of it, cut to the budget.
- A running request that finds no block makes the one that was admitted last give up all of
  its own (also itself): that one waits at the front of the queue and computes its KV anew
  when it is admitted again, less what the prefix cache still has of it.
- Nobody is admitted in a step that preempted. Else waiting requests are, in order, while
  budget and `max-num-active-seqs` allow and the whole sequence finds blocks
  (`scheduler-reserve-full-isl`), plus the watermark's where something runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tuner.engine.simulated.blocks import BlockPool, HostTier
from tuner.engine.simulated.requests import LiveRequest
from tuner.engine.simulated.settings import EngineSettings


class Batch:
    """One step's work.

    Attributes:
        requests: scheduled, running ones first; `LiveRequest.computed` already counts this step.
        tokens: all tokens of the step.
        decodes: requests with one token to compute; `decode_context` is the sum of what they
            attend to, themselves included.
        prefill_tokens: of the other requests; `prefill_pairs` counts their pairs of a token
            and one it attends to, `prefill_context` the tokens whose KV they read.
        admitted, preempted: in this step, in order.
        queries_tokens, hits_tokens: of the prefix cache, at first admissions.
        host_queries_tokens, host_hits_tokens: likewise of the host tier.
        link_blocks: blocks that come over the link from the host tier.
    """

    __slots__ = (
        "admitted",
        "decode_context",
        "decodes",
        "hits_tokens",
        "host_hits_tokens",
        "host_queries_tokens",
        "link_blocks",
        "preempted",
        "prefill_context",
        "prefill_pairs",
        "prefill_tokens",
        "queries_tokens",
        "requests",
    )

    def __init__(self) -> None:
        self.requests: list[LiveRequest] = []
        self.decodes = self.decode_context = 0
        self.prefill_tokens = self.prefill_pairs = self.prefill_context = 0
        self.admitted: list[LiveRequest] = []
        self.preempted: list[LiveRequest] = []
        self.queries_tokens = self.hits_tokens = 0
        self.host_queries_tokens = self.host_hits_tokens = 0
        self.link_blocks = 0

    @property
    def tokens(self) -> int:
        """All tokens of the step."""
        return self.decodes + self.prefill_tokens

    def include(self, request: LiveRequest, tokens: int) -> None:
        """Add a request's next tokens and count them as computed."""
        begin = request.computed
        request.computed = end = begin + tokens
        self.requests.append(request)
        if tokens == 1:
            self.decodes += 1
            self.decode_context += end
        else:
            self.prefill_tokens += tokens
            self.prefill_context += end
            self.prefill_pairs += tokens * begin + tokens * (tokens + 1) // 2


class Scheduler:
    """Queues, blocks, and the rules above.

    Attributes:
        waiting: the front is admitted next.
        running: in the order of admission.
    """

    def __init__(
        self, settings: EngineSettings, *, num_blocks: int, max_model_len: int, host_blocks: int
    ) -> None:
        self.pool = BlockPool(num_blocks, caching=settings.enable_prefix_caching)
        self.host = HostTier(host_blocks if settings.enable_prefix_caching else 0)
        self.waiting: deque[LiveRequest] = deque()
        self.running: list[LiveRequest] = []
        self._block_size = settings.block_size
        self._max_model_len = max_model_len
        self._budget = settings.max_num_batched_tokens
        self._max_running = settings.max_num_active_seqs
        self._chunked = settings.enable_chunked_prefill
        self._reserve_full = settings.reserve_full_isl
        self._long_prefill = settings.long_prefill_token_threshold
        self._watermark_blocks = int(settings.watermark * num_blocks)
        # True while the front of the queue was found not to fit and nothing was freed since.
        self._front_blocked = False
        # True where every running request has exactly its last token to compute.
        self._all_decoding = False

    # --- from outside ------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Queue a request."""
        if not self.waiting:
            self._front_blocked = False
        self.waiting.append(request)

    def remove(self, request: LiveRequest) -> None:
        """Drop a waiting or running request."""
        if request in self.running:
            self._release(request)
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._front_blocked = False

    # --- one step ----------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Choose the next step's work and give it its blocks; empty if there is none."""
        batch = Batch()
        long_prefill = self._long_prefill if len(self.running) + len(self.waiting) > 1 else 0
        budget = self._continue_running(batch, long_prefill)
        if not batch.preempted:
            self._admit(batch, budget, long_prefill)
        return batch

    def complete(self, batch: Batch) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """The step is done: who got a token, and who of them ends with it."""
        emitted = [r for r in batch.requests if r.computed == r.tokens]
        self._all_decoding = len(emitted) == len(self.running)
        finished = []
        for request in emitted:
            request.tokens += 1
            if request.tokens >= request.last:
                finished.append(request)
        if finished:
            self._finish(finished)
        return emitted, finished

    def _continue_running(self, batch: Batch, long_prefill: int) -> int:
        """Schedule the running requests; the budget that is left."""
        budget, running, block_size = self._budget, self.running, self._block_size
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            tokens = request.tokens - request.computed
            if tokens > 1:
                if 0 < long_prefill < tokens:
                    tokens = long_prefill
                if tokens > budget:
                    tokens = budget
            if request.computed + tokens > request.capacity and not self._make_room(
                request, tokens, batch
            ):
                break
            batch.include(request, tokens)
            if request.computed // block_size > request.remembered:
                self._remember(request)
            budget -= tokens
            index += 1
        return budget

    def _make_room(self, request: LiveRequest, tokens: int, batch: Batch) -> bool:
        """Give a running request its blocks, at the cost of those admitted last."""
        needed = self._blocks_for(request.computed + tokens) - len(request.blocks)
        while needed > self.pool.free:
            victim = self.running.pop()
            self._release(victim)
            victim.preemptions += 1
            self.waiting.appendleft(victim)
            self._front_blocked = False
            batch.preempted.append(victim)
            if victim is request:
                return False
        self._extend(request, needed)
        return True

    def _admit(self, batch: Batch, budget: int, long_prefill: int) -> None:
        if self._front_blocked and self._reserve_full:
            return  # it needs its whole sequence now as before, and nothing was freed
        self._front_blocked = False
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            request = self.waiting[0]
            hits = self._prefix_hits(request)
            host_hits = self._host_hits(request, len(hits))
            computed = (len(hits) + host_hits) * self._block_size
            tokens = request.tokens - computed
            if 0 < long_prefill < tokens:
                tokens = long_prefill
            too_long = tokens > budget and not self._chunked
            tokens = min(tokens, budget)
            if too_long:
                return
            if not self._fits(request, hits, computed + tokens):
                self._front_blocked = True
                return
            self.waiting.popleft()
            self.running.append(request)
            self._count_lookup(request, len(hits), host_hits, batch)
            self.pool.touch(hits)
            request.blocks = hits
            request.capacity = len(hits) * self._block_size
            request.remembered = len(hits)
            request.computed = computed
            self._extend(request, self._blocks_for(computed + tokens) - len(hits))
            batch.admitted.append(request)
            batch.include(request, tokens)
            self._remember(request)
            budget -= tokens

    def _fits(self, request: LiveRequest, hits: Sequence[int], first_chunk_end: int) -> bool:
        """Whether admission finds its blocks; hits that nobody uses leave the free queue too."""
        end = min(request.tokens, self._max_model_len) if self._reserve_full else first_chunk_end
        needed = self._blocks_for(end) - len(hits) + self.pool.idle(hits)
        if self.running:
            needed += self._watermark_blocks
        return needed <= self.pool.free

    # --- several steps -----------------------------------------------------------------

    def decode_horizon(self, most: int) -> int:
        """How many steps, up to `most`, will only give each running request one more token.

        In the last of them requests may end. 0 where the next step needs `schedule`.
        """
        running = self.running
        if not running or len(running) > self._budget:
            return 0
        if self.waiting and not self._front_blocked and len(running) < self._max_running:
            return 0
        if not self._all_decoding:
            return 0
        steps = min(most, min([r.last - r.tokens for r in running]))
        free = self.pool.free
        # Each takes a block at most every block_size steps, and one more for the first.
        if len(running) * (steps // self._block_size + 1) > free:
            growth = self._growth(steps)
            if len(growth) > free:
                steps = growth[free][0]
        return steps

    def decode(self, steps: int) -> list[LiveRequest]:
        """Do `steps` (at most `decode_horizon`) of them; who ends with the last."""
        for _, index in self._growth(steps):
            self._extend(self.running[index], 1)
        block_size = self._block_size
        finished = []
        for request in self.running:
            request.computed += steps
            request.tokens += steps
            if request.computed // block_size > request.remembered:
                self._remember(request)
            if request.tokens >= request.last:
                finished.append(request)
        if finished:
            self._finish(finished)
        return finished

    def _growth(self, steps: int) -> list[tuple[int, int]]:
        """(step, index of the running request) of each block taken, in the order of taking."""
        growth = []
        for index, request in enumerate(self.running):
            step = request.capacity - request.computed
            while step < steps:
                growth.append((step, index))
                step += self._block_size
        growth.sort()
        return growth

    # --- blocks ------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _extend(self, request: LiveRequest, blocks: int) -> None:
        request.blocks += self.pool.take(blocks)
        request.capacity += blocks * self._block_size

    def _prefix_hits(self, request: LiveRequest) -> list[int]:
        """Cached blocks of its first tokens; the last token is always computed."""
        if not self.pool.caching:
            return []
        return self.pool.find(request.hashes(0, (request.tokens - 1) // self._block_size))

    def _host_hits(self, request: LiveRequest, local: int) -> int:
        """Blocks after the first `local` that the host tier has."""
        if not len(self.host):
            return 0
        return self.host.run_length(request.hashes(local, (request.tokens - 1) // self._block_size))

    def _count_lookup(self, request: LiveRequest, hits: int, host_hits: int, batch: Batch) -> None:
        batch.link_blocks += host_hits
        if request.preemptions or not self.pool.caching:
            return  # vLLM's counters leave out what preempted requests look up
        size = self._block_size
        batch.queries_tokens += request.tokens
        batch.hits_tokens += hits * size
        if self.host.capacity:
            batch.host_queries_tokens += request.tokens - hits * size
            batch.host_hits_tokens += host_hits * size

    def _remember(self, request: LiveRequest) -> None:
        """Put its blocks that are full into the prefix cache, and copies on the host."""
        if not self.pool.caching:
            return
        full = min(request.computed, request.tokens) // self._block_size
        first = request.remembered
        if full <= first:
            return
        request.remembered = full
        hashes = request.hashes(first, full)
        for block, block_hash in zip(request.blocks[first:full], hashes, strict=True):
            self.pool.remember(block, block_hash)
        if self.host.capacity:
            # The copies go the other way over the link, beside the computation.
            for block_hash in hashes:
                self.host.store(block_hash)

    def _release(self, request: LiveRequest) -> None:
        self.pool.release(request.drop_blocks())

    def _finish(self, finished: Sequence[LiveRequest]) -> None:
        for request in finished:
            self._release(request)
        gone = set(map(id, finished))
        self.running = [r for r in self.running if id(r) not in gone]
        self._front_blocked = False
