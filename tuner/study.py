"""The loop of a study: what is owed, what is next, one server life at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from tuner.engine.base import ConfigAnswer, ConfigCheck, LaunchObserver
from tuner.engine.process import reap
from tuner.errors import EnvironmentProblem, Interrupted, NoResult
from tuner.evaluate import Evaluator
from tuner.objective import judge
from tuner.records import StudyRecord, TrialRecord
from tuner.search import Candidate, Search
from tuner.search.distributions import OptunaValue, encode
from tuner.space import Space
from tuner.stopping import Ending, used_up
from tuner.storage import LeftTrial, Queued, RunningTrial, StudyStore
from tuner.types import (
    Blame,
    EngineConfig,
    Failure,
    FailureCause,
    JsonValue,
    Outcome,
    Progress,
    Stage,
    StudySpec,
    Suggestion,
    Verdict,
)

REFUSALS_IN_A_ROW = 200
"""So many candidates that vLLM's own check refuses, one after another, end a study."""

_TRANSIENT = frozenset(
    {
        FailureCause.PORT_IN_USE,  # someone took the free port between our look and vLLM's bind
        FailureCause.DEVICE_BUSY,
        FailureCause.MEMORY_BASELINE_MOVED,
    }
)
_ARGPARSE_EXIT_CODE = 2


class Listener(Protocol):
    """Whom a running study tells what, for the person at the keyboard."""

    def notice(self, text: str) -> None:
        """Something worth a line."""

    def trial_started(self, suggestion: Suggestion, study: StudyRecord) -> None:
        """A server is about to be started."""

    def progress(self, progress: Progress) -> None:
        """Several times a second while something goes on."""

    def trial_finished(self, trial: TrialRecord, study: StudyRecord) -> None:
        """A trial was measured, or failed by its configuration."""


class StudyLoop:
    """One run of a study whose store is open for writing and bound to `spec`."""

    def __init__(
        self,
        spec: StudySpec,
        store: StudyStore,
        evaluator: Evaluator,
        check: ConfigCheck,
        listener: Listener,
    ) -> None:
        self._spec = spec
        self._space = Space(spec)
        self._store = store
        self._evaluator = evaluator
        self._check = check
        self._listener = listener
        self._answers: dict[str, ConfigAnswer] = {}
        trials = store.trials()
        self._search = Search(
            self._space, spec.search, seen=len(trials), budget_trials=spec.budget.trials
        )
        for trial in trials:
            self._remember(trial)

    def record(self) -> StudyRecord:
        """The study as it stands."""
        return self._store.read(lambda _text, _path: self._spec)

    async def run(self) -> Ending:
        """Go on until the budget or the space is used up.

        Raises:
            EnvironmentProblem: a failure that no configuration can mend.
            InputError: the workload cannot be made with this model.
            Interrupted: the task was cancelled; the running trial is marked and queued again.
            NoResult: the constraints or vLLM leave nothing of the space.
        """
        self._store.mark_finished(False)
        await self._recover()
        while (ending := used_up(self.record(), self._spec.budget)) is None:
            queued = self._store.next_queued()
            if queued is None:
                candidate = await self._next_candidate()
                if candidate is None:
                    ending = Ending.EXHAUSTED
                    break
                self._store.queue(candidate.params, encode(candidate.params))
                queued = Queued(candidate.params, is_reference=False)
            await self._run_queued(queued)
        self._store.mark_finished(True)
        return ending

    # --- what is owed ---

    async def _recover(self) -> None:
        """End what a killed run left behind, and make sure that the reference is run."""
        for process in self._store.left_processes():
            ended = await asyncio.to_thread(reap, process)
            if ended:
                self._listener.notice(
                    f"ended the server that a killed run left behind (process {process.pgid})"
                )
        for left in self._store.left_trials():
            self._end_left(left)
        self._drop_outdated()
        queued = self._store.next_queued()
        known = any(t.is_reference and t.state.finished for t in self._store.trials())
        if not known and not (queued is not None and queued.is_reference):
            params, _ = self._space.reference()
            self._store.queue(params, self._encodable(params), is_reference=True)

    def _end_left(self, left: LeftTrial) -> None:
        """Finish the record of a trial that was over, run the others again."""
        number, outcome = left.trial.number, left.outcome
        if outcome is None or (isinstance(outcome, Failure) and _ends_the_study(outcome)):
            self._store.interrupt(left.trial)
            self._listener.notice(f"trial {number} was interrupted; it is run again")
            return
        verdict = judge(outcome, self._spec.objective)
        self._store.finish(left.trial, outcome, verdict, left.duration_s)
        self._remember(next(t for t in self._store.trials() if t.number == number))
        self._listener.notice(f"trial {number} was over when the tuner was killed; it counts")

    def _drop_outdated(self) -> None:
        """Take out of the queue what the space file, edited since, does not ask for any more."""
        while (queued := self._store.next_queued()) is not None:
            if queued.is_reference:
                if queued.params == self._space.reference()[0]:
                    return
            elif self._encodable(queued.params).keys() == self._search.distributions.keys():
                return
            self._store.drop_queued()

    def _encodable(self, params: Mapping[str, JsonValue]) -> dict[str, OptunaValue]:
        """Those parameters that are searched and lie within the space."""
        inside = {
            name: value
            for name, value in params.items()
            if name in self._search.distributions and self._space.contains(name, value)
        }
        return encode(inside)

    def _remember(self, trial: TrialRecord) -> None:
        """Let the search learn from a finished trial."""
        if trial.score is None or not trial.state.finished:
            return
        verdict = Verdict(trial.score, trial.constraints)
        if trial.is_reference:
            # It leaves parameters unset; what they are in effect, vLLM has told.
            params, config = self._space.reference()
            self._search.tell({**trial.effective, **params}, config, verdict)
        else:
            self._search.tell(trial.params, self._space.decode(trial.params), verdict)

    # --- what is next ---

    async def _next_candidate(self) -> Candidate | None:
        """A candidate that vLLM's own check takes.

        A refused start costs ten seconds and more, the question milliseconds.
        """
        for _ in range(REFUSALS_IN_A_ROW):
            candidate = self._search.propose()
            if candidate is None:
                return None
            answer = await self._ask(candidate.config)
            if answer.accepted:
                return candidate
            if answer.cause.blame is Blame.ENVIRONMENT:
                raise _environment_problem(Failure(answer.cause, Stage.LAUNCH, answer.error))
            self._search.refuse(candidate)
        if self.record().best is not None:
            return None
        raise NoResult(
            f"vLLM refuses {REFUSALS_IN_A_ROW} configurations of this space in a row, "
            f"the last one so: {answer.error}",
            "`tuner check SPACE` shows the space; a line under `constraints:` can exclude these",
        )

    async def _ask(self, config: EngineConfig) -> ConfigAnswer:
        if config.digest not in self._answers:
            self._answers[config.digest] = await self._check.check(config)
        return self._answers[config.digest]

    # --- one trial ---

    async def _run_queued(self, queued: Queued) -> None:
        suggestion, trial = await self._start(queued)
        started = time.monotonic()
        try:
            outcome = await self._outcome(suggestion, trial)
        except asyncio.CancelledError:
            self._store.interrupt(trial)
            raise Interrupted from None
        except BaseException:
            self._store.interrupt(trial)
            raise
        duration_s = time.monotonic() - started
        if isinstance(outcome, Failure) and _ends_the_study(outcome):
            self._store.abort(trial, outcome, duration_s)
            raise _environment_problem(outcome)
        verdict = judge(outcome, self._spec.objective)
        self._store.finish(trial, outcome, verdict, duration_s)
        study = self.record()
        finished = next(t for t in study.trials if t.number == trial.number)
        self._remember(finished)
        self._listener.trial_finished(finished, study)

    async def _start(self, queued: Queued) -> tuple[Suggestion, RunningTrial]:
        params, config = (
            self._space.reference()
            if queued.is_reference
            else (queued.params, self._space.decode(queued.params))
        )
        answer = await self._ask(config)
        encoded = self._encodable(params)
        trial = self._store.start({name: self._search.distributions[name] for name in encoded})
        suggestion = Suggestion(trial.number, params, config, queued.is_reference)
        command = self._evaluator.command_line(config)
        self._store.describe(trial, suggestion, command, answer.resolved)
        self._listener.trial_started(suggestion, self.record())
        return suggestion, trial

    async def _outcome(self, suggestion: Suggestion, trial: RunningTrial) -> Outcome:
        """The outcome of a launch, repeated once where chance was against it."""
        answer = await self._ask(suggestion.config)
        if not answer.accepted:
            return Failure(answer.cause, Stage.LAUNCH, answer.error)
        outcome = await self._evaluate(suggestion, trial)
        if isinstance(outcome, Failure) and outcome.cause in _TRANSIENT:
            self._listener.notice(f"{outcome.cause}: {outcome.line}; trying once more")
            outcome = await self._evaluate(suggestion, trial)
        return outcome

    async def _evaluate(self, suggestion: Suggestion, trial: RunningTrial) -> Outcome:
        return await self._evaluator.evaluate(
            suggestion.config,
            self._store.trial_directory(trial.number),
            LaunchObserver(
                on_spawn=lambda process: self._store.record_process(trial, process),
                on_progress=self._listener.progress,
            ),
        )


def _ends_the_study(failure: Failure) -> bool:
    """Whether no other configuration can do better."""
    if failure.blame is Blame.ENVIRONMENT:
        return True
    if failure.cause is FailureCause.BAD_CONFIG:
        # A flag that vLLM does not have, where it could not be asked for its flags before.
        return failure.exit_code == _ARGPARSE_EXIT_CODE
    # Ended before vLLM said a word: it is not vLLM, or it is not let run (docker, permissions).
    is_mute = failure.stage is Stage.LAUNCH and failure.memory.vllm_version is None
    return failure.cause is FailureCause.UNKNOWN and is_mute and failure.exit_code is not None


def _environment_problem(failure: Failure) -> EnvironmentProblem:
    where = f"its log: {failure.log_path}; " if failure.log_path is not None else ""
    return EnvironmentProblem(
        f"the server cannot run here ({failure.cause}): {failure.line}",
        f"{where}mend it and run the same command again: the study goes on where it stopped",
    )
