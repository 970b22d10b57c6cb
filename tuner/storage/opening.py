"""Finding a study's database and opening it, if it is whole."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import optuna

from tuner.errors import EnvironmentProblem, InputError
from tuner.storage.files import make_file
from tuner.storage.location import STUDIES, StudyLocation, sqlite_url
from tuner.storage.problems import storage_errors, unusable

optuna.logging.set_verbosity(optuna.logging.ERROR)  # the tuner tells what there is to tell

LOCK_WAIT_S = 30.0
"""How long another process's write is waited for, rather than fail at once."""

MAKES_ONE = "`tuner run SPACE` makes one"

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, AssertionError)
"""What Optuna and SQLAlchemy raise for values that they did not write."""


def find(study: str, name: str | None = None) -> StudyLocation:
    """Find an existing study by a name under `studies/`, a directory, or a storage URL.

    Args:
        name: which one, where the database holds several.

    Raises:
        InputError: there is none, or there are several and `name` names none.
    """
    if "://" in study:
        return StudyLocation.of(name or _only_study_in(StudyLocation.of("", study)), study)
    for directory in (STUDIES / study, Path(study)):
        database = directory / "study.db"
        if database.is_file():
            location = StudyLocation(directory.name, directory, sqlite_url(database))
            return StudyLocation(name or _only_study_in(location), directory, location.url)
    known = sorted(path.parent.name for path in STUDIES.glob("*/study.db"))
    raise InputError(
        f"there is no study {study!r}",
        f"studies here: {', '.join(known)}" if known else MAKES_ONE,
    )


def open_database(location: StudyLocation, *, must_exist: bool) -> optuna.storages.RDBStorage:
    """Open the database; call it within `storage_errors`.

    Raises:
        InputError: it must exist and does not.
        EnvironmentProblem: it is damaged, or of another Optuna.
    """
    path = location.sqlite_path
    if path is not None:
        if must_exist and not path.is_file():
            raise InputError(f"there is no study database {path}", MAKES_ONE)
        if not path.exists() and path.parent.is_dir():
            make_file(path)  # SQLite would let everybody read it
        elif path.is_file():
            _check_file(location, path, must_exist=must_exist)
    arguments = {"connect_args": {"timeout": LOCK_WAIT_S}} if path is not None else {}
    try:
        return optuna.storages.RDBStorage(location.url, engine_kwargs=arguments)
    except (ImportError, RuntimeError) as error:
        # No driver for this URL; a schema of another Optuna.
        raise unusable(location, error) from error
    except UNREADABLE as error:
        raise damaged(location, error) from error


def read_through(location: StudyLocation, study: optuna.Study) -> None:
    """Read all of a study once, so that what is damaged shows before anything is added.

    Raises:
        EnvironmentProblem: something cannot be read.
    """
    try:
        study.get_trials(deepcopy=False)
        _ = study.user_attrs
    except UNREADABLE as error:
        raise damaged(location, error) from error


def damaged(location: StudyLocation, error: BaseException) -> EnvironmentProblem:
    """The exception for a database that holds what nobody wrote there."""
    words = " ".join(str(error).split())
    return unusable(location, f"it is damaged ({type(error).__name__}: {words})"[:200])


def _check_file(location: StudyLocation, path: Path, *, must_exist: bool) -> None:
    """Ask SQLite whether the file is whole: it would go on reading a damaged one for long."""
    if path.stat().st_size == 0:
        if must_exist:
            raise InputError(f"the study database {path} is empty", MAKES_ONE)
        # A first run that was killed leaves one; nothing but a loss leaves one beside trials.
        if any(location.trials.glob("*/outcome.json")):
            raise unusable(location, "it is damaged (0 bytes, though trials were measured)")
        return
    connection = sqlite3.connect(path, timeout=LOCK_WAIT_S)
    try:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except UNREADABLE as error:  # SQLite quotes what it stumbles over
        raise damaged(location, error) from error
    finally:
        connection.close()
    if verdict != "ok":
        raise unusable(location, f"it is damaged ({verdict.splitlines()[-1]})")


def _only_study_in(location: StudyLocation) -> str:
    with storage_errors(location):
        names = optuna.get_all_study_names(open_database(location, must_exist=True))
    if len(names) == 1:
        return names[0]
    if not names:
        raise InputError(f"{location.shown_url} holds no study", MAKES_ONE)
    raise InputError(
        f"{location.shown_url} holds {len(names)} studies",
        f"name one with --study: {', '.join(names)}",
    )
