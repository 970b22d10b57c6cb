"""Keeps secrets out of what the tuner writes: records, exports, logs, error messages.

A value is a secret when its name says so (`HF_TOKEN`, `--api-key`, `"password": ...`) or when
it looks like one (`hf_...`, `sk-...`, credentials in a URL, a bearer token). It becomes `***`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from tuner.types import ENV_PREFIX, JsonValue

MASK = "***"

_NAME = re.compile(
    r"API_?KEYS?(?![A-Z])|ACCESS_?KEY|PRIVATE_?KEY|SECRET|PASSW(?:OR)?D|CREDENTIAL|(?:^|_)AUTH$",
    re.I,
)
# TOKENIZERS_PARALLELISM and MAX_TOKENS are not about secrets, LONG_PREFILL_TOKEN_THRESHOLD is
# a number; HF_TOKEN and HUGGING_FACE_HUB_TOKEN are.
_TOKEN_NAME = re.compile(r"TOKEN(?![A-Z])", re.I)
_NUMBER = re.compile(r"[+-]?\d{1,12}(?:\.\d+)?")
_FLAG_NAME = re.compile(
    r"(?:TOKEN|API_?KEYS?|ACCESS_?KEY|SECRET|PASSW(?:OR)?D|CREDENTIALS?)$", re.I
)

_LITERALS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face user tokens: hf_ and 34 letters or digits
    r"|\bsk-[A-Za-z0-9_-]{16,}"  # keys of OpenAI's form
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)([^/\s:@'\"]*):?([^/\s@'\"]*)@", re.I)
# name: value and name=value as JSON, YAML, a Python dictionary and a shell write them.
_PAIR = re.compile(
    r"""(["']?\b[\w.-]*
         (?:api[_-]?keys?|access[_-]?key|private[_-]?key|secret|passw(?:or)?d
           |(?:hf|hub|auth|access|api|id|refresh|session|bearer)[_-]?token|(?<![\w-])token)
         ["']?\s*[:=]\s*)
        (\[[^\]]*\]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;}&'"]+)""",
    re.I | re.X,
)
_OPTION = re.compile(
    r"(--[\w-]*(?:token|api[_-]key|secret|password)[ =])(?!-)(\"[^\"]*\"|'[^']*'|\S+)", re.I
)
_UNSET = frozenset({"none", "null", "true", "false", "''", '""', "[]"})


def redact_text(text: str) -> str:
    """`text` with everything that reads like a secret masked."""
    text = _LITERALS.sub(MASK, text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _URL.sub(_mask_url, text)
    text = _OPTION.sub(rf"\1{MASK}", text)
    return _PAIR.sub(_mask_pair, text)


def redact_yaml(text: str, secrets: Iterable[str] = ()) -> str:
    """A YAML document with its secrets masked, and still YAML: a bare `***` would be an alias.

    Args:
        secrets: texts that are known to be secret, whatever they look like.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return re.sub(
        rf"(?<=[\s,\[{{]){re.escape(MASK)}(?=[\s,\]}}]|$)", f'"{MASK}"', redact_text(text)
    )


def redact_env(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` with secret values masked; empty values stay empty."""
    return {name: _mask_variable(name, value) for name, value in env.items()}


def redact_settings(settings: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """A copy of flags (or `env.X`) by name with the values of secret ones masked."""
    return {name: _mask_setting(name, value) for name, value in settings.items()}


def secrets_of(settings: Mapping[str, JsonValue]) -> list[str]:
    """The texts in `settings` that `redact_settings` and `redact_env` mask."""
    return [
        str(value)
        for name, value in settings.items()
        if value and _mask_setting(name, value) != value and isinstance(value, str | int)
    ]


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A copy of `argv` with the values of secret options and secret-looking words masked."""
    masked: list[str] = []
    secret = False
    for word in argv:
        if word.startswith("-"):
            option, equals, _ = word.partition("=")
            secret = bool(_FLAG_NAME.search(option.lstrip("-").replace("-", "_")))
            masked.append(f"{option}={MASK}" if secret and equals else redact_text(word))
        else:
            # A secret option may take several values: all of them up to the next option.
            masked.append(MASK if secret else redact_text(word))
    return masked


def _mask_setting(name: str, value: JsonValue) -> JsonValue:
    plain = name.removeprefix(ENV_PREFIX).replace("-", "_")
    if isinstance(value, str):
        return MASK if value and _FLAG_NAME.search(plain) else _mask_variable(plain, value)
    if isinstance(value, list):
        return [_mask_setting(name, item) for item in value]
    if isinstance(value, dict):
        return redact_settings(value)
    return value


def _mask_variable(name: str, value: str) -> str:
    if not value:
        return value
    if _NAME.search(name) or (_TOKEN_NAME.search(name) and not _NUMBER.fullmatch(value)):
        return MASK
    return redact_text(value)


def _mask_url(match: re.Match[str]) -> str:
    scheme, user, password = match.groups()
    return f"{scheme}{user}:{MASK}@" if password else f"{scheme}{MASK}@"


def _mask_pair(match: re.Match[str]) -> str:
    name, value = match.groups()
    if value.lower() in _UNSET:
        return match.group()
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{quote}{MASK}{quote}"
