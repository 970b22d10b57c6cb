"""What all tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `builders`


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """The test runs in an empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
