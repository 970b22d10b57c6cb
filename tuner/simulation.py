"""Whole studies on the simulated engine and virtual time: the same loop, no server, no sleep."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tuner.engine.base import ConfigAnswer, ConfigCheck, LaunchObserver
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.profiles import DeviceProfile, ModelProfile
from tuner.engine.simulated.server.environment import stand_in
from tuner.engine.simulated.server.models import model_profile
from tuner.engine.simulated.settings import settings_from
from tuner.engine.simulated.virtual import evaluate_virtually
from tuner.errors import InputError
from tuner.evaluate import Evaluator
from tuner.objective import judge
from tuner.records import StudyRecord, TrialRecord
from tuner.search import neighbours, random_points
from tuner.space import Space
from tuner.storage import StudyStore
from tuner.study import StudyLoop
from tuner.types import (
    ENV_PREFIX,
    EngineConfig,
    JsonValue,
    Metric,
    Outcome,
    Progress,
    StudySpec,
    Suggestion,
)

ENUMERATE_UP_TO = 1_500
"""Spaces up to this size are evaluated point by point to find the optimum."""

SAMPLES = 800
CLIMBS = 5
"""In a larger space: so many random points, and a climb from the best few of them."""


NEAR = 0.95
"""A configuration this close to the optimum counts as found."""

MILESTONES = (5, 10, 20, 30, 50, 100)
"""After how many trials the table looks."""


@dataclass(frozen=True, slots=True)
class Played:
    """What a space file's server would play.

    Attributes:
        noise: whether launches and steps vary.
    """

    device: DeviceProfile
    model: ModelProfile
    noise: bool = True


def played(spec: StudySpec) -> Played:
    """What `server.model` and `server.env` (SIMULATED_DEVICE, SIMULATED_MODEL) name.

    Raises:
        InputError: there is no such profile, or the load is none that is simulated.
    """
    _must_be_one_load(spec)
    for knob in spec.search_space:
        if knob.name.startswith(f"{ENV_PREFIX}SIMULATED_"):
            raise InputError(
                f"`{knob.name}` cannot be searched here: a simulated study plays one device "
                "and one model",
                "fix it under `server: env:`, or use `tuner run`",
            )
    environment = stand_in(spec.server.env)
    if environment.fault:
        raise InputError(
            "faults happen to servers, and here is none",
            "remove SIMULATED_FAULT, or use `tuner run`",
        )
    name = environment.model or spec.server.model
    model = model_profile(name)
    if model is None:
        raise InputError(
            f"there is no profile for the model {name}",
            "name one with SIMULATED_MODEL under `server: env:` "
            "(`python -m tuner.engine.simulated --help` lists them)",
        )
    return Played(environment.device, model, environment.noise)


def _must_be_one_load(spec: StudySpec) -> None:
    """On virtual time a trial is one load, driven from its first request to its last."""
    if spec.objective.maximize is Metric.MAX_RATE:
        raise InputError(
            "`maximize: max_rate` is not simulated: it needs a search for the load in each trial",
            "use `maximize: goodput` with the same `slo:` here, or `tuner run`",
        )
    if spec.workload.levels:
        raise InputError(
            "several levels of load are not simulated: a trial is one load here",
            "name one `concurrency:` or `request_rate:`, or use `tuner run`",
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """One simulated study.

    Attributes:
        worth: after each trial, the score without noise of the configuration that the tuner
            would have handed out then; 0 while it had none.
        failed: how many trials could not serve.
    """

    seed: int
    worth: tuple[float, ...]
    failed: int


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best of the space without noise, as far as it was found."""

    params: Mapping[str, JsonValue]
    score: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What simulated studies showed.

    Attributes:
        traces: one a seed.
    """

    spec: StudySpec
    optimum: Optimum
    traces: Sequence[Trace]

    def share_after(self, trials: int) -> list[float]:
        """Of each study: worth of what it would hand out after so many trials, as a share of
        the optimum's; a study that ended earlier counts with its end."""
        return [
            trace.worth[min(trials, len(trace.worth)) - 1] / self.optimum.score
            for trace in self.traces
            if trace.worth
        ]

    @property
    def milestones(self) -> list[int]:
        """After how many trials to look."""
        longest = max((len(trace.worth) for trace in self.traces), default=0)
        return [*(m for m in MILESTONES if m < longest), longest]

    @property
    def trials_to_near(self) -> list[int | None]:
        """Of each study: after how many trials it was near the optimum; None if never."""
        goal = NEAR * self.optimum.score
        return [
            next((n for n, worth in enumerate(trace.worth, 1) if worth >= goal), None)
            for trace in self.traces
        ]

    @property
    def median_trials_to_near(self) -> float | None:
        """Over all studies, those that never came near as the worst; None if that is most."""
        never = float("inf")
        median = statistics.median(never if n is None else n for n in self.trials_to_near)
        return None if median == never else median


class VirtualEvaluator:
    """An `Evaluator` and a `ConfigCheck` without a server."""

    def __init__(self, spec: StudySpec, seed: int) -> None:
        self._spec = spec
        self._played = played(spec)
        self._seed = seed
        self._launches = 0

    def command_line(self, config: EngineConfig) -> list[str]:
        """See `tuner.evaluate.Evaluator`; nothing is started."""
        return ["simulated", self._played.model.name, config.digest]

    async def evaluate(
        self,
        config: EngineConfig,
        trial_dir: Path,
        observer: LaunchObserver,
        incumbent: float | None = None,
    ) -> Outcome:
        """See `tuner.evaluate.Evaluator`; virtual time is cheap, nothing ends early."""
        del trial_dir, observer, incumbent
        self._launches += 1
        return self.outcome(config, launch=self._launches, noise=True)

    async def check(self, config: EngineConfig) -> ConfigAnswer:
        """See `tuner.engine.base.ConfigCheck`."""
        settings = settings_from(config.args, config.env, self._played.model, self._played.device)
        if isinstance(settings, StartFailure):
            return ConfigAnswer(accepted=False, error=settings.cause.value, cause=settings.cause)
        return ConfigAnswer(accepted=True)

    def outcome(self, config: EngineConfig, *, launch: int, noise: bool) -> Outcome:
        """The outcome of one launch; without noise also where the space file says so."""
        return evaluate_virtually(
            config,
            self._spec.workload,
            model=self._played.model,
            device=self._played.device,
            seed=self._seed,
            launch=launch,
            noise=noise and self._played.noise,
            slo=self._spec.objective.slo,
        )

    def worth(self, config: EngineConfig) -> float:
        """The score without noise; 0 for what may not win."""
        verdict = judge(self.outcome(config, launch=0, noise=False), self._spec.objective)
        return verdict.score if verdict.feasible else 0.0


def simulate(spec: StudySpec, seed: int) -> Trace:
    """Run one whole study; `seed` sets the search's draws and the engine's noise."""
    spec = replace(spec, search=replace(spec.search, seed=seed))
    evaluator = VirtualEvaluator(spec, seed)
    trials = run_in_memory(spec, evaluator, evaluator)
    return Trace(
        seed=seed,
        worth=_worth_of_incumbents(evaluator, Space(spec), trials),
        failed=sum(t.failure is not None for t in trials),
    )


def run_in_memory(spec: StudySpec, evaluator: Evaluator, check: ConfigCheck) -> list[TrialRecord]:
    """The finished trials of a study by the tuner's own loop, without a database."""
    with tempfile.TemporaryDirectory(prefix="tuner-simulate-") as folder:
        store = StudyStore.in_memory(spec.name, Path(folder))
        store.bind(spec, {}, {})
        asyncio.run(StudyLoop(spec, store, evaluator, check, _Silence()).run())
        return [t for t in store.trials() if t.state.finished]


class _Silence:
    """Listens to a study and says nothing."""

    def notice(self, text: str) -> None: ...

    def trial_started(self, suggestion: Suggestion, study: StudyRecord) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def trial_finished(self, trial: TrialRecord, study: StudyRecord) -> None: ...


def _worth_of_incumbents(
    evaluator: VirtualEvaluator, space: Space, trials: Sequence[TrialRecord]
) -> tuple[float, ...]:
    worth: list[float] = []
    best_score, best_worth = 0.0, 0.0
    for trial in trials:
        may_win = all(value <= 0 for value in trial.constraints.values())
        if may_win and (trial.score or 0.0) > best_score:
            best_score = trial.score or 0.0
            config = space.reference()[1] if trial.is_reference else space.decode(trial.params)
            best_worth = evaluator.worth(config)
        worth.append(best_worth)
    return tuple(worth)


def simulate_many(spec: StudySpec, seeds: Sequence[int]) -> list[Trace]:
    """Studies side by side, one process a core."""
    with cores(len(seeds)) as pool:
        return list(pool.map(simulate, [spec] * len(seeds), seeds))


def find_optimum(spec: StudySpec) -> Optimum:
    """The best point of the space without noise: all points, or a random search and climbs.

    Raises:
        InputError: the constraints leave nothing of the space.
    """
    space = Space(spec)
    size = space.size()
    is_exact = size is not None and size <= ENUMERATE_UP_TO
    candidates: list[dict[str, JsonValue]] = (
        [p for p in space.points() if space.violated(p) is None]
        if is_exact
        else random_points(space, SAMPLES, np.random.default_rng(0))
    )
    if not candidates:
        raise InputError("the constraints leave nothing of the space", "loosen `constraints:`")
    with cores(len(candidates)) as pool:
        worths = list(pool.map(_Worth(spec), candidates, chunksize=16))
        ranked = [p for _, p in sorted(zip(worths, candidates, strict=True), key=lambda w: -w[0])]
        if is_exact:
            best = ranked[0]
        else:
            best = max(pool.map(_Climb(spec), ranked[:CLIMBS]), key=_Worth(spec))
    return Optimum(best, _Worth(spec)(best), is_exact)


@dataclass(frozen=True, slots=True)
class _Worth:
    """The score of a point without noise; a value that can go to another process."""

    spec: StudySpec

    def __call__(self, params: Mapping[str, JsonValue]) -> float:
        config = Space(self.spec).decode(params)
        return VirtualEvaluator(self.spec, seed=0).worth(config)


@dataclass(frozen=True, slots=True)
class _Climb:
    """From a point to the best neighbour until there is none better."""

    spec: StudySpec

    def __call__(self, start: dict[str, JsonValue]) -> dict[str, JsonValue]:
        space, worth = Space(self.spec), _Worth(self.spec)
        here, height = start, worth(start)
        while True:
            around = [p for p in neighbours(space, here) if space.violated(p) is None]
            reached = max(((worth(p), n, p) for n, p in enumerate(around)), default=None)
            if reached is None or reached[0] <= height:
                return here
            height, _, here = reached


def cores(tasks: int) -> ProcessPoolExecutor:
    """One process a core, but no more than there are tasks."""
    return ProcessPoolExecutor(
        max_workers=min(tasks, os.cpu_count() or 1), initializer=_end_with, initargs=(os.getpid(),)
    )


def _end_with(parent: int) -> None:
    """Watch the parent from a worker: killed, it could not tell its workers to end."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
