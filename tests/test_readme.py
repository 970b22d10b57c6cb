"""What the README shows is true."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

import pytest
import typer

from tuner import spec
from tuner.cli import app
from tuner.types import FailureCause, Metric, WorkloadKind

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


@pytest.mark.parametrize("words", [Metric, WorkloadKind, FailureCause], ids=lambda e: e.__name__)
def test_readme_names_every_word_of_the_space_file_and_of_the_reports(words: type[StrEnum]):
    named = set(re.findall(r"`(?:kind: |maximize: )?([\w-]+)`", README))
    assert {word.value for word in words} <= named


SAID_BELOW = {"--json", "--study", "--help"}
"""Of several commands, and so told in the paragraphs below the table."""


def options_of_the_program() -> dict[str, set[str]]:
    """The long options of each command, as its --help has them."""
    group = typer.main.get_command(app)
    return {
        name: {word for p in command.params for word in p.opts if word.startswith("--")}
        for name, command in group.commands.items()
    }


def rows_of_the_readme() -> dict[str, set[str]]:
    """The options that the rows of each command name."""
    named: dict[str, set[str]] = {}
    for line in re.findall(r"^\| `tuner .*", README, re.M):
        # An option of vLLM or of another program is named with that program before it.
        own = re.sub(r"`vllm [^`]*`", "", line)
        command = line.split()[2].strip("`")
        named.setdefault(command, set()).update(re.findall(r"(?<![\w-])--[a-z][a-z-]*", own))
    return named


def test_options_in_the_command_table_exist():
    options = options_of_the_program()
    for command, named in rows_of_the_readme().items():
        assert named <= options[command], command


def test_options_of_every_command_are_in_the_command_table():
    named = rows_of_the_readme()
    for command, options in options_of_the_program().items():
        assert options - SAID_BELOW <= named[command], command


def test_options_that_several_commands_share_are_told_below_the_table():
    below = README.split("\n| `tuner version`", 1)[1].split("\n## ", 1)[0]
    for option in SAID_BELOW - {"--help"}:
        (sentence,) = re.findall(rf"`{option}[^`]*` on ([\w,\s]+?) (?:gives|picks)", below)
        told = set(re.findall(r"\w+", sentence)) - {"and"}
        takes = {name for name, found in options_of_the_program().items() if option in found}
        assert told == takes - ({"run"} if option == "--study" else set())  # in its row


def test_section_of_measuring_tells_how_sure_one_run_can_be():
    """The figures that stand in the text are those of the code."""
    from scipy import stats

    from tuner.measuring.blocks import LEAST_ERROR
    from tuner.measuring.ending import LOOKS, SURE
    from tuner.measuring.window import MOST_BLOCKS

    level = 1 - 0.05 / LOOKS / 2
    narrowest = LEAST_ERROR * float(stats.t.ppf(level, MOST_BLOCKS - 1))
    assert f"about ±{100 * narrowest:.1f} %" in README
    assert f"asked at {100 * SURE:g} %" in README
