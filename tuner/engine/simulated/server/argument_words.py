"""What vLLM's `FlexibleArgumentParser` (0.32) does to a command line before argparse reads it.

Underscores in names become hyphens, `--config FILE` is replaced by the file's flags, dotted
names are gathered into one JSON object, `-O3` is `--optimization-level 3`, and `--model M` is
the positional model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from tuner.engine.arguments import merge_dotted
from tuner.engine.simulated.server.value_types import human_readable_int
from tuner.types import JsonValue


class UnreadableArguments(Exception):
    """vLLM ends with a traceback over these; the message is its last line."""


def prepared(words: Sequence[str]) -> list[str]:
    """The words after the program's name, as argparse gets them.

    Raises:
        UnreadableArguments: a `--config` file that is none, or no model.
    """
    words = _with_positional_model(list(words))
    if "--config" in words:
        words = _with_config(words)
    return _with_json(_plain_words(words))


def _with_positional_model(words: list[str]) -> list[str]:
    if words[:1] != ["serve"]:
        return words
    for at, word in enumerate(words):
        if word == "--model" and at + 1 < len(words):
            return ["serve", words[at + 1], *words[1:at], *words[at + 2 :]]
        if word.startswith("--model="):
            return ["serve", word.removeprefix("--model="), *words[1:at], *words[at + 1 :]]
    return words


def _with_config(words: list[str]) -> list[str]:
    """The file's flags stand right after the model, so that the command line's win."""
    at = words.index("--config")
    if at == len(words) - 1:
        raise UnreadableArguments(
            "ValueError: No config file specified! Please check your command-line arguments."
        )
    flags = config_words(words[at + 1])
    rest = words[1:at] + words[at + 2 :]
    model = [rest.pop(0)] if rest and at > 1 and not rest[0].startswith("-") else []
    if not model and "--model" not in flags:
        raise UnreadableArguments(
            "ValueError: No model specified! Please specify model either as a positional argument "
            "or in a config file."
        )
    if "--model" in flags:
        named = flags.index("--model")
        model = model or [flags[named + 1]]
        del flags[named : named + 2]
    return [words[0], *model, *flags, *rest]


def config_words(path: str) -> list[str]:
    """The flags of a `--config` file as words.

    `x: false` gives nothing: vLLM looks for `--no-x` in the parser of its subcommands' names,
    which does not have it, and drops the key without a word.

    Raises:
        UnreadableArguments: it is no YAML mapping, or not there.
    """
    extension = path.rpartition(".")[2]
    if extension not in ("yaml", "yml"):
        raise UnreadableArguments(
            f"ValueError: Config file must be of a yaml/yml type. {extension} supplied"
        )
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        items = list(document.items())
    except OSError as error:
        raise UnreadableArguments(f"{type(error).__name__}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise UnreadableArguments(f"{type(error).__name__}: {error}") from None
    words: list[str] = []
    for key, value in items:
        if value is False or value == []:
            continue
        words.append(f"--{key}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif isinstance(value, dict):
            words.append(json.dumps(value))
        elif value is not True:
            words.append(str(value))
    return words


def _plain_words(words: list[str]) -> list[str]:
    plain: list[str] = []
    for at, word in enumerate(words):
        if word.startswith("--"):
            plain.append(_hyphened(word))
        elif word.startswith("-O") and len(word) > len("-O"):
            plain += ["--optimization-level", word.removeprefix("-O").removeprefix("=")]
        elif word == "-O" and words[at + 1 : at + 2] in (["0"], ["1"], ["2"], ["3"]):
            plain.append("--optimization-level")
        else:
            plain.append(word)
    return plain


def _hyphened(word: str) -> str:
    """`--a_b.c_d=e_f` with its first name hyphened."""
    match = re.match(r"--[^.=]*", word)
    assert match is not None
    return match[0].replace("_", "-") + word[match.end() :]


def _with_json(words: list[str]) -> list[str]:
    """Gather `--x.a.b 1` into `--x '{"a": {"b": 1}}'`."""
    kept: list[str] = []
    dotted: dict[str, JsonValue] = {}
    rest = iter(words)
    for word in rest:
        name, given, text = word.partition("=")
        if not word.startswith("-") or "." not in name:
            kept.append(word)
            continue
        dotted[name] = _json_value(text if given else next(rest, ""))
    for name, value in merge_dotted(dotted).items():
        kept += [name, json.dumps(value)]
    return kept


def _json_value(text: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(text)
    except ValueError:
        try:
            value = human_readable_int(text)
        except ValueError:
            value = text
    return value
