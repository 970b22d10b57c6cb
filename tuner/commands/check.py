"""`tuner check`: what a space file means, without starting a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tuner import spec as spec_file
from tuner.commands.like_server import settled
from tuner.engine.config_check import ConfigChecker
from tuner.engine.flags import FlagTable
from tuner.engine.vllm import check_model_folder
from tuner.errors import EnvironmentProblem, TunerError
from tuner.findings import ASSUMED_PROBES, ASSUMED_START_S, ASSUMED_TPOT_S, Findings
from tuner.load.fit import unfitting
from tuner.load.workload import planned_lengths, schedule
from tuner.redact import redact_argv, redact_env, redact_text, remember_secrets
from tuner.space import Space
from tuner.storage import StudyLocation, StudyStore
from tuner.types import ENV_PREFIX, JsonValue, Metric, StudySpec
from tuner.workbench import Watcher, known_flags, make_workbench, remarks


def check_space(path: Path, watcher: Watcher) -> Findings:
    """Check a space file, and ask the installed vLLM about it.

    Raises:
        InputError: something in it cannot be used.
    """
    spec = spec_file.load(path)
    # vLLM's own errors quote the values that they refuse.
    remember_secrets(os.environ, spec.server.env, spec.server.args, spec.reference)
    spec = settled(spec, StudyLocation.of(spec.name).directory, watcher.notice)
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
    _, reference = space.reference()
    async with ConfigChecker(spec.server, watcher.progress) as checker:
        workbench = make_workbench(spec, flags, checker, watcher)
        defaults: Mapping[str, JsonValue] = {}
        found = [*spec_file.warnings(spec), *unfitting(spec, {})]
        if flags is not None:
            answer = await workbench.check(space.decode({}))
            defaults = _defaults(space, flags, answer.resolved)
            unchecked = answer.error if answer.accepted else ""
            found = await remarks(spec, workbench)
    trial_s = _measured_trial_s(spec)
    return Findings(
        spec=spec,
        defaults=defaults,
        command=redact_argv(workbench.launcher.command_line(reference, 0)),
        env=redact_env(reference.env),
        unchecked=redact_text(unchecked),
        points=space.size(),
        trial_s=trial_s if trial_s is not None else _assumed_trial_s(spec),
        trial_s_is_measured=trial_s is not None,
        remarks=[redact_text(text) for text in (*found, *_unusable_model(spec))],
    )


def _defaults(
    space: Space, flags: FlagTable, resolved: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """Of each searched flag: what vLLM resolves for this model and machine, else its parser's
    default."""
    defaults: dict[str, JsonValue] = {}
    for name in space.knobs:
        flag = None if name.startswith(ENV_PREFIX) else flags.find(name)
        if name in resolved:
            defaults[name] = resolved[name]
        elif flag is not None:
            defaults[name] = flag.default
    return defaults


def _unusable_model(spec: StudySpec) -> Iterator[str]:
    try:
        check_model_folder(spec.server.model)
    except EnvironmentProblem as problem:
        yield problem.message


def _measured_trial_s(spec: StudySpec) -> float | None:
    """Median of the study's trials, if they were of this server and workload."""
    with contextlib.suppress(TunerError):  # a broken study is `tuner run`'s matter
        store = StudyStore.open(StudyLocation.of(spec.name))
        try:
            study = store.read(spec_file.parse)
        finally:
            store.close()
        if (study.spec.workload, study.spec.server.model) == (spec.workload, spec.server.model):
            return study.typical_trial_s
    return None


def _assumed_trial_s(spec: StudySpec) -> float:
    longest_s = spec.measure.time_s
    loads_s = [s if longest_s is None else min(s, longest_s) for s in _assumed_loads_s(spec)]
    probes = ASSUMED_PROBES if spec.objective.maximize is Metric.MAX_RATE else 1
    return ASSUMED_START_S + probes * sum(loads_s)


def _assumed_loads_s(spec: StudySpec) -> Iterator[float]:
    """How long all requests of each load take."""
    workload = spec.workload
    if workload.concurrency is None:
        for rate in workload.levels or (workload.request_rate_per_s,):
            yield (schedule(replace(workload, request_rate_per_s=rate)) or (0.0,))[-1]
        return
    tokens = sum(output for _, output in planned_lengths(workload))
    for level in workload.levels or (workload.concurrency,):
        yield tokens / level * ASSUMED_TPOT_S
