"""What a database or a disk can do wrong, in words that say what to do."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

import optuna
from sqlalchemy.exc import SQLAlchemyError

from tuner.errors import EnvironmentProblem
from tuner.redact import redact_text
from tuner.storage.location import StudyLocation

_GO_ON = "and run the same command again: nothing that was stored is lost"

_HINTS = (
    (("locked", "busy"), f"another program holds it; close that {_GO_ON}"),
    (("is full", "No space left", "quota", "File too large"), f"free space on its disk {_GO_ON}"),
    (
        ("readonly", "read-only", "Read-only", "ermission denied", "not permitted"),
        f"make the file and its folder writable for you {_GO_ON}",
    ),
    (("disk I/O error", "Input/output error"), f"look at the disk (`dmesg`, `df`), {_GO_ON}"),
    (("unable to open",), f"see that its folder exists and that you may write there, {_GO_ON}"),
    (
        ("installed Optuna", "no longer compatible", "schema"),
        "upgrade the tuner and Optuna (`pip install -U optuna`), or start another study with "
        "--study NAME",
    ),
    (
        ("malformed", "not a database", "damaged", "encrypted"),
        "restore it from a copy, or start another study with --study NAME; outcome.json in each "
        "folder of trials/ still holds what was measured, and `sqlite3 study.db .recover` may "
        "get the rest",
    ),
)
_OTHERWISE = "check that its disk has room, that you may write it, and that a tuner made it"


@contextlib.contextmanager
def storage_errors(location: StudyLocation) -> Iterator[None]:
    """Turn what a database or the disk can do wrong into one message.

    Raises:
        EnvironmentProblem: instead of Optuna's, SQLAlchemy's and the system's own errors.
    """
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        raise unusable(location, error.__cause__ or error) from error
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise unusable(location, error) from error


def unusable(location: StudyLocation, error: BaseException | str) -> EnvironmentProblem:
    """The exception that says why a study cannot be used, and what to do."""
    reason = error if isinstance(error, str) else _reason(error)
    hint = next((h for words, h in _HINTS if any(word in reason for word in words)), _OTHERWISE)
    what = f"the study database {location.shown_url}"
    if isinstance(error, OSError) and error.filename is not None:
        what = f"{error.filename} of the study {location.name!r}"
    return EnvironmentProblem(f"{what} cannot be used: {redact_text(reason)}", hint)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    original = getattr(error, "orig", None) or error
    return (str(original).splitlines() or [repr(original)])[0]
