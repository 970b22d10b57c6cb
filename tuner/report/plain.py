"""Text of a log, made harmless for a terminal and for JSON."""

from __future__ import annotations

import re

from tuner.redact import redact_text

# Colours and cursor movements, titles and links, and what else begins with an escape.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)


def plain(text: str) -> str:
    """`text` without escape sequences and control characters; secrets masked.

    Lines stay lines; a tab becomes a space. Lone surrogates, which are no text, become `?`.
    """
    text = _ESCAPES.sub("", text).replace("\t", " ")
    text = "".join(c for c in text if c.isprintable() or c == "\n" or "\ud800" <= c <= "\udfff")
    # Colours may have cut a secret in two, so that it is looked for once more.
    return redact_text(text.encode("utf-8", "replace").decode("utf-8"))


def plain_line(text: str) -> str:
    """The same, in one line."""
    return " ".join(plain(text).split())
