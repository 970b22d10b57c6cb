"""`tuner diagnose`: read a server's log, from a file or a pipe, and judge it."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from rich.console import Console
from rich.status import Status

from tuner.engine.diagnosis import Diagnosis, diagnose
from tuner.errors import InputError
from tuner.redact import remember_secrets

_PIECE = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_QUIET_S = 2.0
"""Reading that is over by then shows no progress."""

_REFRESH_S = 0.25


def diagnose_log(log: str, exit_code: int | None) -> Diagnosis:
    """What the log `log` tells; `-` is standard input. Compressed (gzip) or UTF-16 is read too.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    remember_secrets(os.environ)  # the server's may have been the same
    name = "standard input" if log == "-" else log
    with _opened(log) as stream:
        return diagnose(_watched(_text(_pieces(stream, name)), _size(stream)), exit_code)


def _opened(log: str) -> io.BufferedReader:
    try:
        if log == "-":
            if sys.stdin is None or sys.stdin.closed:
                raise InputError("standard input is closed", "name a file, or pipe a log in")
            if sys.stdin.isatty():
                print("reading the log from the terminal; Ctrl-D ends it", file=sys.stderr)
            return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        if Path(log).is_dir():
            raise InputError(f"{log} is a directory", "name a log file, such as its server.log")
        return Path(log).open("rb")
    except FileNotFoundError as error:
        raise InputError(
            f"there is no file {log}", "`tuner show STUDY TRIAL` names the log of a trial"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise InputError(f"{log} cannot be read: {_reason(error)}") from error


def _pieces(stream: io.BufferedReader, name: str) -> Iterator[bytes]:
    """The bytes of the log, unpacked where they are packed."""
    try:
        source: io.BufferedReader | gzip.GzipFile = stream
        if stream.peek(2).startswith(_GZIP_MAGIC):
            source = gzip.GzipFile(fileobj=cast("BinaryIO", stream))
        while piece := source.read1(_PIECE):
            yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{name} cannot be read: {_reason(error)}") from error


def _text(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """UTF-16, as PowerShell's `>` writes it, as UTF-8; everything else as it is."""
    first = next(pieces, b"")
    if not first.startswith(_UTF16_MARKS):
        yield first
        yield from pieces
        return
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    yield decoder.decode(first).encode("utf-8", "replace")
    for piece in pieces:
        yield decoder.decode(piece).encode("utf-8", "replace")


def _watched(pieces: Iterator[bytes], total: int | None) -> Iterator[bytes]:
    """The same pieces; a terminal is told how far the reading is, if it takes its time."""
    console = Console(stderr=True)
    status: Status | None = None
    begun_s = shown_s = time.monotonic()
    read = 0
    try:
        for piece in pieces:
            yield piece
            read += len(piece)
            now_s = time.monotonic()
            if not console.is_terminal or now_s - begun_s < _QUIET_S:
                continue
            if status is None:
                status = console.status("reading the log")
                status.start()
            if now_s - shown_s >= _REFRESH_S:
                of = f" of {total >> 20}" if total and total >= read else ""
                status.update(f"reading the log: {read >> 20}{of} MiB")
                shown_s = now_s
    finally:
        if status is not None:
            status.stop()


def _size(stream: io.BufferedReader) -> int | None:
    """Of a file; None for a pipe."""
    return os.fstat(stream.fileno()).st_size or None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
