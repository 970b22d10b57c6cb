"""The scheduler's rules, one by one, and the laws that any load keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from simulated_builders import plan, settings

from tuner.engine.simulated.requests import LiveRequest
from tuner.engine.simulated.scheduler import Batch, Scheduler

SIZE = 32


@dataclass
class Bench:
    """A scheduler with `blocks` usable blocks of 32 tokens, and what happens in it."""

    blocks: int = 64
    args: dict = field(default_factory=dict)
    host_blocks: int = 0

    def __post_init__(self):
        given_args = {
            "block_size": SIZE,
            "max_model_len": SIZE * self.blocks,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 2**24,
            "num_gpu_blocks_override": self.blocks + 1,
        }
        self.settings = settings(**(given_args | self.args))
        self.length = plan(self.settings).max_model_len
        self.scheduler = Scheduler(
            self.settings,
            num_blocks=self.blocks + 1,
            max_model_len=self.length,
            host_blocks=self.host_blocks,
        )
        self.count = 0

    def add(self, prompt, output=1000, name=None) -> LiveRequest:
        length = prompt if isinstance(prompt, int) else len(prompt)
        request = LiveRequest(
            name or str(self.count),
            prompt,
            last=min(length + output, self.length),
            block_size=SIZE,
            number=self.count,
        )
        self.count += 1
        self.scheduler.add(request)
        return request

    def step(self) -> tuple[Batch, list[str], list[str]]:
        before = {id(r): r.computed for r in self.scheduler.running}
        batch = self.scheduler.schedule()
        self.tokens = {
            r.request_id: r.computed - before.get(id(r), 0)
            for r in batch.requests
            if r not in batch.admitted
        }
        emitted, finished = self.scheduler.complete(batch)
        return batch, [r.request_id for r in emitted], [r.request_id for r in finished]

    def running(self):
        return [r.request_id for r in self.scheduler.running]


# --- the budget ------------------------------------------------------------------------


def test_prompts_share_the_token_budget_in_order():
    bench = Bench(args={"max_num_batched_tokens": 100})
    first, second, third = bench.add(70), bench.add(70), bench.add(10)
    batch, emitted, _ = bench.step()
    assert batch.tokens == 100
    assert (first.computed, second.computed, third.computed) == (70, 30, 0)
    assert emitted == ["0"]
    batch, emitted, _ = bench.step()
    # The running ones first: a token of the first, the rest of the second, then the third.
    assert bench.tokens == {"0": 1, "1": 40}
    assert batch.admitted == [third]
    assert emitted == ["0", "1", "2"]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    bench = Bench(args={"max_num_batched_tokens": 64})
    bench.add(150)
    assert [bench.step()[1] for _ in range(3)] == [[], [], ["0"]]


def test_without_chunked_prefill_a_prompt_waits_for_a_budget_that_holds_it():
    bench = Bench(
        blocks=2,
        args={
            "max_num_batched_tokens": 64,
            "max_model_len": 64,
            "enable_chunked_prefill": False,
        },
    )
    bench.add(30)
    bench.add(40)
    batch, _, _ = bench.step()
    assert [r.request_id for r in batch.admitted] == ["0"]
    assert batch.tokens == 30


def test_long_prefill_threshold_cuts_only_where_others_wait():
    bench = Bench(args={"long_prefill_token_threshold": 50})
    alone = bench.add(200)
    bench.step()
    assert alone.computed == 200
    bench.add(200)
    bench.step()
    assert bench.scheduler.running[1].computed == 50


def test_as_many_run_as_allowed():
    bench = Bench(args={"max_num_seqs": 8, "max_num_active_seqs": 3})
    for _ in range(5):
        bench.add(10)
    bench.step()
    assert bench.running() == ["0", "1", "2"]
    assert len(bench.scheduler.waiting) == 2


def test_a_request_ends_with_its_last_token_and_gives_its_place_at_once():
    bench = Bench(args={"max_num_seqs": 1})
    bench.add(10, output=2)
    bench.add(10, output=1)
    assert bench.step()[2] == []
    assert bench.step()[2] == ["0"]
    assert bench.step()[2] == ["1"]
    assert bench.scheduler.pool.free == 64


def test_a_request_ends_where_the_context_does():
    bench = Bench(blocks=2)
    bench.add(60, output=1000)
    finished = [bench.step()[2] for _ in range(4)]
    assert finished == [[], [], [], ["0"]]


# --- admission and preemption ----------------------------------------------------------


def test_admission_wants_room_for_the_whole_prompt():
    bench = Bench(blocks=10, args={"max_num_batched_tokens": 64})
    bench.add(5 * SIZE)
    bench.add(6 * SIZE)
    for _ in range(5):
        bench.step()
    assert bench.running() == ["0"]


def test_admission_without_reserve_looks_at_the_first_chunk_only():
    bench = Bench(
        blocks=10, args={"max_num_batched_tokens": 64, "no_scheduler_reserve_full_isl": True}
    )
    bench.add(5 * SIZE)
    bench.add(6 * SIZE)
    for _ in range(4):
        bench.step()
    assert bench.running() == ["0", "1"]


def test_nobody_overtakes_the_front_of_the_queue():
    bench = Bench(blocks=10)
    for prompt in (6 * SIZE, 6 * SIZE, 10):
        bench.add(prompt)
    bench.step()
    assert bench.running() == ["0"]


def test_watermark_keeps_blocks_free_unless_nothing_runs():
    bench = Bench(blocks=10, args={"watermark": 0.2})
    bench.add(9 * SIZE - 1)
    bench.step()
    assert bench.running() == ["0"]
    bench = Bench(blocks=10, args={"watermark": 0.2})
    bench.add(5 * SIZE - 1)
    bench.add(4 * SIZE - 1)
    bench.step()
    assert bench.running() == ["0"]  # 5 blocks are free, 4 + 2 wanted


def test_the_last_admitted_is_preempted_and_waits_at_the_front():
    bench = Bench(blocks=4)
    first, second = bench.add(SIZE), bench.add(2 * SIZE)
    bench.step()
    bench.add(5)
    # The first needs a second block at once, of which one is left; the second one then none.
    batch, emitted, _ = bench.step()
    assert [r.request_id for r in batch.preempted] == ["1"]
    assert emitted == ["0"]
    assert second.preemptions == 1
    assert [r.request_id for r in bench.scheduler.waiting] == ["1", "2"]
    assert second.blocks == []
    assert first.blocks


def test_a_preempted_request_finds_in_the_cache_what_nobody_took():
    bench = Bench(blocks=4)
    bench.add(SIZE, output=20)
    bench.add(2 * SIZE)
    bench.step()
    bench.step()
    # It needs three blocks; two are in use until the other one ends, two hold its own tokens.
    while bench.running() == ["0"]:
        batch, _, _ = bench.step()
        assert batch.admitted == []
    batch, _, _ = bench.step()
    assert [r.request_id for r in batch.admitted] == ["1"]
    assert batch.prefill_tokens + batch.decodes == 1  # 64 of 65 tokens were cached
    assert batch.queries_tokens == 0  # vLLM does not count what preempted requests look up


def test_a_step_that_preempts_admits_nobody():
    bench = Bench(blocks=6)
    for _ in range(3):
        bench.add(2 * SIZE)
    bench.step()
    batch, _, _ = bench.step()
    assert [r.request_id for r in batch.preempted] == ["2"]
    assert batch.admitted == []


# --- prefix cache and host tier --------------------------------------------------------


def test_the_same_prompt_is_computed_once_but_for_its_last_token():
    bench = Bench()
    prompt = list(range(4 * SIZE))
    bench.add(prompt, output=1)
    bench.step()
    again = bench.add(prompt, output=1)
    batch, _, _ = bench.step()
    assert batch.tokens == SIZE  # the last block is computed anew: its last token is needed
    assert (batch.queries_tokens, batch.hits_tokens) == (4 * SIZE, 3 * SIZE)
    assert again.preemptions == 0


def test_a_shared_prefix_shares_its_blocks():
    bench = Bench()
    prefix = list(range(3 * SIZE))
    one = bench.add([*prefix, 1, 2, 3])
    bench.step()
    other = bench.add([*prefix, 7, 8, 9])
    bench.step()
    assert other.blocks[:3] == one.blocks[:3]
    assert bench.scheduler.pool.free == 64 - 5


def test_prompts_given_by_their_length_share_nothing():
    bench = Bench()
    bench.add(100, output=1)
    bench.step()
    bench.add(100, output=1)
    batch, _, _ = bench.step()
    assert (batch.queries_tokens, batch.hits_tokens) == (100, 0)


def test_without_prefix_caching_nothing_is_looked_up():
    bench = Bench(args={"enable_prefix_caching": False})
    prompt = list(range(4 * SIZE))
    for _ in range(2):
        bench.add(prompt, output=1)
        batch, _, _ = bench.step()
        assert (batch.tokens, batch.queries_tokens) == (4 * SIZE, 0)


def test_the_host_tier_gives_back_what_the_device_had_to_forget():
    bench = Bench(blocks=4, host_blocks=100)
    prompt = list(range(3 * SIZE + 1))
    bench.add(prompt, output=1)
    bench.step()
    bench.add(4 * SIZE - 1, output=1)  # takes all four blocks
    bench.step()
    bench.add(prompt, output=1)
    batch, _, _ = bench.step()
    assert batch.tokens == 1
    assert batch.link_blocks == 3
    assert (batch.hits_tokens, batch.host_hits_tokens) == (0, 3 * SIZE)


# --- laws ------------------------------------------------------------------------------

LOADS = st.lists(
    st.tuples(st.integers(1, 150), st.integers(1, 60), st.integers(0, 30)), min_size=1, max_size=12
)
FLAGS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(16, 300),
        "enable_prefix_caching": st.booleans(),
        "scheduler_reserve_full_isl": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.1]),
        "long_prefill_token_threshold": st.sampled_from([0, 40]),
    }
)


@given(LOADS, FLAGS, st.integers(7, 20))
@hypothesis_settings(deadline=None)
def test_any_load_keeps_the_rules_and_ends(load, flag_values, blocks):
    bench = Bench(blocks=blocks, args=flag_values | {"max_model_len": 7 * SIZE})
    scheduler, pool = bench.scheduler, bench.scheduler.pool
    requests = {}
    arrivals = sorted(load, key=lambda item: item[2])
    ended = []
    for number in range(6000):
        while arrivals and arrivals[0][2] <= number:
            prompt, output, _ = arrivals.pop(0)
            made = bench.add(prompt, output)
            requests[made.request_id] = (made, prompt, output)
        free = pool.free
        wanted = sum(-(-r.tokens // SIZE) - len(r.blocks) for r in scheduler.running)
        batch = scheduler.schedule()
        assert batch.tokens <= flag_values["max_num_batched_tokens"]
        assert len(scheduler.running) <= flag_values["max_num_seqs"]
        if batch.preempted:
            assert not batch.admitted
            assert wanted > free
        held = [block for r in scheduler.running for block in r.blocks]
        assert len(set(held)) == blocks - pool.free
        for r in scheduler.running:
            assert r.computed <= r.tokens <= r.last
            assert len(r.blocks) * SIZE == r.capacity >= r.computed
        _, finished = scheduler.complete(batch)
        ended += [r.request_id for r in finished]
        if not arrivals and not scheduler.running and not scheduler.waiting:
            break
    assert sorted(ended) == sorted(requests)
    assert pool.free == blocks
    for made, prompt, output in requests.values():
        assert made.tokens == min(prompt + output, 7 * SIZE)


@given(LOADS, FLAGS, st.integers(7, 20))
@hypothesis_settings(deadline=None)
def test_first_come_first_served(load, flag_values, blocks):
    bench = Bench(blocks=blocks, args=flag_values | {"max_model_len": 7 * SIZE})
    for prompt, output, _ in load:
        bench.add(prompt, output)
    first_admissions = []
    while bench.scheduler.running or bench.scheduler.waiting:
        batch, _, _ = bench.step()
        first_admissions += [int(r.request_id) for r in batch.admitted if not r.preemptions]
        if len(batch.preempted) > 1:
            order = [int(r.request_id) for r in batch.preempted]
            assert order == sorted(order, reverse=True)
    # Of those never preempted, none came before an earlier one.
    assert first_admissions == sorted(first_admissions)


@given(LOADS, st.integers(20, 40))
@hypothesis_settings(deadline=None)
def test_nobody_is_preempted_where_all_fit(load, seqs):
    bench = Bench(blocks=12 * 7, args={"max_num_seqs": seqs, "max_model_len": 7 * SIZE})
    for prompt, output, _ in load:
        bench.add(prompt, output)
    while bench.scheduler.running or bench.scheduler.waiting:
        batch, _, _ = bench.step()
        assert batch.preempted == []
