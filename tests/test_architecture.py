"""Dependencies point one way, and heavy or foreign packages stay in their rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tuner"

# From the bottom up; a module imports only from its own layer and those before it.
LAYERS = [
    {"types", "errors", "redact", "versions", "own_process"},
    {
        "units",
        "names",
        "knobs",
        "expression_syntax",
        "expressions",
        "space",
        "spec",
        "records",
        "findings",
        "effects",
        "gain",
    },
    {"engine", "load", "metrics", "objective", "stopping", "retries", "fingerprint"},
    {"measuring"},
    {"evaluate", "search", "storage"},
    {"attempts", "study_problems"},
    {"study", "workbench", "export", "report", "simulation"},
    {"commands"},
    {"cli"},
    {"entry"},
]
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}

ROOMS_OF = {
    "optuna": {"search", "storage"},
    "sqlalchemy": {"storage"},
    "pydantic": {"spec", "storage"},
    "aiohttp": {"load", "metrics", "engine"},
    "httptools": {"load"},
    "typer": {"cli"},
    "rich": {"report", "cli", "commands"},
    "yaml": {"spec", "export", "engine"},
}

MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "probe" not in p.parts)


def room(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path):
    """(module, only for typing) of every import, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            if node.module == "tuner":
                yield from (f"tuner.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_imports_only_what_lies_below(path):
    own = room(path)
    if own == "__init__":
        return
    assert own in LAYER_OF, f"{own} has no layer in this test"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "tuner" or len(parts) == 1 or parts[1] == "__version__":
            continue
        assert LAYER_OF[parts[1]] <= LAYER_OF[own], f"{own} must not know {parts[1]}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_keeps_foreign_packages_in_their_rooms(path):
    for name in imports(path):
        rooms = ROOMS_OF.get(name.split(".")[0])
        if rooms is not None:
            assert room(path) in rooms, f"{name} belongs into {sorted(rooms)}"
        assert name.split(".")[0] not in {"vllm", "torch"}


def test_command_line_starts_without_heavy_imports():
    heavy = ("optuna", "pydantic", "aiohttp", "numpy", "scipy", "sqlalchemy", "rich.live")
    code = f"import sys, tuner.cli; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
