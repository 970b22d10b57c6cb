"""Keeps secrets out of what the tuner writes: records, exports, logs, error messages.

A value is a secret when its name says so (`HF_TOKEN`, `--api-key`, `"password": ...`) or when
it looks like one (`hf_...`, `sk-...`, credentials in a URL, a bearer token). It becomes `***`.
What `remember_secrets` was told is masked wherever it stands, whatever it looks like.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from tuner.types import ENV_PREFIX, JsonValue

MASK = "***"

_NAME = re.compile(
    r"API_?KEYS?(?![A-Z])|ACCESS_?KEY|PRIVATE_?KEY|SECRET|PASSW(?:OR)?D|CREDENTIAL"
    r"|(?:^|_)AUTH$|_KEY$",
    re.I,
)
# TOKENIZERS_PARALLELISM and MAX_TOKENS are not about secrets, LONG_PREFILL_TOKEN_THRESHOLD is
# a number; HF_TOKEN and HUGGING_FACE_HUB_TOKEN are.
_TOKEN_NAME = re.compile(r"TOKEN(?![A-Z])", re.I)
_NUMBER = re.compile(r"[+-]?\d{1,12}(?:\.\d+)?")
_FLAG_NAME = re.compile(
    r"(?:TOKEN|API_?KEYS?|ACCESS_?KEY|SECRET|PASSW(?:OR)?D|CREDENTIALS?|_KEY)$", re.I
)

_LITERALS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face user tokens: hf_ and 34 letters or digits
    r"|\bsk-[A-Za-z0-9_-]{16,}"  # keys of OpenAI's form
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}"
    r"|\bgithub_pat_[A-Za-z0-9_]{20,}"
    r"|\bnvapi-[A-Za-z0-9_-]{16,}"  # NVIDIA's catalogue
    r"|\bglpat-[A-Za-z0-9_-]{16,}"  # GitLab
    r"|\bAKIA[0-9A-Z]{16}\b"
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{6,}")
# Bounded lengths: without, a text such as "a.a.a." takes quadratic time.
_URL = re.compile(r"(\b[a-z][a-z0-9+.-]{0,30}://)([^/\s:@'\"]{0,200}):?([^/\s@'\"]{0,4000})@", re.I)
# name: value and name=value as JSON, YAML, a Python dictionary and a shell write them; also in
# the query of a signed URL. `_KEY` only as variables are written: `cache_key=` is no secret.
_PAIR = re.compile(
    r"""((?<![\w.-])["']?[\w.-]*
         (?:api[_-]?keys?|access[_-]?key|private[_-]?key|secret|passw(?:or)?d
           |(?:hf|hub|auth|access|api|id|refresh|session|bearer)[_-]?token|(?<![\w-])token
           |x-(?:amz|goog)-(?:signature|credential|security-token)|(?-i:_KEY))
         ["']?\s*[:=]\s*)
        (\[[^\]]*\]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;}&'"]+)""",
    re.I | re.X,
)
_OPTION = re.compile(
    r"((?<![\w-])--[\w-]*(?:token|api[_-]key|secret|password)[ =])(?!-)(\"[^\"]*\"|'[^']*'|\S+)",
    re.I,
)
# Takes several: all up to the next option.
_API_KEYS = re.compile(
    r"((?<![\w-])--api[_-]key[ =])(?!-)((?:\"[^\"\n]*\"|'[^'\n]*'|\S+)"
    r"(?: (?!-)(?:\"[^\"\n]*\"|'[^'\n]*'|\S+))*)",
    re.I,
)
_WORD = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|\S+")
_HINT = re.compile(
    rb"hf_|sk-|gh[pousr]_|github_pat_|nvapi-|glpat-|AKIA|Bearer|Basic|://[^/\s]*@"
    rb"|(?:api|access|private)[_-]?key|(?-i:_KEY)|secret|x-amz-|x-goog-|passw"
    rb"|token[\"']?[ \t]*[:=]|-token ",
    re.I,
)
_HINT_WORDS = (
    *(b"hf_", b"sk-", b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"akia", b"bearer", b"basic"),
    *(b"github_pat_", b"nvapi-", b"glpat-", b"x-amz-", b"x-goog-"),
    *(b"@", b"key", b"secret", b"passw"),
    *(b"token=", b"token:", b"token ", b"token\t", b"token'", b'token"'),
)
"""Looked for before the pattern, which takes ten times as long."""

_LONGEST_PIECE = 1 << 20
"""Of a log's line that is masked at once: one may never end."""

_COMMON = re.compile(r".{0,5}|[A-Za-z]{6,11}|[\d.:]+|[/~.].*", re.S)
"""Not looked for everywhere, even where a name says that it is secret: `default`, a number, a
path. Masking these would tear other words apart."""

_remembered: set[str] = set()
"""Of the whole process: a secret is one in every room."""

_UNSET = frozenset({"none", "null", "true", "false", "''", '""', "[]"})


def remember_secrets(*settings: Mapping[str, JsonValue] | Mapping[str, str]) -> None:
    """Mask the secrets of these settings from now on, also where a server quotes them bare.

    Args:
        settings: flags, environment variables, or `env.X`, by name.
    """
    for one in settings:
        for name, value in one.items():
            if not _names_a_place(name):
                texts = _secret_texts(name, value)
                found = [part for text in texts for part in _bare_secrets(name, text)]
                _remembered.update(s for s in found if not _COMMON.fullmatch(s))


def redact_file(path: Path) -> bool:
    """Mask the secrets in a log whose writer has ended; tells whether there were any.

    Where the disk has no room for the masked copy the log stays as it is, readable by its
    owner alone. Holes in it (`tuner.engine.log_size`) stay holes.
    """
    draft = path.with_name(f".{path.name}.new")
    try:
        with path.open("rb") as log:
            extents = _extents(log.fileno())
            if not any(_suspicious(line) for _, line in _lines(log, extents)):
                return False
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as clean:
                read = 0
                for at, line in _lines(log, extents):
                    clean.seek(at - read, os.SEEK_CUR)
                    clean.write(_masked_line(line) if _suspicious(line) else line)
                    read = at + len(line)
                clean.truncate(clean.tell() + os.fstat(log.fileno()).st_size - read)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        return False
    return True


def _extents(descriptor: int) -> list[tuple[int, int]]:
    """Where a file holds data: begin and end of each part that is no hole."""
    size = os.fstat(descriptor).st_size
    found: list[tuple[int, int]] = []
    begin = end = 0
    try:
        while end < size:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, begin, os.SEEK_HOLE)
            found.append((begin, end))
    except OSError as error:
        if error.errno != errno.ENXIO:  # ENXIO: a hole up to the end
            return [(0, size)]
    except AttributeError:  # a system that does not tell
        return [(0, size)]
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    return found


def _lines(log: BinaryIO, extents: Sequence[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their positions; longer ones in pieces, and no zeros of holes."""
    for begin, end in extents:
        log.seek(begin)
        at = begin
        while at < end and (line := log.readline(min(_LONGEST_PIECE, end - at))):
            if len(line) == _LONGEST_PIECE and (cut := line.rfind(b" ", len(line) // 2) + 1):
                line = line[:cut]  # not within a secret
                log.seek(at + cut)
            if line.strip(b"\0"):
                yield at, line
            at += len(line)


def _bare_secrets(name: str, text: str) -> list[str]:
    """The secret itself: all of the text, or the password of a URL in it."""
    passwords = [match[3] for match in _URL.finditer(text) if match[3]]
    return [text] if _mask_setting(name, text) == MASK else passwords


def _suspicious(line: bytes) -> bool:
    """Quick, for logs of 100 MB: whether masking the line may change it."""
    lower = line.lower()
    hinted = any(word in lower for word in _HINT_WORDS) and _HINT.search(line)
    return bool(hinted) or any(secret.encode() in line for secret in _remembered)


def _masked_line(line: bytes) -> bytes:
    return redact_text(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _names_a_place(name: str) -> bool:
    """HF_TOKEN_PATH and AWS_SHARED_CREDENTIALS_FILE hold no secret, but a path."""
    return name.upper().endswith(("_PATH", "_FILE", "_DIR", "_URL", "_SOCK"))


def redact_text(text: str) -> str:
    """`text` with everything that reads like a secret masked."""
    for secret in sorted(_remembered, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _LITERALS.sub(MASK, text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _URL.sub(_mask_url, text)
    text = _API_KEYS.sub(lambda keys: keys[1] + _WORD.sub(MASK, keys[2]), text)
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


def redact_json(value: JsonValue) -> JsonValue:
    """A copy of a JSON value with every text in it as `redact_text` gives it."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, list):
        return [redact_json(item) for item in value]
    if isinstance(value, dict):
        return {name: redact_json(item) for name, item in value.items()}
    return value


def redact_settings(settings: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """A copy of flags (or `env.X`) by name with the values of secret ones masked."""
    return {name: _mask_setting(name, value) for name, value in settings.items()}


def secrets_of(settings: Mapping[str, JsonValue]) -> list[str]:
    """The texts in `settings` that `redact_settings` and `redact_env` mask."""
    return [text for name, value in settings.items() for text in _secret_texts(name, value)]


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


def _secret_texts(name: str, value: JsonValue) -> list[str]:
    if isinstance(value, list):
        return [text for item in value for text in _secret_texts(name, item)]
    if isinstance(value, dict):
        return secrets_of(value)
    return [str(value)] if value and _mask_setting(name, value) != value else []


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
