"""A study read from its database."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import optuna
from pydantic import ValidationError

from tuner.errors import EnvironmentProblem, InputError
from tuner.records import StudyRecord, StudyState, TrialRecord
from tuner.storage import attributes as attribute
from tuner.storage import study_attributes as names
from tuner.storage.attributes import MalformedRecord
from tuner.storage.location import StudyLocation
from tuner.storage.lock import StudyLock, is_gone
from tuner.storage.opening import damaged
from tuner.storage.problems import storage_errors
from tuner.types import BudgetSpec, JsonValue, StudySpec

ParseSpec = Callable[[str, Path], StudySpec]

P = ParamSpec("P")
S = TypeVar("S", bound="StudyReader")
T = TypeVar("T")


def errors_named(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """Within the method, a full disk or a broken database is an `EnvironmentProblem`."""

    @functools.wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with storage_errors(self.location):
                return method(self, *args, **kwargs)
        except (json.JSONDecodeError, UnicodeDecodeError, ValidationError) as error:
            raise damaged(self.location, error) from error
        except MalformedRecord as error:
            raise EnvironmentProblem(
                f"the study {self.location.name!r} holds what no tuner wrote: {error}",
                "start another study with --study NAME",
            ) from error

    return guarded


class StudyReader:
    """One study's database, open."""

    def __init__(
        self,
        location: StudyLocation,
        storage: optuna.storages.BaseStorage,
        study: optuna.Study,
        lock: StudyLock,
    ) -> None:
        self.location = location
        self._storage = storage
        self._study = study
        self._lock = lock
        self._bound = names.SPEC in study.user_attrs

    @property
    def is_new(self) -> bool:
        """Whether no space file was bound to it yet."""
        return not self._bound

    @property
    def fingerprint(self) -> Mapping[str, JsonValue]:
        """What its results depend on (see `tuner.fingerprint`)."""
        stored: Mapping[str, JsonValue] = self._study.user_attrs.get(names.FINGERPRINT, {})
        return stored

    @errors_named
    def trials(self) -> list[TrialRecord]:
        """All trials, by number."""
        return [
            attribute.trial_record(t, self._trial_path(t.number))
            for t in self._study.get_trials(deepcopy=False)
        ]

    @errors_named
    def read(self, parse_spec: ParseSpec) -> StudyRecord:
        """The whole study as plain data.

        Args:
            parse_spec: turns the stored space file into a `StudySpec`.

        Raises:
            InputError: nothing was bound to it yet.
        """
        stored = self._study.user_attrs
        if names.SPEC not in stored:
            raise InputError(
                f"the study {self.location.name!r} is empty", "`tuner run SPACE` fills it"
            )
        trials = self.trials()
        return StudyRecord(
            name=self.location.name,
            spec=_with_budget(
                parse_spec(stored[names.SPEC], Path(stored[names.SPEC_PATH])), stored
            ),
            state=self._state(trials, finished=bool(stored.get(names.FINISHED))),
            trials=trials,
            versions=stored.get(names.VERSIONS, {}),
        )

    def _state(self, trials: list[TrialRecord], *, finished: bool) -> StudyState:
        owner = self._study.user_attrs.get(names.OWNER)
        if self._lock.is_held() or (owner is not None and not is_gone(owner)):
            return StudyState.RUNNING
        if finished:
            return StudyState.FINISHED
        return StudyState.STOPPED if trials else StudyState.EMPTY

    def _check_format(self, *, writing: bool) -> None:
        """Whether this tuner may read the study, and go on with it.

        Raises:
            InputError: it may not.
        """
        schema = self._study.user_attrs.get(names.SCHEMA)
        if schema is None and (
            self._study.get_trials(deepcopy=False)
            or self._study.direction is not optuna.study.StudyDirection.MAXIMIZE
        ):
            raise InputError(
                f"the study {self.location.name!r} in {self.location.shown_url} is not a tuner's",
                "start another study with --study NAME",
            )
        if schema is None or schema == names.FORMAT:
            return
        if isinstance(schema, int) and 0 < schema < names.FORMAT:
            if not writing:
                return
            raise InputError(
                f"the study {self.location.name!r} was measured by an older tuner "
                f"(format {schema}; this one writes format {names.FORMAT}): its results do not "
                "compare with new ones",
                "start another study with --study NAME; `tuner show` and `tuner export` still "
                "read this one",
            )
        made_by = self._study.user_attrs.get(names.VERSIONS, {}).get("tuner")
        version = f", tuner {made_by}" if made_by else ""
        raise InputError(
            f"the study {self.location.name!r} was made by a newer tuner "
            f"(format {schema}{version}; this one reads format {names.FORMAT})",
            "upgrade the tuner, or start another study with --study NAME",
        )

    def _trial_path(self, number: int) -> Path:
        return self.location.trials / f"{number:04d}"

    def _in_state(self, state: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(state,))


def _with_budget(spec: StudySpec, stored: Mapping[str, Any]) -> StudySpec:
    """The command line may have set another budget than the file."""
    if names.BUDGET not in stored:
        return spec
    return replace(spec, budget=attribute.from_json(stored[names.BUDGET], BudgetSpec))
