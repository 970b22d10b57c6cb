"""Starting one of the tuner's own modules as a process."""

from __future__ import annotations

import os
import sys


def own_command(module: str) -> list[str]:
    """The argv that runs `module` with this Python; -P: not what lies in the current folder."""
    return [sys.executable, "-P", "-m", module]


def own_environment(**more: str) -> dict[str, str]:
    """This process's environment and `more`, so that the child finds the same modules.

    In the same order, from wherever they come.
    """
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return {**os.environ, **more, "PYTHONPATH": path}
