"""Where studies are kept and how a command line names one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import optuna
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from tuner.errors import EnvironmentProblem, InputError

optuna.logging.set_verbosity(optuna.logging.ERROR)  # the tuner tells what there is to tell

STUDIES = Path("studies")
"""Below the current directory, as the README says."""

_MAKES_ONE = "`tuner run SPACE` makes one"


@dataclass(frozen=True, slots=True)
class StudyLocation:
    """Where one study is kept.

    Attributes:
        directory: logs, the locked space file, and by default the database.
        url: SQLAlchemy URL of the database.
    """

    name: str
    directory: Path
    url: str

    @classmethod
    def of(cls, name: str, url: str | None = None) -> StudyLocation:
        """The place of a study by its name, in `studies/` unless a URL says otherwise."""
        directory = STUDIES / name
        return cls(name, directory, url or _sqlite_url(directory / "study.db"))

    @property
    def sqlite_path(self) -> Path | None:
        """The database file, if it is one.

        Raises:
            InputError: the URL is none.
        """
        try:
            url = make_url(self.url)
        except ArgumentError as error:
            raise InputError(
                f"{self.url!r} is not a storage URL",
                "write it as SQLAlchemy does, such as sqlite:///studies/mine/study.db",
            ) from error
        if url.get_backend_name() != "sqlite":
            return None
        if url.database in (None, "", ":memory:") or "mode=memory" in str(url):
            raise InputError(
                f"{self.url} keeps the study in memory, where it would be lost",
                "name a file: sqlite:///studies/mine/study.db",
            )
        return Path(str(url.database))

    @property
    def lock_path(self) -> Path:
        """One for each study in each database, from wherever it is opened."""
        database = self.sqlite_path
        return (
            self.directory / "lock"
            if database is None
            else database.with_suffix(f".{self.name}.lock")
        )

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return make_url(self.url).render_as_string(hide_password=True)


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
            location = StudyLocation(directory.name, directory, _sqlite_url(database))
            return StudyLocation(name or _only_study_in(location), directory, location.url)
    known = sorted(path.parent.name for path in STUDIES.glob("*/study.db"))
    raise InputError(
        f"there is no study {study!r}",
        f"studies here: {', '.join(known)}" if known else _MAKES_ONE,
    )


def open_database(location: StudyLocation, *, must_exist: bool) -> optuna.storages.RDBStorage:
    """Open the database; call it within `storage_errors`.

    Raises:
        InputError: it must exist and does not.
    """
    path = location.sqlite_path
    if path is not None and must_exist and not path.is_file():
        raise InputError(f"there is no study database {path}", _MAKES_ONE)
    # Wait for another process's write rather than fail at once.
    arguments = {"connect_args": {"timeout": 30}} if path is not None else {}
    try:
        return optuna.storages.RDBStorage(location.url, engine_kwargs=arguments)
    except (ImportError, RuntimeError) as error:
        # No driver for this URL; a schema of another Optuna.
        raise _unusable(location, error) from error


@contextlib.contextmanager
def storage_errors(location: StudyLocation) -> Iterator[None]:
    """Turn what a database or the disk can do wrong into one message.

    Raises:
        EnvironmentProblem: instead of Optuna's, SQLAlchemy's and the system's own errors.
    """
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        raise _unusable(location, error.__cause__ or error) from error
    except (SQLAlchemyError, OSError) as error:
        raise _unusable(location, error) from error


def _unusable(location: StudyLocation, error: BaseException) -> EnvironmentProblem:
    reason = (str(getattr(error, "orig", None) or error).splitlines() or [repr(error)])[0]
    hint = (
        "another program holds it; close that and run the same command again"
        if "locked" in reason
        else "check that its disk has room, that you may write it, and that a tuner made it"
    )
    return EnvironmentProblem(
        f"the study database {location.shown_url} cannot be used: {reason}", hint
    )


def _only_study_in(location: StudyLocation) -> str:
    with storage_errors(location):
        names = optuna.get_all_study_names(open_database(location, must_exist=True))
    if len(names) == 1:
        return names[0]
    if not names:
        raise InputError(f"{location.shown_url} holds no study", _MAKES_ONE)
    raise InputError(
        f"{location.shown_url} holds {len(names)} studies",
        f"name one with --study: {', '.join(names)}",
    )


def _sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"
