"""Proposals: new, allowed, learned from; and what the samplers are told."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
from builders import KNOBS, study_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import InputError, NoResult
from tuner.search import Search
from tuner.search.distributions import decode, distribution, encode
from tuner.search.samplers import resolve
from tuner.space import Space
from tuner.types import (
    Choice,
    Constraint,
    FloatRange,
    IntRange,
    SamplerKind,
    SearchSpec,
    Verdict,
)

GOOD = {"valid": -1.0, "memory": -0.5, "served": -1.0}
BAD = {"valid": -1.0, "memory": 0.4, "served": 1.0}
SMALL = (IntRange("max-num-seqs", 1, 3), Choice("kv-cache-dtype", ("auto", "fp8")))


def make_search(knobs=KNOBS, sampler=SamplerKind.TPE, seed=0, seen=0, constraints=()):
    spec = study_spec(search_space=knobs, constraints=constraints)
    return Search(Space(spec), SearchSpec(sampler, seed), seen=seen, budget_trials=30)


def run(search, trials, value):
    """The candidates of a search whose trials score `value(params)` or fail where it is None."""
    candidates = []
    for _ in range(trials):
        candidate = search.propose()
        if candidate is None:
            break
        worth = value(candidate.params)
        verdict = Verdict(0.0, BAD) if worth is None else Verdict(worth, GOOD)
        search.tell(candidate.params, candidate.config, verdict)
        candidates.append(candidate)
    return candidates


@pytest.mark.parametrize("sampler", [SamplerKind.TPE, SamplerKind.RANDOM, SamplerKind.QMC])
def test_propose_never_repeats_a_configuration(sampler):
    candidates = run(make_search(sampler=sampler), 25, lambda p: float(p["max-num-seqs"]))
    assert len(candidates) == 25
    assert len({c.config.digest for c in candidates}) == 25


@pytest.mark.parametrize("sampler", [SamplerKind.TPE, SamplerKind.RANDOM, SamplerKind.QMC])
def test_propose_visits_every_point_of_a_small_space_and_ends(sampler):
    search = make_search(SMALL, sampler)
    candidates = run(search, 100, lambda p: 1.0)
    seen = Counter((c.params["max-num-seqs"], c.params["kv-cache-dtype"]) for c in candidates)
    assert seen == Counter({(n, d): 1 for n in (1, 2, 3) for d in ("auto", "fp8")})
    assert search.propose() is None


def test_propose_keeps_to_the_constraints():
    knobs = (IntRange("max-num-seqs", 1, 512), IntRange("max-num-batched-tokens", 1, 512))
    constraint = Constraint("max-num-seqs <= max-num-batched-tokens", 1)
    for candidate in run(make_search(knobs, constraints=(constraint,)), 30, lambda p: 1.0):
        assert candidate.params["max-num-seqs"] <= candidate.params["max-num-batched-tokens"]


@pytest.mark.parametrize("knobs", [SMALL, (FloatRange("gpu-memory-utilization", 0.1, 0.9),)])
def test_propose_says_when_the_constraints_leave_nothing(knobs):
    impossible = Constraint(f"{knobs[0].name} > 1000", 7)
    search = make_search(knobs, constraints=(impossible,))
    search.tell({}, Space(study_spec(search_space=knobs)).reference()[1], Verdict(1.0, GOOD))
    with pytest.raises(NoResult, match="constraints"):
        search.propose()


def test_propose_does_not_come_back_to_what_was_refused():
    search = make_search(SMALL)
    refused = [search.propose() for _ in range(1)]
    search.refuse(refused[0])
    rest = run(search, 100, lambda p: 1.0)
    assert refused[0].config.digest not in {c.config.digest for c in rest}
    assert len(rest) == 5


def test_tell_knows_the_reference_though_it_sets_no_parameter():
    search = make_search(SMALL)
    spec = study_spec(search_space=SMALL, reference={"max-num-seqs": 2, "kv-cache-dtype": "fp8"})
    params, config = Space(spec).reference()
    search.tell(params, config, Verdict(5.0, GOOD))
    rest = run(search, 100, lambda p: 1.0)
    assert len(rest) == 5
    search_without = make_search(SMALL)
    search_without.tell({}, Space(study_spec(search_space=SMALL)).reference()[1], Verdict(1, GOOD))
    assert len(run(search_without, 100, lambda p: 1.0)) == 6


def test_search_finds_the_good_half_and_leaves_the_infeasible_one():
    knobs = (IntRange("max-num-seqs", 1, 1000), FloatRange("gpu-memory-utilization", 0.0, 1.0))

    def value(params):
        if params["max-num-seqs"] > 600:
            return None
        return 1000.0 - abs(params["max-num-seqs"] - 300)

    candidates = run(make_search(knobs), 60, value)
    late = candidates[30:]
    assert sum(c.params["max-num-seqs"] > 600 for c in late) <= 5
    assert max(value(c.params) or 0 for c in candidates) > 980


def test_search_is_repeatable_by_seed_and_goes_on_differently_when_resumed():
    def first(search):
        return search.propose().params

    assert first(make_search(seed=1)) == first(make_search(seed=1))
    assert first(make_search(seed=1)) != first(make_search(seed=2))
    assert first(make_search(seed=1, seen=0)) != first(make_search(seed=1, seen=3))


def test_distribution_values_survive_encoding():
    knob = Choice("compilation-config", (None, {"level": 3}, [1, 2], "auto", True, 1, 1.5))
    for value in knob.choices:
        stored = {
            knob.name: distribution(knob).to_external_repr(
                distribution(knob).to_internal_repr(encode({knob.name: value})[knob.name])
            )
        }
        decoded = decode((knob,), stored)[knob.name]
        if not isinstance(value, bool) and value != 1:  # Optuna holds true and 1 as one choice
            assert decoded == value


@given(
    low=st.integers(1, 10_000),
    width=st.integers(1, 10_000),
    step=st.integers(1, 100),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_distribution_of_integers_stays_on_the_grid(low, width, step, seed):
    knob = IntRange("max-num-seqs", low, low + width, step=step)
    candidate = make_search((knob,), SamplerKind.RANDOM, seed=seed).propose()
    value = candidate.params["max-num-seqs"]
    assert type(value) is int
    assert low <= value <= low + width
    assert (value - low) % step == 0


def test_distribution_of_a_float_grid_reads_well():
    search = make_search((FloatRange("gpu-memory-utilization", 0.7, 0.95, step=0.01),))
    for candidate in run(search, 26, lambda p: 1.0):
        value = candidate.params["gpu-memory-utilization"]
        assert value == round(value, 2)
    assert search.propose() is None


def test_resolve_takes_tpe_where_a_parameter_is_a_choice():
    assert resolve(SamplerKind.AUTO, KNOBS, 30) is SamplerKind.TPE


def test_resolve_takes_gp_for_numbers_where_torch_is(monkeypatch):
    numbers = (IntRange("max-num-seqs", 1, 9), FloatRange("gpu-memory-utilization", 0.1, 0.9))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert resolve(SamplerKind.AUTO, numbers, 30) is SamplerKind.GP
    assert resolve(SamplerKind.AUTO, numbers, 500) is SamplerKind.TPE
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert resolve(SamplerKind.AUTO, numbers, 30) is SamplerKind.TPE


def test_gp_without_torch_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="torch"):
        make_search(sampler=SamplerKind.GP)
