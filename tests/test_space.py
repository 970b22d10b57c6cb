"""The search space: points, constraints, and the configuration that a point stands for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner import knobs
from tuner.space import Space
from tuner.types import (
    BudgetSpec,
    Choice,
    Constraint,
    FloatRange,
    IntRange,
    JsonValue,
    Knob,
    ObjectiveSpec,
    SearchSpec,
    ServerSpec,
    StudySpec,
    WorkloadKind,
    WorkloadSpec,
)

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""


def space(
    *searched: Knob,
    constraints: Sequence[str] = (),
    reference: dict[str, JsonValue] | None = None,
    args: dict[str, JsonValue] | None = None,
    env: dict[str, str] | None = None,
) -> Space:
    """A space over `searched`; nothing else of the study matters here."""
    workload = WorkloadSpec(WorkloadKind.SYNTHETIC, None, None, None, 1, 1, None, 1.0, 0, 60.0, 0)
    return Space(
        StudySpec(
            name="s",
            server=ServerSpec(("vllm", "serve"), "m", args or {}, env or {}, 60.0),
            search_space=searched,
            constraints=tuple(Constraint(text, line) for line, text in enumerate(constraints, 1)),
            reference=reference or {},
            workload=workload,
            objective=ObjectiveSpec(),
            budget=BudgetSpec(1, None),
            search=SearchSpec(),
            path=Path("s.yaml"),
            text="",
        )
    )


SEQS = IntRange("max-num-seqs", 4, 128, log=True)
UTIL = FloatRange("gpu-memory-utilization", 0.70, 0.95, 0.01)
DTYPE = Choice("kv-cache-dtype", (None, "auto", "fp8"))
KV = Choice("env.VLLM_CPU_KVCACHE_SPACE", (1, 2, True, 0.5, "x", None))


def test_decode_merges_fixed_and_searched_values() -> None:
    both = space(SEQS, KV, args={"block-size": 32}, env={"A": "b"})
    config = both.decode({"max-num-seqs": 8, "env.VLLM_CPU_KVCACHE_SPACE": 2})
    assert config.args == {"block-size": 32, "max-num-seqs": 8}
    assert config.env == {"A": "b", "VLLM_CPU_KVCACHE_SPACE": "2"}


def test_decode_leaves_out_what_is_at_vllms_default() -> None:
    config = space(SEQS, DTYPE, KV).decode(
        {"kv-cache-dtype": None, "env.VLLM_CPU_KVCACHE_SPACE": None}
    )
    assert config.args == {}
    assert config.env == {}


def test_decode_writes_environment_values_as_text() -> None:
    written = [
        space(KV).decode({KV.name: value}).env.get("VLLM_CPU_KVCACHE_SPACE") for value in KV.choices
    ]
    assert written == ["1", "2", "1", "0.5", "x", None]


def test_decode_keeps_json_values() -> None:
    knob = Choice("speculative-config", ({"method": "ngram"}, [1, 2]))
    config = space(knob).decode({"speculative-config": {"method": "ngram"}})
    assert config.args == {"speculative-config": {"method": "ngram"}}


def test_decode_puts_floats_on_their_grid() -> None:
    config = space(UTIL).decode({"gpu-memory-utilization": 0.7 + 8 * 0.01})
    assert 0.7 + 8 * 0.01 != 0.78
    assert config.args == {"gpu-memory-utilization": 0.78}


def test_decode_does_not_depend_on_the_order_of_parameters() -> None:
    both = space(SEQS, UTIL)
    one = both.decode({"max-num-seqs": 8, "gpu-memory-utilization": 0.8})
    other = both.decode({"gpu-memory-utilization": 0.8, "max-num-seqs": 8.0})
    assert one == other
    assert one.digest == other.digest


def test_decode_refuses_an_unknown_name() -> None:
    with pytest.raises(KeyError, match="block-size"):
        space(SEQS).decode({"block-size": 32})


def test_reference_is_vllms_default_where_none_is_stated() -> None:
    params, config = space(SEQS, args={"block-size": 32}).reference()
    assert params == {}
    assert config.args == {"block-size": 32}


def test_reference_may_go_beyond_the_search_space() -> None:
    stated: dict[str, JsonValue] = {
        "dtype": "half",
        "max-num-seqs": 1000,
        "env.B": True,
        "block-size": 64,
        "enforce-eager": None,
        "env.A": None,
    }
    outside = space(
        SEQS,
        reference=stated,
        args={"block-size": 32, "enforce-eager": True, "seed": 1},
        env={"A": "b"},
    )
    params, config = outside.reference()
    assert params == {"max-num-seqs": 1000}
    assert config.args == {"block-size": 64, "seed": 1, "dtype": "half", "max-num-seqs": 1000}
    assert config.env == {"B": "1"}
    assert not outside.contains("max-num-seqs", 1000)


def test_violated_names_the_first_constraint_that_fails() -> None:
    texts = ["max-num-seqs <= 64", "max-num-seqs % 8 == 0"]
    constrained = space(SEQS, constraints=texts)
    assert constrained.violated({"max-num-seqs": 64}) is None
    assert constrained.violated({"max-num-seqs": 60}) == Constraint(texts[1], 2)
    assert constrained.violated({"max-num-seqs": 65}) == Constraint(texts[0], 1)
    assert constrained.violated({}) is None


def test_violated_reads_fixed_values() -> None:
    constrained = space(
        SEQS,
        constraints=["max-num-seqs <= max-num-batched-tokens", "max-num-seqs <= env.A * 2"],
        args={"max-num-batched-tokens": 64},
        env={"A": "8", "B": "INFO"},
    )
    assert constrained.violated({"max-num-seqs": 16}) is None
    assert constrained.violated({"max-num-seqs": 17}) == Constraint("max-num-seqs <= env.A * 2", 2)
    assert constrained.violated({"max-num-seqs": 65}).line == 1  # type: ignore[union-attr]


def test_size_counts_points() -> None:
    assert space(SEQS).size() == 125
    assert space(UTIL).size() == 26
    assert space(SEQS, UTIL, DTYPE).size() == 125 * 26 * 3
    assert space(IntRange("a", 0, 64, 4)).size() == 17
    assert space(SEQS, FloatRange("a", 0.0, 1.0)).size() is None


def test_points_come_in_a_fixed_order() -> None:
    points = list(space(IntRange("a", 1, 3), Choice("b", ("x", None))).points())
    expected = [{"a": a, "b": b} for a, b in itertools.product((1, 2, 3), ("x", None))]
    assert points == expected


def test_points_of_a_grid_of_floats_are_as_written() -> None:
    values = [point["gpu-memory-utilization"] for point in space(UTIL).points()]
    assert values == [float(f"0.{percent}") for percent in range(70, 96)]


def test_points_of_a_huge_space_come_one_by_one() -> None:
    huge = space(IntRange("a", 0, 2**50), IntRange("b", 0, 2**50))
    assert list(itertools.islice(huge.points(), 2)) == [{"a": 0, "b": 0}, {"a": 0, "b": 1}]


def test_points_of_a_continuous_space_are_refused() -> None:
    with pytest.raises(ValueError, match="continuous"):
        space(FloatRange("a", 0.0, 1.0)).points()


@pytest.mark.parametrize(
    ("knob", "inside", "outside"),
    [
        (IntRange("a", 4, 16, 4), [4, 8, 16], [0, 5, 20, 8.0, True, "8", None]),
        (UTIL, [0.7, 0.73, 0.7 + 8 * 0.01, 0.95], [0.69, 0.735, 0.96, "0.7", None, True]),
        (FloatRange("a", 0.5, 1.0), [0.5, 0.77777, 1], [0.4999, 1.1, float("nan"), True]),
        (Choice("a", (1, False, None, "x", [1])), [1, 1.0, False, None, "x", [1]], [True, 0, [2]]),
        (Choice("a", ("x",)), ["x"], [None, "y"]),
    ],
)
def test_contains_knows_the_values(
    knob: Knob, inside: list[JsonValue], outside: list[JsonValue]
) -> None:
    searched = space(knob)
    assert [value for value in inside if not searched.contains(knob.name, value)] == []
    assert [value for value in outside if searched.contains(knob.name, value)] == []
    assert not searched.contains("other", inside[0])


def test_knobs_value_at_refuses_an_index_beyond_the_last() -> None:
    for knob in (SEQS, UTIL, DTYPE, FloatRange("a", 0.0, 1.0)):
        with pytest.raises(IndexError):
            knobs.value_at(knob, knobs.count(knob) or 0)
        with pytest.raises(IndexError):
            knobs.value_at(knob, -1)


# --- laws --------------------------------------------------------------------------------

_CHOICES = st.lists(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from(["auto", "fp8", [1], {"a": 2}]),
    min_size=1,
    max_size=4,
    unique_by=knobs.json_identity,
)


@st.composite
def finite_knobs(draw: st.DrawFn, name: str) -> Knob:
    """A parameter with at most some dozen values."""
    kind = draw(st.sampled_from(["int", "float", "choice", "env"]))
    steps = draw(st.integers(1, 12))
    if kind == "int":
        low, step = draw(st.integers(-50, 50)), draw(st.integers(1, 7))
        return IntRange(name, low, low + steps * step, step)
    if kind == "float":
        low = draw(st.integers(-500, 500)) / 100
        step_hundredths = draw(st.integers(1, 50))
        high = round(low + steps * step_hundredths / 100, 2)
        return FloatRange(name, low, high, step_hundredths / 100)
    if kind == "choice":
        return Choice(name, tuple(draw(_CHOICES)))
    texts = draw(st.lists(st.sampled_from([1, 2, 0.5, "x", "y z"]), min_size=1, unique=True))
    return Choice(f"env.{name.upper()}", tuple(texts))


@st.composite
def finite_spaces(draw: st.DrawFn) -> Space:
    """One to three finite parameters beside a fixed flag and variable."""
    names = draw(st.sampled_from([("a",), ("a", "b"), ("a", "b", "c")]))
    return space(*(draw(finite_knobs(name)) for name in names), args={"z": 1}, env={"Z": "1"})


@RELAXED
@given(finite_spaces())
def test_points_are_as_many_as_size_and_all_different(finite: Space) -> None:
    points = list(finite.points())
    assert len(points) == finite.size()
    assert len({knobs.json_identity(point) for point in points}) == len(points)
    for point in points:
        assert all(finite.contains(name, value) for name, value in point.items())


@RELAXED
@given(finite_spaces(), st.data())
def test_decode_then_encode_gives_the_parameters_back(finite: Space, data: st.DataObject) -> None:
    point = data.draw(st.sampled_from(list(finite.points())))
    config = finite.decode(point)
    set_ones = {name: value for name, value in point.items() if value is not None}
    assert finite.encode(config) == set_ones
    assert finite.decode(finite.encode(config)) == config
    assert config.args["z"] == 1
    assert config.env["Z"] == "1"


@RELAXED
@given(finite_spaces(), st.data())
def test_normalise_is_idempotent_and_repairs_float_noise(
    finite: Space, data: st.DataObject
) -> None:
    point = data.draw(st.sampled_from(list(finite.points())))
    noisy: dict[str, JsonValue] = {
        name: value * (1 + 1e-15) if isinstance(value, float) and name in "abc" else value
        for name, value in point.items()
    }
    assert finite.normalise(point) == point
    assert finite.normalise(noisy) == point
