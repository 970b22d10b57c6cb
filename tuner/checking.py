"""`tuner check`: what a space file means, without starting a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner import spec as spec_file
from tuner.engine.config_check import ConfigChecker
from tuner.engine.flags import FlagTable
from tuner.engine.vllm import VllmLauncher
from tuner.errors import EnvironmentProblem, TunerError
from tuner.load.workload import planned_lengths, too_long
from tuner.redact import redact_argv
from tuner.space import Space
from tuner.storage import StudyLocation, StudyStore
from tuner.types import ENV_PREFIX, Choice, FloatRange, IntRange, JsonValue, Knob, StudySpec
from tuner.workbench import Watcher, Workbench, known_flags

ASSUMED_START_S = 60.0
ASSUMED_TPOT_S = 0.03
"""For the estimate before anything was measured, and said with it: a small model on one GPU
starts in about a minute and gives each request some thirty tokens a second."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a space file means.

    Attributes:
        defaults: vLLM's own value of each searched flag, where it could be asked.
        command: of the first launch; its port is chosen at the launch.
        unchecked: why vLLM could not be asked; empty if it was.
        points: of the search space, constraints not applied; None if a range is continuous.
        trial_s: expected length of one trial.
        trial_s_is_measured: whether that comes from the study's finished trials.
        remarks: what is allowed but may not be meant.
    """

    spec: StudySpec
    defaults: Mapping[str, JsonValue]
    command: Sequence[str]
    unchecked: str
    points: int | None
    trial_s: float
    trial_s_is_measured: bool
    remarks: Sequence[str]

    @property
    def total_s(self) -> float:
        """Expected length of the whole study."""
        budget = self.spec.budget
        limits = [budget.time_s] if budget.time_s is not None else []
        if budget.trials is not None:
            trials = budget.trials if self.points is None else min(budget.trials, self.points + 1)
            limits.append(trials * self.trial_s)
        return min(limits)


def check_space(path: Path, watcher: Watcher) -> Findings:
    """Check a space file, and ask the installed vLLM about it.

    Raises:
        InputError: something in it cannot be used.
    """
    spec = spec_file.load(path)
    return asyncio.run(_check(spec, watcher))


async def _check(spec: StudySpec, watcher: Watcher) -> Findings:
    space = Space(spec)
    unchecked = ""
    flags: FlagTable | None = None
    try:
        flags = await known_flags(spec, watcher)
        if flags is None:
            unchecked = f"`{spec.server.command[0]}` cannot be asked"
    except EnvironmentProblem as problem:
        unchecked = problem.message
    launcher = VllmLauncher(spec.server, flags)
    _, reference = space.reference()
    remarks = [*spec_file.warnings(spec), *_unusable_model(spec)]
    defaults: Mapping[str, JsonValue] = {}
    if flags is not None:
        async with ConfigChecker(spec.server, watcher.progress) as checker:
            answer = await Workbench(launcher, checker, flags).check(reference)
        defaults = _defaults(space, flags, answer.resolved)
        if not answer.accepted:
            remarks.append(f"vLLM refuses the reference: {answer.error}")
    trial_s = _measured_trial_s(spec)
    return Findings(
        spec=spec,
        defaults=defaults,
        command=redact_argv(launcher.command_line(reference, 0)),
        unchecked=unchecked,
        points=space.size(),
        trial_s=trial_s if trial_s is not None else _assumed_trial_s(spec),
        trial_s_is_measured=trial_s is not None,
        remarks=[*remarks, *_rejections(spec)],
    )


def _defaults(
    space: Space, flags: FlagTable, resolved: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """Of each searched flag: what vLLM resolves for this model and machine where the reference
    leaves it unset, else its parser's default."""
    defaults: dict[str, JsonValue] = {}
    set_by_reference, _ = space.reference()
    for name in space.knobs:
        flag = None if name.startswith(ENV_PREFIX) else flags.find(name)
        if name in resolved and name not in set_by_reference:
            defaults[name] = resolved[name]
        elif flag is not None:
            defaults[name] = flag.default
    return defaults


def _unusable_model(spec: StudySpec) -> Iterator[str]:
    model = spec.server.model
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        yield f"the model folder {model} is not there"


def _rejections(spec: StudySpec) -> Iterator[str]:
    """Requests that do not fit a context: they count as failed, and the score says so."""
    knob = next((k for k in spec.search_space if k.name == "max-model-len"), None)
    for tokens in _contexts(knob):
        count = too_long(spec.workload, tokens)
        if count:
            yield (
                f"max-model-len {tokens}: {count} of {spec.workload.requests} requests are "
                "longer; they count as failed"
            )


def _contexts(knob: Knob | None) -> list[int]:
    match knob:
        case IntRange(low=low, high=high):
            return [low, high]
        case Choice(choices=choices):
            return [c for c in choices if isinstance(c, int) and not isinstance(c, bool)]
        case FloatRange() | None:
            return []


def _measured_trial_s(spec: StudySpec) -> float | None:
    with contextlib.suppress(TunerError):  # a broken study is `tuner run`'s matter
        store = StudyStore.open(StudyLocation.of(spec.name))
        try:
            return store.read(lambda *_: spec).typical_trial_s
        finally:
            store.close()
    return None


def _assumed_trial_s(spec: StudySpec) -> float:
    workload = spec.workload
    if workload.request_rate_per_s is not None:
        return ASSUMED_START_S + workload.requests / workload.request_rate_per_s
    outputs = [output for _, output in planned_lengths(workload)]
    rounds = sum(outputs) / (workload.concurrency or 1)
    return ASSUMED_START_S + rounds * ASSUMED_TPOT_S
