"""Where a study is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from tuner.errors import InputError
from tuner.redact import redact_text

STUDIES = Path("studies")
"""Below the current directory, as the README says."""


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
        return cls(name, directory, url or sqlite_url(directory / "study.db"))

    @property
    def sqlite_path(self) -> Path | None:
        """The database file, if it is one.

        Raises:
            InputError: the URL is none.
        """
        try:
            url = make_url(self.url)
        except (ArgumentError, ValueError) as error:
            raise InputError(
                f"{redact_text(self.url)!r} is not a storage URL",
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
    def trials(self) -> Path:
        """The folder of the trials' folders."""
        return self.directory / "trials"

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return redact_text(make_url(self.url).render_as_string(hide_password=True))


def sqlite_url(path: Path) -> str:
    """The URL of a database file."""
    return f"sqlite:///{path}"
