"""A prepared vLLM and a fork server for the tests on the real engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import NOT_PREPARED, ForkServer, PreparedVllm, find_prepared, forking
from tuning import Workplace

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session")
def prepared_vllm() -> PreparedVllm:
    """The prepared vLLM; skips where there is none, fails where the tests are required."""
    prepared = find_prepared()
    if prepared is None:
        if os.environ.get("TUNER_REQUIRE_REAL_VLLM") == "1":
            pytest.fail(NOT_PREPARED)
        pytest.skip(NOT_PREPARED)
    return prepared


@pytest.fixture(scope="session")
def tiny_model(prepared_vllm: PreparedVllm) -> Path:
    """Folder of the tiny model; needs `--load-format dummy`."""
    return prepared_vllm.model


@pytest.fixture(scope="session")
def fork_server(prepared_vllm: PreparedVllm) -> Iterator[ForkServer]:
    """A fork server for the whole test run; with all its servers it ends with the run."""
    with forking(prepared_vllm) as server:
        yield server


@pytest.fixture(scope="session")
def forked_vllm(fork_server: ForkServer) -> Path:
    """A command that stands in for the plain `vllm` and is ready in 2 s."""
    return fork_server.command


@pytest.fixture(scope="session")
def flag_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tuner remembers of vLLM's flags; empty at first."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def workplace(tmp_path: Path, flag_cache: Path) -> Workplace:
    """An empty folder to use `tuner` in."""
    return Workplace(tmp_path, flag_cache)
