"""One study's database, open."""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import optuna

from tuner.engine.base import ProcessRecord
from tuner.errors import EnvironmentProblem, InputError
from tuner.records import StudyRecord, StudyState, TrialRecord, TrialState
from tuner.redact import redact_argv
from tuner.storage import attributes as attribute
from tuner.storage.attributes import MalformedRecord, masked_text
from tuner.storage.location import StudyLocation, open_database, storage_errors
from tuner.storage.lock import StudyLock, is_gone, this_process
from tuner.types import BudgetSpec, Failure, JsonValue, Outcome, StudySpec, Suggestion, Verdict

SCHEMA_VERSION = 1
"""Raised when an older tuner could misread a study."""

_SCHEMA = "tuner:schema"
_SPEC = "tuner:space_file"
_SPEC_PATH = "tuner:space_file_path"
_FINGERPRINT = "tuner:fingerprint"
_VERSIONS = "versions"
_FINISHED = "finished"
_OWNER = "tuner:owner"
_BUDGET = "tuner:budget"

ParseSpec = Callable[[str, Path], StudySpec]


P = ParamSpec("P")
T = TypeVar("T")


def _errors_named(
    method: Callable[Concatenate[StudyStore, P], T],
) -> Callable[Concatenate[StudyStore, P], T]:
    """Within the method, a full disk or a broken database is an `EnvironmentProblem`."""

    @functools.wraps(method)
    def guarded(self: StudyStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with storage_errors(self.location):
                return method(self, *args, **kwargs)
        except MalformedRecord as error:
            raise EnvironmentProblem(
                f"the study {self.location.name!r} holds what no tuner wrote: {error}",
                "start another study with --study NAME",
            ) from error

    return guarded


@dataclass(frozen=True, slots=True)
class Queued:
    """A trial that waits to be run: the reference, or one that was interrupted."""

    params: Mapping[str, JsonValue]
    is_reference: bool


@dataclass(frozen=True, slots=True)
class RunningTrial:
    """A trial between `start` and `finish`, `interrupt` or `abort`."""

    number: int
    optuna_trial: optuna.Trial


@dataclass(frozen=True, slots=True)
class LeftTrial:
    """A trial that was running when its tuner died.

    Attributes:
        outcome: if it was known already; then only the end of its record is missing.
    """

    trial: RunningTrial
    outcome: Outcome | None
    duration_s: float


class StudyStore:
    """One study's database, open for reading, or for writing with its lock held."""

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
        self._claimed = False
        self._made: Path | None = None
        self._bound = _SPEC in study.user_attrs

    # --- opening ---

    @classmethod
    def open(cls, location: StudyLocation) -> StudyStore:
        """Open an existing study for reading.

        Raises:
            InputError: there is none, or a newer tuner made it.
            EnvironmentProblem: the database cannot be used.
        """
        with storage_errors(location):
            storage = open_database(location, must_exist=True)
            try:
                study = optuna.load_study(study_name=location.name, storage=storage)
            except KeyError as error:
                raise InputError(
                    f"there is no study {location.name!r} in {location.shown_url}",
                    "`tuner run SPACE` makes one",
                ) from error
            store = cls(location, storage, study, StudyLock(location.lock_path))
            store._check_schema()
            return store

    @classmethod
    def open_for_writing(cls, location: StudyLocation) -> StudyStore:
        """Open a study, made if it is not there, and take its lock until `close`.

        Raises:
            InputError: a newer tuner made it.
            EnvironmentProblem: it is locked, or the database cannot be used.
        """
        with storage_errors(location):
            location.directory.mkdir(parents=True, exist_ok=True)
            lock = StudyLock(location.lock_path)
            lock.acquire()
            try:
                database = location.sqlite_path
                was_there = database is None or database.exists()
                storage = open_database(location, must_exist=False)
                store = cls(location, storage, _create(location.name, storage), lock)
                store._made = None if was_there else database
                store._check_schema()
                store._claim()
            except BaseException:
                lock.release()
                raise
            return store

    @classmethod
    def in_memory(cls, name: str, directory: Path) -> StudyStore:
        """A study without a database, for simulations; logs go to `directory`."""
        location = StudyLocation(name, directory, "memory://")
        storage = optuna.storages.InMemoryStorage()
        return cls(location, storage, _create(name, storage), StudyLock(location.lock_path))

    def _check_schema(self) -> None:
        schema = self._study.user_attrs.get(_SCHEMA)
        if schema is None and (
            self._study.get_trials(deepcopy=False)
            or self._study.direction is not optuna.study.StudyDirection.MAXIMIZE
        ):
            raise InputError(
                f"the study {self.location.name!r} in {self.location.shown_url} is not a tuner's",
                "start another study with --study NAME",
            )
        if schema is not None and schema != SCHEMA_VERSION:
            raise InputError(
                f"the study {self.location.name!r} was made by a newer tuner (schema {schema})",
                "upgrade the tuner, or start another study with --study NAME",
            )

    def _claim(self) -> None:
        """Where a database has no file to lock, its study names who works on it."""
        if self.location.sqlite_path is not None:
            return
        owner = self._study.user_attrs.get(_OWNER)
        if owner is not None and not is_gone(owner):
            raise EnvironmentProblem(
                f"another tuner works on this study (process {owner['pid']} on {owner['host']})",
                "wait for it, stop it with Ctrl-C, or start another study with --study NAME; "
                "if it was killed, run the same command on that machine",
            )
        self._study.set_user_attr(_OWNER, this_process())
        self._claimed = True

    def close(self) -> None:
        """Close the database and give the lock back."""
        if self._claimed:
            self._study.set_user_attr(_OWNER, None)
        if isinstance(self._storage, optuna.storages.RDBStorage):
            self._storage.remove_session()
            self._storage.engine.dispose()
        self._lock.release()

    def discard(self) -> None:
        """Remove a study that nothing was bound to, as if it had not been opened.

        Only a database that this opening made goes: another may hold other studies. Called
        before `close`, so that nobody else can have begun to use it.
        """
        if self._made is None or self._made.parent != self.location.directory:
            return
        for path in (self._made, self.location.lock_path):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else lies there
            self.location.directory.rmdir()
            self.location.directory.parent.rmdir()

    # --- the study ---

    @property
    def is_new(self) -> bool:
        """Whether no space file was bound to it yet."""
        return not self._bound

    @property
    def fingerprint(self) -> Mapping[str, JsonValue]:
        """What its results depend on (see `tuner.fingerprint`)."""
        stored: Mapping[str, JsonValue] = self._study.user_attrs.get(_FINGERPRINT, {})
        return stored

    @_errors_named
    def bind(
        self,
        spec: StudySpec,
        fingerprint: Mapping[str, JsonValue],
        versions: Mapping[str, str],
    ) -> None:
        """Write down what the study is about, in the database and as a file beside it."""
        study = self._study
        if self.is_new:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names(["score"])
        study.set_user_attr(_SCHEMA, SCHEMA_VERSION)
        known = {name: value for name, value in fingerprint.items() if value is not None}
        # What could not be told this time (no vLLM to ask) is still what it was.
        study.set_user_attr(_FINGERPRINT, {**fingerprint, **self.fingerprint, **known})
        study.set_user_attr(_VERSIONS, dict(versions))
        study.set_user_attr(_SPEC_PATH, str(spec.path))
        study.set_user_attr(_BUDGET, attribute.to_json(spec.budget))
        text = masked_text(spec)
        study.set_user_attr(_SPEC, text)
        self._bound = True
        (self.location.directory / "space.yaml").write_text(text, encoding="utf-8")

    @_errors_named
    def mark_finished(self, finished: bool) -> None:
        """Remember whether the budget is used up."""
        self._study.set_user_attr(_FINISHED, finished)

    @_errors_named
    def trials(self) -> list[TrialRecord]:
        """All trials, by number."""
        return [
            attribute.trial_record(t, self._trial_path(t.number))
            for t in self._study.get_trials(deepcopy=False)
        ]

    @_errors_named
    def read(self, parse_spec: ParseSpec) -> StudyRecord:
        """The whole study as plain data.

        Args:
            parse_spec: turns the stored space file into a `StudySpec`.

        Raises:
            InputError: nothing was bound to it yet.
        """
        stored = self._study.user_attrs
        if _SPEC not in stored:
            raise InputError(
                f"the study {self.location.name!r} is empty", "`tuner run SPACE` fills it"
            )
        trials = self.trials()
        return StudyRecord(
            name=self.location.name,
            spec=_with_budget(parse_spec(stored[_SPEC], Path(stored[_SPEC_PATH])), stored),
            state=self._state(trials, finished=bool(stored.get(_FINISHED))),
            trials=trials,
            versions=stored.get(_VERSIONS, {}),
        )

    def _state(self, trials: list[TrialRecord], *, finished: bool) -> StudyState:
        owner = self._study.user_attrs.get(_OWNER)
        if self._lock.is_held() or (owner is not None and not is_gone(owner)):
            return StudyState.RUNNING
        if finished:
            return StudyState.FINISHED
        return StudyState.STOPPED if trials else StudyState.EMPTY

    # --- the queue ---

    @_errors_named
    def queue(
        self,
        params: Mapping[str, JsonValue],
        encoded: Mapping[str, Any],
        *,
        is_reference: bool = False,
    ) -> None:
        """Make these parameters wait behind what is queued already.

        Args:
            params: as the space file spells them.
            encoded: those of them that Optuna can hold, as it holds them.
        """
        marks = {
            attribute.PARAMS: dict(params),
            attribute.ENCODED: dict(encoded),
            attribute.REFERENCE: is_reference,
        }
        self._study.enqueue_trial(dict(encoded), user_attrs=marks)

    @_errors_named
    def next_queued(self) -> Queued | None:
        """What `start` would start, or None."""
        return next(iter(self._queued()), None)

    def _queued(self) -> list[Queued]:
        waiting = self._in_state(optuna.trial.TrialState.WAITING)
        waiting.sort(key=lambda t: t.number)
        return [
            Queued(
                t.user_attrs.get(attribute.PARAMS, {}),
                bool(t.user_attrs.get(attribute.REFERENCE)),
            )
            for t in waiting
        ]

    # --- a trial's life ---

    @_errors_named
    def start(
        self, distributions: Mapping[str, optuna.distributions.BaseDistribution]
    ) -> RunningTrial:
        """Turn the first queued trial into a running one.

        Args:
            distributions: of exactly the parameters that it was queued with.
        """
        trial = self._study.ask(dict(distributions))
        return RunningTrial(trial.number, trial)

    @_errors_named
    def describe(
        self,
        trial: RunningTrial,
        suggestion: Suggestion,
        command: list[str],
        effective: Mapping[str, JsonValue],
    ) -> Path:
        """Write down what is about to run; returns the trial's folder, which exists."""
        directory = self.trial_directory(trial.number)
        trial.optuna_trial.set_user_attr(attribute.DIRECTORY, str(directory))
        trial.optuna_trial.set_user_attr(attribute.CONFIG, attribute.config_json(suggestion.config))
        trial.optuna_trial.set_user_attr(attribute.COMMAND, redact_argv(command))
        trial.optuna_trial.set_user_attr(attribute.EFFECTIVE, dict(effective))
        return directory

    @_errors_named
    def record_process(self, trial: RunningTrial, process: ProcessRecord) -> None:
        """Write down which processes belong to a running trial."""
        trial.optuna_trial.set_user_attr(attribute.PROCESS, attribute.to_json(process))

    @_errors_named
    def finish(
        self, trial: RunningTrial, outcome: Outcome, verdict: Verdict, duration_s: float
    ) -> None:
        """Tell a trial that was measured, or that failed by its configuration."""
        self._write_outcome(trial, outcome, duration_s)
        state = TrialState.MEASURED if verdict.feasible else TrialState.INFEASIBLE
        trial.optuna_trial.set_user_attr(attribute.STATE, state.value)
        for name, value in verdict.constraints.items():
            if name not in trial.optuna_trial.constraints:  # Optuna takes each only once
                trial.optuna_trial.set_constraint(name, value)
        self._study.tell(trial.optuna_trial, verdict.score)

    @_errors_named
    def interrupt(self, trial: RunningTrial) -> None:
        """Tell a trial that the user stopped, and queue it again."""
        trial.optuna_trial.set_user_attr(attribute.STATE, TrialState.INTERRUPTED.value)
        self._end_and_requeue(trial.number)

    @_errors_named
    def abort(self, trial: RunningTrial, failure: Failure, duration_s: float) -> None:
        """Tell a trial that the environment ended, and queue it again."""
        self._write_outcome(trial, failure, duration_s)
        trial.optuna_trial.set_user_attr(attribute.STATE, TrialState.ABORTED.value)
        self._end_and_requeue(trial.number)

    def _write_outcome(self, trial: RunningTrial, outcome: Outcome, duration_s: float) -> None:
        trial.optuna_trial.set_user_attr(attribute.DURATION, round(duration_s, 3))
        for name, value in attribute.outcome_attributes(outcome).items():
            trial.optuna_trial.set_user_attr(name, value)
        path = self.trial_directory(trial.number) / "outcome.json"
        path.write_text(json.dumps(attribute.to_json(outcome), indent=2) + "\n", encoding="utf-8")

    @_errors_named
    def trial_directory(self, number: int) -> Path:
        """Where a trial writes; made if it is not there."""
        directory = self._trial_path(number)
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _trial_path(self, number: int) -> Path:
        return self.location.directory / "trials" / f"{number:04d}"

    @_errors_named
    def drop_queued(self) -> None:
        """Take the first queued trial out of the queue; it is not run."""
        trial = self._study.ask()
        trial.set_user_attr(attribute.STATE, TrialState.DROPPED.value)
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    # --- what a killed run left ---

    @_errors_named
    def left_processes(self) -> list[ProcessRecord]:
        """The servers of trials that a dead tuner was running."""
        return [
            attribute.from_json(t.user_attrs[attribute.PROCESS], ProcessRecord)
            for t in self._in_state(optuna.trial.TrialState.RUNNING)
            if attribute.PROCESS in t.user_attrs
        ]

    @_errors_named
    def left_trials(self) -> list[LeftTrial]:
        """Trials that a dead tuner was running.

        Only with the lock held: then nobody else can be running them.
        """
        study_id = self._storage.get_study_id_from_name(self.location.name)
        left = []
        for frozen in self._in_state(optuna.trial.TrialState.RUNNING):
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(
                study_id, frozen.number
            )
            trial = RunningTrial(frozen.number, optuna.Trial(self._study, trial_id))
            outcome = attribute.stored_outcome(frozen.user_attrs)
            duration_s = frozen.user_attrs.get(attribute.DURATION, 0.0)
            left.append(LeftTrial(trial, outcome, duration_s))
        return left

    def _end_and_requeue(self, number: int) -> None:
        """Queue first: killed in between, the trial is still known to be owed."""
        frozen = next(t for t in self._study.get_trials(deepcopy=False) if t.number == number)
        marks = frozen.user_attrs
        again = Queued(marks.get(attribute.PARAMS, {}), bool(marks.get(attribute.REFERENCE)))
        if again not in self._queued():
            encoded = marks.get(attribute.ENCODED, {})
            self.queue(again.params, encoded, is_reference=again.is_reference)
        self._study.tell(number, state=optuna.trial.TrialState.FAIL)

    def _in_state(self, state: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(state,))


def _with_budget(spec: StudySpec, stored: Mapping[str, Any]) -> StudySpec:
    """The command line may have set another budget than the file."""
    if _BUDGET not in stored:
        return spec
    return replace(spec, budget=attribute.from_json(stored[_BUDGET], BudgetSpec))


def _create(name: str, storage: optuna.storages.BaseStorage) -> optuna.Study:
    # Proposals come from `tuner.search`; what is asked for here was queued before.
    return optuna.create_study(
        study_name=name,
        storage=storage,
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(),
        load_if_exists=True,
    )
