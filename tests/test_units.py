"""Durations and sizes."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.units import parse_duration, parse_gib, parse_quantity, parse_whole

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("15m", 900.0),
        ("4h", 14400.0),
        ("90s", 90.0),
        ("500ms", 0.5),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("1d2h3m4s5ms", 93784.005),
        ("1.5h", 5400.0),
        ("90", 90.0),
        (90, 90.0),
        (0.25, 0.25),
        (0, 0.0),
    ],
)
def test_parse_duration_reads_units(text: str | int | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "m", "15 minutes", "30m1h", "1h1h", "1h30", "-5m", "nan", "inf", "1e3s"),
        *(-1, True, float("nan"), float("inf")),
    ],
)
def test_parse_duration_refuses_what_is_none(text: str | int | float) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8K", 8192),
        ("8k", 8000),
        ("64M", 64 * 2**20),
        ("64m", 64 * 10**6),
        ("2G", 2 * 2**30),
        ("2g", 2 * 10**9),
        ("1T", 2**40),
        ("64Mi", 64 * 2**20),
        ("64MiB", 64 * 2**20),
        ("64mib", 64 * 2**20),
        ("4 GiB", 4 * 2**30),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1.5GB", 1_500_000_000),
        ("25.6k", 25_600),
    ],
)
def test_parse_whole_reads_units_as_vllm_does(text: str, value: int) -> None:
    assert parse_whole(text) == value


@pytest.mark.parametrize("text", ["auto", "fp8", "8", "8192", "7B", "8KK", "K", "", "-8K", "8Kb2"])
def test_parse_quantity_leaves_words_and_plain_numbers_alone(text: str) -> None:
    assert parse_quantity(text) is None
    assert parse_whole(text) is None
    assert parse_gib(text) is None


def test_parse_whole_refuses_fractions_of_a_byte() -> None:
    with pytest.raises(ValueError, match=r"307\.2"):
        parse_whole("0.3K")


def test_parse_gib_is_whole_where_exact() -> None:
    assert parse_gib("64GiB") == 64
    assert isinstance(parse_gib("64GiB"), int)
    assert parse_gib("512MiB") == 0.5
    assert parse_gib("1GB") == pytest.approx(10**9 / 2**30)


@RELAXED
@given(st.integers(0, 10**9), st.sampled_from("KMGT"))
def test_parse_quantity_is_exact_for_binary_units(number: int, letter: str) -> None:
    factor = 1024 ** ("KMGT".index(letter) + 1)
    assert parse_quantity(f"{number}{letter}") == Fraction(number * factor)
    assert parse_quantity(f"{number}{letter}iB") == Fraction(number * factor)


@RELAXED
@given(st.text(max_size=30))
def test_parsers_raise_only_value_errors(text: str) -> None:
    for parser in (parse_duration, parse_whole, parse_gib):
        with contextlib.suppress(ValueError):
            assert parser(text) != -1
