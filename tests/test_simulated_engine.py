"""The engine on its virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from simulated_builders import engine, plan, settings

from tuner.engine.simulated.engine import FinishReason, SimulatedEngine, StepResult
from tuner.types import FailureCause, Stage


def drain(made: SimulatedEngine, max_steps: int = 1) -> list[StepResult]:
    results = []
    while made.busy:
        results.append(made.step(max_steps=max_steps))
        assert results[-1].ends_s
    return results


def arrivals_of(results: list[StepResult]) -> dict[str, list[float]]:
    """When each request's tokens came."""
    times: dict[str, list[float]] = {}
    for result in results:
        for request_id in result.emitted:
            times.setdefault(request_id, []).extend(result.ends_s)
    return times


# --- requests --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        (
            10,
            513,
            "max_tokens=513 cannot be greater than max_model_len=512. Please request fewer "
            "output tokens.",
        ),
        (
            600,
            10,
            "This model's maximum context length is 512 tokens. However, your prompt contains 600 "
            "input tokens, which exceeds this limit even without any output tokens.",
        ),
        (513, 10, "your prompt contains at least 513 input tokens"),
        (512, 10, "The decoder prompt (length 512) plus the number of requested output tokens"),
        (0, 10, "The decoder prompt cannot be empty"),
    ],
)
def test_engine_refuses_as_vllm_does(prompt, max_tokens, words):
    made = engine()
    refusal = made.add("a", prompt, max_tokens)
    assert refusal is not None
    assert words in refusal.message
    assert not made.busy


def test_engine_cuts_an_answer_off_where_the_context_ends():
    made = engine()
    assert made.add("a", 500, 100) is None
    assert len(arrivals_of(drain(made))["a"]) == 12


def test_engine_answers_as_long_as_the_context_allows_if_nobody_says():
    made = engine()
    assert made.add("a", 500, None) is None
    assert len(arrivals_of(drain(made))["a"]) == 12


def test_engine_idle_does_nothing_until_its_clock_is_set():
    made = engine()
    assert made.step() == StepResult(0.0, (), ())
    made.advance_to(5.0)
    made.advance_to(3.0)
    assert made.now_s == 5.0
    made.add("a", 10, 1)
    result = made.step()
    assert result.begin_s == 5.0
    assert result.finished == [("a", FinishReason.LENGTH)]


def test_engine_abort_frees_what_the_request_held():
    made = engine()
    made.add("a", 100, 50)
    made.add("b", 100, 50)
    made.step()
    assert made.counters.kv_usage == pytest.approx(8 / 64)
    assert made.abort("a")
    assert not made.abort("a")
    assert made.counters.kv_usage == pytest.approx(4 / 64)
    assert made.counters.finished == {FinishReason.ABORT: 1}
    assert set(arrivals_of(drain(made))) == {"b"}


def test_engine_reset_prefix_cache_waits_for_requests():
    made = engine()
    prompt = list(range(128))
    made.add("a", prompt, 2)
    made.step()
    assert not made.reset_prefix_cache()
    drain(made)
    assert made.reset_prefix_cache()
    made.add("b", prompt, 2)
    drain(made)
    assert made.counters.prefix_hits_tokens == 0


# --- counters --------------------------------------------------------------------------


def test_engine_counts_prompt_and_generation_tokens_once():
    made = engine(blocks=20, max_model_len=512)
    for number in range(6):
        made.add(str(number), 64, 100)
    drain(made)
    counters = made.counters
    assert counters.preemptions > 0
    assert counters.prompt_tokens == 6 * 64
    assert counters.generation_tokens == 600
    assert counters.iteration_tokens == 6 * 64 + 600  # recomputed ones do not count
    assert counters.prefix_queries_tokens == 6 * 64
    assert counters.finished == {FinishReason.LENGTH: 6}
    assert (counters.running, counters.waiting, counters.kv_usage) == (0, 0, 0.0)


def test_engine_gauges_show_the_last_step():
    made = engine(max_num_seqs=2)
    for number in range(3):
        made.add(str(number), 64, 10)
    assert made.counters.waiting == 3
    made.step()
    assert (made.counters.running, made.counters.waiting) == (2, 1)
    assert made.counters.kv_usage == pytest.approx(4 / 64)
    assert made.counters.iterations == 1


def test_engine_tells_who_was_admitted_and_preempted():
    made = engine(blocks=4, max_model_len=128)
    made.add("a", 32, 40)
    made.add("b", 64, 20)
    assert made.step().admitted == ["a", "b"]
    assert made.step().preempted == ["b"]


# --- time ------------------------------------------------------------------------------


def test_engine_stops_after_the_step_that_passes_the_limit():
    made = engine()
    made.add("a", 10, 200)
    made.step()
    begin_s = made.now_s
    step_s = made.step().ends_s[0] - begin_s
    result = made.step(max_steps=100, until_s=made.now_s + 3.5 * step_s)
    assert len(result.ends_s) == 4


def test_engine_noise_is_of_its_seed():
    def ends(**seed):
        made = engine(**seed)
        made.add("a", 10, 50)
        return arrivals_of(drain(made))["a"]

    assert ends(seed=1, noise=True) == ends(seed=1, noise=True)
    assert ends(seed=1, noise=True) != ends(seed=2, noise=True)
    quiet = ends(seed=1)
    assert quiet == ends(seed=2)
    assert ends(seed=1, noise=True)[-1] == pytest.approx(quiet[-1], rel=0.25)


LOADS = st.lists(
    st.tuples(st.integers(1, 150), st.integers(1, 60), st.integers(0, 20)), min_size=1, max_size=10
)


@given(LOADS, st.integers(8, 24), st.booleans(), st.integers(2, 400))
@hypothesis_settings(deadline=None, max_examples=60)
def test_several_steps_at_once_are_as_many_single_ones(load, blocks, caching, many):
    def run(max_steps):
        made = engine(
            blocks,
            seed=3,
            noise=True,
            max_model_len=7 * 32,
            enable_prefix_caching=caching,
            max_num_batched_tokens=128,
        )
        for number, (prompt, output, _) in enumerate(load):
            made.add(str(number), prompt, output)
        results = drain(made, max_steps)
        return arrivals_of(results), made.counters, made.now_s

    assert run(many) == run(1)


@given(LOADS, st.integers(0, 5))
@hypothesis_settings(deadline=None, max_examples=40)
def test_engine_is_never_slower_with_more_bandwidth(load, seed):
    def end_s(bandwidth):
        made = settings(
            block_size=32, max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes="64M"
        )
        device = replace(made.device, bandwidth_gb_per_s=bandwidth)
        made = replace(made, device=device)
        simulated = SimulatedEngine(made, plan(made), seed=seed)
        for number, (prompt, output, _) in enumerate(load):
            simulated.add(str(number), prompt, output)
        drain(simulated, 1000)
        return simulated.now_s

    assert end_s(20.0) <= end_s(10.0)


# --- out of memory under load ----------------------------------------------------------


def tight_engine(**args) -> SimulatedEngine:
    made = settings(
        "a10-24g",
        "llama-3.1-8b",
        max_model_len=4096,
        enforce_eager=True,
        max_num_batched_tokens=8192,
        **args,
    )
    return SimulatedEngine(made, plan(made), seed=0, noise=False)


def test_engine_dies_of_a_batch_larger_than_what_is_left():
    made = tight_engine(kv_cache_memory_bytes=6_700_000_000)  # the profile run does not limit it
    made.add("small", 100, 20)
    assert made.step().died is None
    made.add("large", 4000, 20)
    made.add("larger", 4000, 20)
    result = made.step()
    assert result.died is made.dead
    assert (result.emitted, result.ends_s) == ((), ())
    assert made.dead is not None
    assert (made.dead.cause, made.dead.stage) == (FailureCause.OOM_RUNTIME, Stage.LOAD)
    assert made.dead.exit_code == 0  # vLLM's own, when its engine dies
    assert made.dead.numbers["free_gib"] < made.dead.numbers["tried_to_allocate_gib"]
    assert made.step() == StepResult(made.now_s, (), ())


def test_engine_within_its_budget_does_not_die():
    made = tight_engine()
    for number in range(4):
        made.add(str(number), 4000, 20)
    drain(made, 100)
    assert made.dead is None
