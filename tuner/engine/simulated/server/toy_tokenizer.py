"""A tokenizer of words, and the words of answers; deterministic, and true to no model.

`w17` is token 17; any other word is a token by its checksum. There are no special tokens.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

_NAMED = re.compile(r"w(\d+)")

# An answer steps through the vocabulary; both are primes, so that words do not repeat soon.
_STRIDE = 7919
_SPREAD = 104_729

_NATURAL_AT_LEAST = 16
_NATURAL_SPREAD = 240
"""Answers end by themselves after 16 to 255 tokens, depending on the prompt."""


def tokenize(text: str, vocabulary: int) -> list[int]:
    """Token ids, one for each word."""
    return [_token(word, vocabulary) for word in text.split()]


def detokenize(ids: Sequence[int]) -> str:
    """Words that `tokenize` turns into `ids`."""
    return " ".join(f"w{token}" for token in ids)


def _token(word: str, vocabulary: int) -> int:
    if match := _NAMED.fullmatch(word):
        return int(match[1]) % vocabulary
    return zlib.crc32(word.encode(errors="replace")) % vocabulary


class AnswerText:
    """What the model answers to a prompt: always the same.

    Attributes:
        natural_tokens: its length where nothing cuts it off.
    """

    def __init__(self, prompt: Sequence[int], vocabulary: int) -> None:
        digest = zlib.crc32(",".join(map(str, prompt)).encode())
        self.natural_tokens = _NATURAL_AT_LEAST + digest % _NATURAL_SPREAD
        self._start = digest * _SPREAD
        self._vocabulary = vocabulary

    def words(self, first: int, end: int) -> str:
        """Tokens `first..end - 1` as text."""
        start, vocabulary = self._start, self._vocabulary
        return "".join([f" w{(start + _STRIDE * i) % vocabulary}" for i in range(first, end)])
