"""The loop of a study: what is owed, what is next, one server life at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Protocol

from tuner.attempts import Attempts, Pause, tidy
from tuner.effects import no_effects
from tuner.engine.base import ConfigAnswer, ConfigCheck
from tuner.engine.process import reap
from tuner.errors import EnvironmentProblem, Interrupted, NoResult
from tuner.evaluate import Evaluator
from tuner.measuring.session import ClientTooSlow
from tuner.objective import judge
from tuner.records import StudyRecord, TrialRecord
from tuner.redact import redact_text
from tuner.retries import Retry, decide, ends_the_study
from tuner.search import Candidate, Search
from tuner.search.distributions import OptunaValue, encode
from tuner.space import Space
from tuner.stopping import Ending, broken, used_up
from tuner.storage import LeftTrial, Queued, RunningTrial, StudyStore
from tuner.study_problems import environment_problem, hopeless, unsaved
from tuner.types import (
    Blame,
    EngineConfig,
    Failure,
    FailureCause,
    JsonValue,
    Measurement,
    Outcome,
    Progress,
    Stage,
    StudySpec,
    Suggestion,
    Verdict,
)

REFUSALS_IN_A_ROW = 200
"""So many candidates that vLLM's own check refuses, one after another, end a study."""

TOO_SLOW_IN_A_ROW = 3
"""So many trials whose load the client cannot drive, with no measurement between them, end a
study: it is the machine then, or the load, and no single configuration."""


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
    """One run of a study whose store is open for writing and bound to `spec`.

    Args:
        pause: waits before a start is repeated.
    """

    def __init__(
        self,
        spec: StudySpec,
        store: StudyStore,
        evaluator: Evaluator,
        check: ConfigCheck,
        listener: Listener,
        *,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._spec = spec
        self._space = Space(spec)
        self._store = store
        self._evaluator = evaluator
        self._check = check
        self._listener = listener
        self._attempts = Attempts(store, evaluator, listener.notice, listener.progress, pause)
        self._finished: list[TrialRecord] = []  # the trials that this run has finished
        self._left_out: list[Queued] = []  # what the client was too slow for in this run
        self._too_slow = 0  # such trials since the last measurement
        self._answers: dict[str, ConfigAnswer] = {}
        self._told: set[tuple[str, str]] = set()
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
            ClientTooSlow: for several configurations in a row.
            EnvironmentProblem: a failure that no configuration can mend.
            InputError: the workload cannot be made with this model.
            Interrupted: the task was cancelled; the running trial is marked and queued again.
            NoResult: the constraints or vLLM leave nothing of the space, or all starts fail.
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
            elif queued in self._left_out:
                self._store.drop_queued()
                continue
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
        tidy(self._store.trial_directory(number))
        earlier = [attempt.cause for attempt in left.attempts]
        if isinstance(outcome, Failure) and ends_the_study(outcome, earlier):
            self._store.abort(left.trial, outcome, left.duration_s)
            self._listener.notice(f"trial {number} was stopped by {outcome.cause}; it is run again")
            return
        if outcome is None:
            self._store.interrupt(left.trial)
            self._listener.notice(f"trial {number} was interrupted; it is run again")
            return
        verdict = judge(outcome, self._spec.objective)
        self._store.finish(left.trial, outcome, verdict, left.duration_s)
        self._remember(next(t for t in self._store.trials() if t.number == number))
        self._listener.notice(
            f"trial {number} was over, only its record was not complete; it counts"
        )

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
                raise environment_problem(Failure(answer.cause, Stage.LAUNCH, answer.error))
            self._search.refuse(candidate)
        if self.record().best is not None:
            return None
        raise NoResult(
            f"vLLM refuses {REFUSALS_IN_A_ROW} configurations of this space in a row, "
            f"the last one so: {redact_text(answer.error)}",
            "`tuner check SPACE` shows the space; a line under `constraints:` can exclude these",
        )

    async def _ask(self, config: EngineConfig) -> ConfigAnswer:
        """What vLLM's check says; once more where a failure of the environment may pass."""
        if config.digest in self._answers:
            return self._answers[config.digest]
        earlier: list[FailureCause] = []
        answer = await self._check.check(config)
        while not answer.accepted and answer.cause.blame is Blame.ENVIRONMENT:
            decision = decide(Failure(answer.cause, Stage.LAUNCH, answer.error), earlier)
            if not isinstance(decision, Retry):
                break
            earlier.append(answer.cause)
            self._listener.notice(f"{answer.cause}: {redact_text(answer.error)}; asked again")
            await self._attempts.wait(decision)
            answer = await self._check.check(config)
        self._answers[config.digest] = answer
        return answer

    # --- one trial ---

    async def _run_queued(self, queued: Queued) -> None:
        suggestion, trial = await self._start(queued)
        started = time.monotonic()
        try:
            outcome = await self._outcome(suggestion, trial)
        except asyncio.CancelledError:
            self._give_back(trial)
            raise Interrupted from None
        except ClientTooSlow as problem:
            self._leave_out(queued, suggestion, problem, trial, time.monotonic() - started)
            return
        except BaseException:
            self._give_back(trial)
            raise
        if isinstance(outcome, Measurement):  # a failed start tells nothing of the client
            self._too_slow = 0
        self._end(trial, outcome, time.monotonic() - started)

    def _leave_out(
        self,
        queued: Queued,
        suggestion: Suggestion,
        problem: ClientTooSlow,
        trial: RunningTrial,
        duration_s: float,
    ) -> None:
        """Go on without a configuration that the client cannot load; it is not to blame."""
        self._too_slow += 1
        self._left_out.append(queued)
        self._search.leave_out(suggestion.config)
        self._store.abort(
            trial, Failure(FailureCause.UNKNOWN, Stage.LOAD, problem.message), duration_s
        )
        if self._too_slow >= TOO_SLOW_IN_A_ROW:
            raise problem
        self._listener.notice(
            f"trial {trial.number} does not count, and its configuration is left out of this run: "
            f"{problem.message}"
        )

    def _give_back(self, trial: RunningTrial) -> None:
        """Queue a trial again; where that cannot be written, the next run finds it running."""
        with contextlib.suppress(EnvironmentProblem):
            self._store.interrupt(trial)

    def _end(self, trial: RunningTrial, outcome: Outcome, duration_s: float) -> None:
        if isinstance(outcome, Failure):
            earlier = [attempt.cause for attempt in self._store.attempts(trial)]
            if ends_the_study(outcome, earlier):
                with contextlib.suppress(EnvironmentProblem):  # the disk may be what is full
                    self._store.abort(trial, outcome, duration_s)
                folder = self._store.trial_directory(trial.number)
                raise environment_problem(outcome, folder)
        verdict = judge(outcome, self._spec.objective)
        try:
            self._store.finish(trial, outcome, verdict, duration_s)
        except EnvironmentProblem as problem:
            raise unsaved(problem, trial.number, outcome, verdict) from problem
        study = self.record()
        finished = next(t for t in study.trials if t.number == trial.number)
        self._remember(finished)
        self._listener.trial_finished(finished, study)
        self._tell_effects(finished, study)
        self._finished.append(finished)
        row = broken(self._finished, ever_measured=study.best is not None)
        if row is not None:
            raise hopeless(row, study)

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
        """What vLLM's check refuses is not launched."""
        answer = await self._ask(suggestion.config)
        if not answer.accepted:
            return Failure(answer.cause, Stage.LAUNCH, answer.error)
        return await self._attempts.run(suggestion.config, trial, self._incumbent())

    def _incumbent(self) -> float | None:
        """The low end of the best score so far, which another has to reach to be of interest.

        Of a measurement without an interval (a ramp, few requests, `max_rate`) its score.
        """
        best = self.record().best
        if best is None or best.measurement is None:
            return None
        interval = best.measurement.interval
        return best.score if interval is None else interval.low

    def _tell_effects(self, finished: TrialRecord, study: StudyRecord) -> None:
        """Parameters that were accepted and did nothing; each finding once."""
        for effect in no_effects(finished, study.trials):
            if effect.key not in self._told:
                self._told.add(effect.key)
                self._listener.notice(f"trial {finished.number}: {effect.text}")
