"""The search: proposals that are new, allowed, and worth a launch.

The sampler does not work on the study's database but on a mirror of it in memory. Thereby
it can be told, without a launch and without a row in the database, of what needs none: a
point that a constraint of the space file excludes, that vLLM's own check refuses, or that
was measured already. The database holds launches and nothing else, and the reference, which
leaves parameters unset, does not take them out of the sampler's model (samplers model only
what every trial has).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import optuna

from tuner.errors import NoResult
from tuner.objective import refused
from tuner.search.distributions import OptunaValue, decode, distribution, encode
from tuner.search.points import random_points
from tuner.search.samplers import make_sampler, resolve
from tuner.space import Space
from tuner.types import EngineConfig, JsonValue, SearchSpec, Verdict

PROPOSALS_PER_TRIAL = 100
"""How often a sampler may propose what is known or excluded before points are drawn at
random: a sampler may keep to a corner that the constraints exclude."""

ENUMERATE_UP_TO = 20_000
"""Spaces up to this size are listed when the sampler is stuck, to know what is left."""

RANDOM_POINTS = 500
"""Random points looked at in a larger space."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point that was not measured and that no constraint of the space file excludes."""

    params: Mapping[str, JsonValue]
    config: EngineConfig


class Search:
    """Proposes candidates and learns from verdicts.

    Args:
        seen: how many trials the study has; a resumed search must not repeat its draws.
        budget_trials: for the choice of `auto`.
    """

    def __init__(
        self, space: Space, spec: SearchSpec, *, seen: int, budget_trials: int | None
    ) -> None:
        self._space = space
        self._knobs = tuple(space.knobs.values())
        self.sampler_kind = resolve(spec.sampler, self._knobs, budget_trials)
        seed = int(np.random.SeedSequence([spec.seed, seen]).generate_state(1)[0])
        self._sampler = make_sampler(self.sampler_kind, seed)
        self._random = np.random.default_rng(seed)
        self.distributions = {knob.name: distribution(knob) for knob in self._knobs}
        self._mirror = optuna.create_study(direction="maximize", sampler=self._sampler)
        self._known: set[str] = set()  # digests of what is not to be proposed again
        self._scores: list[float] = []  # of what may win

    # --- learning ---

    def tell(self, params: Mapping[str, JsonValue], config: EngineConfig, verdict: Verdict) -> None:
        """Learn what a configuration is worth.

        Parameters that lie outside of the space, or that are not set, cannot be learned
        from; the configuration is remembered all the same.
        """
        self._known.add(config.digest)
        if set(params) >= set(self.distributions) and all(
            self._space.contains(name, params[name]) for name in self.distributions
        ):
            self._tell_mirror(params, verdict.score, verdict.constraints)

    def refuse(self, candidate: Candidate) -> None:
        """Learn that vLLM's own check does not take a candidate."""
        self._known.add(candidate.config.digest)
        self._tell_mirror(candidate.params, 0.0, refused())

    def leave_out(self, config: EngineConfig) -> None:
        """Propose a configuration no more, of which nothing could be learned."""
        self._known.add(config.digest)

    def _tell_mirror(
        self, params: Mapping[str, JsonValue], score: float, constraints: Mapping[str, float]
    ) -> None:
        if all(value <= 0 for value in constraints.values()):
            self._scores.append(score)
        elif self._scores:
            # A model of the score must not take infeasible points for slow ones: they are
            # told with the mean, and their constraints say the rest.
            score = sum(self._scores) / len(self._scores)
        values = {name: params[name] for name in self.distributions}
        self._mirror.enqueue_trial(encode(values))
        self._mirror.sampler = optuna.samplers.RandomSampler()  # no model is fitted for this
        try:
            trial = self._mirror.ask(self.distributions)
        finally:
            self._mirror.sampler = self._sampler
        _tell(self._mirror, trial, score, constraints)

    # --- proposing ---

    def propose(self) -> Candidate | None:
        """The next candidate, or None when every point of the space is known.

        Raises:
            NoResult: the constraints leave nothing of the space.
        """
        for _ in range(PROPOSALS_PER_TRIAL):
            trial = self._ask()
            candidate = self._candidate(trial.params)
            # What the sampler is to learn of it is told later, under these parameters; what a
            # constraint excludes is no lesson for its model, only another draw.
            self._mirror.tell(trial, state=optuna.trial.TrialState.FAIL)
            if self._is_new(candidate):
                return candidate
            if candidate.config.digest in self._known and self._sampler_repeats():
                break
        return self._any_other()

    def _ask(self) -> optuna.Trial:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return self._mirror.ask(self.distributions)

    def _sampler_repeats(self) -> bool:
        """Whether the last proposals were all of points that are known: a model that has
        converged proposes its optimum again and again."""
        last = self._mirror.get_trials(deepcopy=False)[-10:]
        return len(last) == 10 and all(t.state is optuna.trial.TrialState.FAIL for t in last)

    def _any_other(self) -> Candidate | None:
        """A random point of those that are left."""
        size = self._space.size()
        if size is not None and size <= ENUMERATE_UP_TO:
            return self._any_listed()
        drawn = random_points(self._space, RANDOM_POINTS, self._random)
        if not drawn:
            raise NoResult(
                "no random point of the search space satisfies the constraints",
                "loosen `constraints:` or widen the ranges of `search_space:`",
            )
        candidates = (Candidate(params, self._space.decode(params)) for params in drawn)
        return next((c for c in candidates if self._is_new(c)), None)

    def _any_listed(self) -> Candidate | None:
        allowed = [p for p in self._space.points() if self._space.violated(p) is None]
        if not allowed:
            raise NoResult(
                "no point of the search space satisfies the constraints",
                "loosen `constraints:` or widen the ranges of `search_space:`",
            )
        for index in self._random.permutation(len(allowed)):
            params = allowed[int(index)]
            candidate = Candidate(params, self._space.decode(params))
            if self._is_new(candidate):
                return candidate
        return None

    def _is_new(self, candidate: Candidate) -> bool:
        known = candidate.config.digest in self._known
        return not known and self._space.violated(candidate.params) is None

    def _candidate(self, stored: Mapping[str, OptunaValue]) -> Candidate:
        params = self._space.normalise(decode(self._knobs, stored))
        return Candidate(params, self._space.decode(params))


def _tell(
    study: optuna.Study, trial: optuna.Trial, score: float, constraints: Mapping[str, float]
) -> None:
    for name, value in constraints.items():
        trial.set_constraint(name, value)
    study.tell(trial, score)
