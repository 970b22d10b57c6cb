"""What the README shows is true."""

from __future__ import annotations

import re
from pathlib import Path

from tuner import spec
from tuner.cli import app

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_space_file_of_the_readme_is_valid():
    (block,) = (b for b in re.findall(r"```yaml\n(.*?)```", README, re.S) if "search_space" in b)
    parsed = spec.parse(block, Path("README.md"))
    assert parsed.workload.concurrency == 64
    assert {knob.name for knob in parsed.search_space} >= {"max-num-seqs", "kv-cache-dtype"}


def test_commands_of_the_readme_are_all_there_are():
    table = set(re.findall(r"^\| `tuner (\w+)", README, re.M))
    assert table == {command.callback.__name__ for command in app.registered_commands}


def test_ci_runs_the_test_command_of_the_readme():
    ci = (Path(__file__).parents[1] / ".ci" / "run").read_text(encoding="utf-8")
    (command,) = re.findall(r'TEST_COMMAND="(.*)"', ci)
    assert command in README
