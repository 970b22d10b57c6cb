"""One study's database, open for writing: a trial's life, and what a killed run left."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna

from tuner.engine.base import ProcessRecord
from tuner.errors import EnvironmentProblem, InputError
from tuner.records import Attempt, TrialState
from tuner.redact import redact_argv, redact_settings
from tuner.storage import attributes as attribute
from tuner.storage import files, outcome_file
from tuner.storage import study_attributes as names
from tuner.storage.attributes import masked_text
from tuner.storage.location import StudyLocation
from tuner.storage.lock import StudyLock, is_gone, this_process
from tuner.storage.opening import UNREADABLE, damaged, open_database, read_through
from tuner.storage.problems import storage_errors
from tuner.storage.reading import StudyReader, errors_named
from tuner.storage.trials import LeftTrial, Queued, RunningTrial
from tuner.types import Failure, JsonValue, Outcome, StudySpec, Suggestion, Verdict


class StudyStore(StudyReader):
    """One study's database, open for reading, or for writing with its lock held."""

    def __init__(
        self,
        location: StudyLocation,
        storage: optuna.storages.BaseStorage,
        study: optuna.Study,
        lock: StudyLock,
    ) -> None:
        super().__init__(location, storage, study, lock)
        self._claimed = False
        self._made: Path | None = None

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
            except UNREADABLE as error:
                raise damaged(location, error) from error
            read_through(location, study)
            store = cls(location, storage, study, StudyLock(location.lock_path))
            store._check_format(writing=False)
            return store

    @classmethod
    def open_for_writing(cls, location: StudyLocation) -> StudyStore:
        """Open a study, made if it is not there, and take its lock until `close`.

        Raises:
            InputError: a newer or an older tuner made it.
            EnvironmentProblem: it is locked, or the database cannot be used.
        """
        with storage_errors(location):
            files.make_folder(location.directory)
            lock = StudyLock(location.lock_path)
            lock.acquire()
            try:
                database = location.sqlite_path
                was_there = database is None or database.exists()
                storage = open_database(location, must_exist=False)
                study = _create(location, storage)
                read_through(location, study)
                store = cls(location, storage, study, lock)
                store._made = None if was_there else database
                store._check_format(writing=True)
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
        return cls(location, storage, _create(location, storage), StudyLock(location.lock_path))

    def _claim(self) -> None:
        """Where a database has no file to lock, its study names who works on it."""
        if self.location.sqlite_path is not None:
            return
        owner = self._study.user_attrs.get(names.OWNER)
        if owner is not None and not is_gone(owner):
            raise EnvironmentProblem(
                f"another tuner works on this study (process {owner['pid']} on {owner['host']})",
                "wait for it, stop it with Ctrl-C, or start another study with --study NAME; "
                "if it was killed, run the same command on that machine",
            )
        self._study.set_user_attr(names.OWNER, this_process())
        self._claimed = True

    def close(self) -> None:
        """Close the database and give the lock back.

        Raises:
            EnvironmentProblem: a database server is gone; the lock is given back all the same.
        """
        try:
            with storage_errors(self.location):
                if self._claimed:
                    self._study.set_user_attr(names.OWNER, None)
                if isinstance(self._storage, optuna.storages.RDBStorage):
                    self._storage.remove_session()
                    self._storage.engine.dispose()
        finally:
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

    @errors_named
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
        study.set_user_attr(names.SCHEMA, names.FORMAT)
        known = {name: value for name, value in fingerprint.items() if value is not None}
        # What could not be told this time (no vLLM to ask) is still what it was.
        study.set_user_attr(names.FINGERPRINT, {**fingerprint, **self.fingerprint, **known})
        study.set_user_attr(names.VERSIONS, dict(versions))
        study.set_user_attr(names.SPEC_PATH, str(spec.path))
        study.set_user_attr(names.BUDGET, attribute.to_json(spec.budget))
        text = masked_text(spec)
        study.set_user_attr(names.SPEC, text)
        self._bound = True
        files.write_text(self.location.directory / "space.yaml", text)

    @errors_named
    def mark_finished(self, finished: bool) -> None:
        """Remember whether the budget is used up."""
        self._study.set_user_attr(names.FINISHED, finished)

    # --- the queue ---

    @errors_named
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
        self._queue(Queued(params, is_reference), encoded, {})

    def _queue(self, queued: Queued, encoded: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        marks = {
            attribute.PARAMS: dict(queued.params),
            attribute.ENCODED: dict(encoded),
            attribute.REFERENCE: queued.is_reference,
            **kept,
        }
        self._study.enqueue_trial(dict(encoded), user_attrs=marks)

    @errors_named
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

    @errors_named
    def start(
        self, distributions: Mapping[str, optuna.distributions.BaseDistribution]
    ) -> RunningTrial:
        """Turn the first queued trial into a running one.

        Args:
            distributions: of exactly the parameters that it was queued with.
        """
        trial = self._study.ask(dict(distributions))
        return RunningTrial(trial.number, trial)

    @errors_named
    def describe(
        self,
        trial: RunningTrial,
        suggestion: Suggestion,
        command: list[str],
        effective: Mapping[str, JsonValue],
    ) -> Path:
        """Write down what is about to run; returns the trial's folder, which exists."""
        directory = self.trial_directory(trial.number)
        outcome_file.forget(directory)
        trial.optuna_trial.set_user_attr(attribute.DIRECTORY, str(directory))
        trial.optuna_trial.set_user_attr(attribute.CONFIG, attribute.config_json(suggestion.config))
        trial.optuna_trial.set_user_attr(attribute.COMMAND, redact_argv(command))
        trial.optuna_trial.set_user_attr(attribute.EFFECTIVE, redact_settings(effective))
        return directory

    @errors_named
    def record_process(self, trial: RunningTrial, process: ProcessRecord) -> None:
        """Write down which processes belong to a running trial."""
        trial.optuna_trial.set_user_attr(attribute.PROCESS, attribute.to_json(process))

    @errors_named
    def attempts(self, trial: RunningTrial) -> tuple[Attempt, ...]:
        """The failed starts of this trial's configuration so far."""
        return attribute.stored_attempts(trial.optuna_trial.user_attrs)

    @errors_named
    def record_attempt(self, trial: RunningTrial, attempt: Attempt) -> None:
        """Write down a failed start that is followed by another one."""
        attempts = (*self.attempts(trial), attempt)
        trial.optuna_trial.set_user_attr(attribute.ATTEMPTS, attribute.attempts_json(attempts))

    @errors_named
    def finish(
        self, trial: RunningTrial, outcome: Outcome, verdict: Verdict, duration_s: float
    ) -> None:
        """Tell a trial that was measured, or that failed by its configuration.

        Raises:
            EnvironmentProblem: the database cannot be written; if the trial's folder can, the
                outcome is in its `outcome.json`, and `left_trials` finds it there.
        """
        problem = self._write_outcome(trial, outcome, duration_s)
        state = TrialState.MEASURED if verdict.feasible else TrialState.INFEASIBLE
        trial.optuna_trial.set_user_attr(attribute.STATE, state.value)
        for name, value in verdict.constraints.items():
            if name not in trial.optuna_trial.constraints:  # Optuna takes each only once
                trial.optuna_trial.set_constraint(name, value)
        self._study.tell(trial.optuna_trial, verdict.score)
        if problem is not None:
            raise problem  # the study has it, but the next one may find no room

    @errors_named
    def interrupt(self, trial: RunningTrial) -> None:
        """Tell a trial that the user stopped, and queue it again, its failed starts counted."""
        trial.optuna_trial.set_user_attr(attribute.STATE, TrialState.INTERRUPTED.value)
        self._end_and_requeue(trial.number, keep=(attribute.ATTEMPTS,))

    @errors_named
    def abort(self, trial: RunningTrial, failure: Failure, duration_s: float) -> None:
        """Tell a trial that the environment ended, and queue it again."""
        self._write_outcome(trial, failure, duration_s)
        trial.optuna_trial.set_user_attr(attribute.STATE, TrialState.ABORTED.value)
        self._end_and_requeue(trial.number)

    def _write_outcome(
        self, trial: RunningTrial, outcome: Outcome, duration_s: float
    ) -> OSError | None:
        """To the file first: where the database is locked or full, that is all there is."""
        problem = None
        try:
            outcome_file.write(self.trial_directory(trial.number), outcome, duration_s)
        except OSError as error:
            problem = error
        trial.optuna_trial.set_user_attr(attribute.DURATION, round(duration_s, 3))
        for name, value in attribute.outcome_attributes(outcome).items():
            trial.optuna_trial.set_user_attr(name, value)
        return problem

    @errors_named
    def trial_directory(self, number: int) -> Path:
        """Where a trial writes; made if it is not there."""
        directory = self._trial_path(number)
        files.make_folder(directory)
        return directory

    @errors_named
    def drop_queued(self) -> None:
        """Take the first queued trial out of the queue; it is not run."""
        trial = self._study.ask()
        trial.set_user_attr(attribute.STATE, TrialState.DROPPED.value)
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    # --- what a killed run left ---

    @errors_named
    def left_processes(self) -> list[ProcessRecord]:
        """The servers of trials that a dead tuner was running."""
        return [
            attribute.from_json(t.user_attrs[attribute.PROCESS], ProcessRecord)
            for t in self._in_state(optuna.trial.TrialState.RUNNING)
            if attribute.PROCESS in t.user_attrs
        ]

    @errors_named
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
            outcome, duration_s = self._left_outcome(frozen)
            attempts = attribute.stored_attempts(frozen.user_attrs)
            left.append(LeftTrial(trial, outcome, duration_s, attempts))
        return left

    def _left_outcome(self, frozen: optuna.trial.FrozenTrial) -> tuple[Outcome | None, float]:
        """From the database, else from the file that is written before."""
        stored = attribute.stored_outcome(frozen.user_attrs)
        if stored is not None:
            return stored, frozen.user_attrs.get(attribute.DURATION, 0.0)
        if attribute.EFFECTIVE not in frozen.user_attrs:  # not begun: the file is another's
            return None, 0.0
        return outcome_file.read(self._trial_path(frozen.number)) or (None, 0.0)

    def _end_and_requeue(self, number: int, keep: tuple[str, ...] = ()) -> None:
        """Queue first: killed in between, the trial is still known to be owed.

        Args:
            keep: attributes that the queued trial begins with.
        """
        frozen = next(t for t in self._study.get_trials(deepcopy=False) if t.number == number)
        marks = frozen.user_attrs
        again = Queued(marks.get(attribute.PARAMS, {}), bool(marks.get(attribute.REFERENCE)))
        if again not in self._queued():
            encoded = marks.get(attribute.ENCODED, {})
            kept = {name: marks[name] for name in keep if name in marks}
            self._queue(again, encoded, kept)
        self._study.tell(number, state=optuna.trial.TrialState.FAIL)


def _create(location: StudyLocation, storage: optuna.storages.BaseStorage) -> optuna.Study:
    # Proposals come from `tuner.search`; what is asked for here was queued before.
    try:
        return optuna.create_study(
            study_name=location.name,
            storage=storage,
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(),
            load_if_exists=True,
        )
    except UNREADABLE as error:
        raise damaged(location, error) from error
