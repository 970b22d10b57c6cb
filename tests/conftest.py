"""What all tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `builders`


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the long form of tests that have one")
    parser.addoption("--seed", type=int, default=0, help="for tests that draw moments at random")


@pytest.fixture
def long_form(request):
    """Whether the long form was asked for."""
    return request.config.getoption("--long")


@pytest.fixture
def seed(request):
    """For random moments; a failure repeats with the same, as far as the machine's pace lets it."""
    return request.config.getoption("--seed")


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """The test runs in an empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
