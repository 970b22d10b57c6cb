"""`tuner run`: from a space file to a study that is measured and a configuration to deploy."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from tuner import redact
from tuner import spec as spec_file
from tuner.commands.like_server import keep, settled
from tuner.engine.arguments import command_words
from tuner.engine.introspect import find_python
from tuner.engine.vllm import check_model_folder
from tuner.errors import (
    EnvironmentProblem,
    ExitCode,
    InputError,
    Interrupted,
    TunerError,
)
from tuner.evaluate import ServerEvaluator
from tuner.export import export_best
from tuner.fingerprint import differences, fingerprint
from tuner.load.pool import most_connections
from tuner.load.prepared import PreparedWorkloads
from tuner.measuring.session import Asked
from tuner.metrics.device import DeviceMonitor
from tuner.names import is_study_name
from tuner.records import StudyRecord
from tuner.report.console import ConsoleListener, print_summary
from tuner.stopping import Ending, used_up
from tuner.storage import StudyLocation, StudyStore, files
from tuner.study import StudyLoop
from tuner.study_problems import nothing_worked
from tuner.types import BudgetSpec, StudySpec, WorkloadSpec
from tuner.units import parse_duration
from tuner.versions import versions
from tuner.workbench import Workbench, open_workbench, remarks

BEST_FILE = "best.yaml"
"""In the study's directory: what `tuner export` gives at the end of a run."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line says instead of the space file; None leaves it to the file."""

    trials: int | None = None
    time_budget: str | None = None
    study: str | None = None
    storage: str | None = None
    seed: int | None = None


def run_study(space: Path, options: RunOptions, console: Console) -> None:
    """Run a study to its end, or go on with it.

    Raises:
        TunerError: see `tuner.errors`; also where no configuration worked.
        Interrupted: the user stopped it; what was measured is kept.
    """
    spec = with_options(spec_file.load(space), options)
    redact.remember_secrets(os.environ, spec.server.env, spec.server.args, spec.reference)
    # Before anything is written: a study that cannot begin leaves nothing behind.
    check_model_folder(spec.server.model)
    find_python(spec.server)
    location = StudyLocation.of(spec.name, options.storage)
    spec = settled(spec, location.directory, lambda text: _say(console, f"note: {text}"))
    check_connections(spec.workload)
    store = StudyStore.open_for_writing(location)
    try:
        _run_locked(spec, store, console)
    finally:
        if store.is_new:
            store.discard()
        store.close()


def _run_locked(spec: StudySpec, store: StudyStore, console: Console) -> None:
    ending: Ending | None = None
    problem: TunerError | None = None
    refused = False
    try:
        with ConsoleListener(console, spec.budget) as listener:
            ending, problem = asyncio.run(_run(spec, store, listener))
    except InputError:
        refused = True  # nothing was run: there is no end to show
        raise
    finally:
        if not refused:
            _show_end(spec, store, console, ending)
    if problem is not None:
        raise problem
    study = _read(spec, store)
    if study.best is None:
        raise nothing_worked(study)


async def _run(
    spec: StudySpec, store: StudyStore, listener: ConsoleListener
) -> tuple[Ending, TunerError | None]:
    """How the study ended, and what was wrong with writing its best configuration."""
    with _stoppable(listener):
        async with open_workbench(spec, listener) as workbench:
            _bind(spec, store, workbench)
            if used_up(_read(spec, store), spec.budget) is None:
                for remark in await remarks(spec, workbench):
                    listener.notice(f"note: {remark}")
            evaluator = ServerEvaluator(
                workbench.launcher,
                Asked.of(spec),
                PreparedWorkloads(listener.notice),
                listener.notice,
            )
            loop = StudyLoop(spec, store, evaluator, workbench, listener)
            ending = await loop.run()
            return ending, await _write_best(loop.record(), store, workbench, listener)


async def _write_best(
    study: StudyRecord, store: StudyStore, workbench: Workbench, listener: ConsoleListener
) -> TunerError | None:
    """Leave the best configuration beside the database, checked by vLLM."""
    if study.best is None:
        return None
    path = store.location.directory / BEST_FILE
    try:
        text = await export_best(study, "yaml", workbench.flags, workbench.checker, listener.notice)
        files.write_text(path, text)
    except TunerError as problem:
        return problem
    except OSError as error:
        return EnvironmentProblem(f"{path} cannot be written: {error.strerror}")
    return None


def check_connections(workload: WorkloadSpec) -> None:
    """Refuse a closed loop with more requests at a time than can have a connection each.

    How many an open loop has in flight is the server's to decide.

    Raises:
        EnvironmentProblem: the machine does not allow as many.
    """
    if workload.concurrency is None:
        return
    at_once = min(workload.requests, max((workload.concurrency, *map(int, workload.levels))))
    most = most_connections()
    if at_once > most:
        raise EnvironmentProblem(
            f"the load keeps {at_once} connections open at a time, but the limit of open files "
            f"here allows {most}",
            "raise the limit (`ulimit -Hn`), or lower the workload's concurrency",
        )


def with_options(spec: StudySpec, options: RunOptions) -> StudySpec:
    """The space file with the command line's words in place of its own.

    Raises:
        InputError: an option cannot be used.
    """
    if options.study is not None and not is_study_name(options.study):
        raise InputError(
            f"--study {options.study!r} is not a study's name",
            "use letters, digits, `.`, `_` and `-`",
        )
    budget = BudgetSpec(
        trials=spec.budget.trials if options.trials is None else options.trials,
        time_s=spec.budget.time_s if options.time_budget is None else _time(options.time_budget),
    )
    search = spec.search if options.seed is None else replace(spec.search, seed=options.seed)
    return replace(spec, name=options.study or spec.name, budget=budget, search=search)


def _time(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise InputError(f"--time-budget: {error}", "write it as 90m or 4h") from error
    if seconds <= 0:
        raise InputError(f"--time-budget {text} leaves no time", "write it as 90m or 4h")
    return seconds


def _bind(spec: StudySpec, store: StudyStore, workbench: Workbench) -> None:
    """Refuse to mix results that cannot be compared; else write down what is measured with.

    Raises:
        InputError: the study was made under other circumstances.
    """
    device = DeviceMonitor({**os.environ, **spec.server.env}).describe()
    vllm = workbench.vllm_version
    current = fingerprint(spec, vllm_version=vllm, device=device)
    measured = any(trial.state.finished for trial in store.trials())
    changed = differences(store.fingerprint, current) if measured else []
    if changed:
        listed = "\n".join(f"    {line}" for line in changed)
        raise InputError(
            f"the study {spec.name!r} was measured under other circumstances, "
            f"so that its results cannot be compared with new ones:\n{listed}",
            f"start another study with --study NAME, or go back to what it was made with "
            f"({store.location.directory / 'space.yaml'})",
        )
    store.bind(spec, current, {**versions(vllm), **device})
    keep(spec, store.location.directory)


@contextmanager
def _stoppable(listener: ConsoleListener) -> Iterator[None]:
    """The first signal to stop cancels the running task, the second ends the process.

    Nothing survives the second either: the supervisor ends its server when the tuner is gone.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asked = False

    def stop() -> None:
        nonlocal asked
        if asked:
            os._exit(ExitCode.INTERRUPTED)
        asked = True
        task.cancel()
        listener.notice("stopping the server (Ctrl-C again to leave at once) ...")

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    except asyncio.CancelledError:
        raise Interrupted from None
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _show_end(spec: StudySpec, store: StudyStore, console: Console, ending: Ending | None) -> None:
    """What is known, also after an error or Ctrl-C, and how to go on or deploy it."""
    if store.is_new:
        return
    try:
        study = _read(spec, store)
    except EnvironmentProblem:
        if ending is not None:
            raise
        return  # the storage is what failed, and the exception on its way says so
    if study.finished_trials:
        print_summary(console, study, ending)
    if ending is None:
        _say(console, f"The study goes on with: tuner run {spec.path}")
    elif ending is not Ending.EXHAUSTED:
        _say(console, f"More trials or time: tuner run {spec.path} --trials N --time-budget D")
    if ending is not None and study.best is not None:
        best_file = store.location.directory / BEST_FILE
        command = shlex.join(command_words(spec.server))
        _say(console, f"Deploy it with: {command} --config {best_file}")
        _say(console, f"More: tuner export {study.name} --format shell|json, tuner status, show")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _read(spec: StudySpec, store: StudyStore) -> StudyRecord:
    return store.read(lambda _text, _path: spec)
