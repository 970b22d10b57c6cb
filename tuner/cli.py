"""The command line: parse, call, print, exit code. Heavy imports live inside the commands."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from tuner.errors import EnvironmentProblem, ExitCode, InputError, Interrupted, TunerError
from tuner.load.traces.trace import TraceFormat
from tuner.redact import redact_text
from tuner.types import SamplerKind

if TYPE_CHECKING:
    from rich.console import Console

    from tuner.records import StudyRecord, TrialRecord
    from tuner.report.console import ConsoleListener
    from tuner.types import JsonValue, SloLimit


class ExportFormat(StrEnum):
    """What `tuner export` writes."""

    YAML = "yaml"
    SHELL = "shell"
    JSON = "json"


_LONGEST_MESSAGE = 3000


class _Commands(TyperGroup):
    """Turns what a command raises into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except TunerError as error:
            _fail(error)
        except (Interrupted, KeyboardInterrupt):
            sys.exit(ExitCode.INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output has gone (`tuner status x | head`); nothing to say.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(ExitCode.OK)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _fail(EnvironmentProblem(f"the output cannot be written: {error.strerror}"))
        return result


def _fail(error: TunerError) -> NoReturn:
    print(f"error: {_readable(redact_text(error.message))}", file=sys.stderr)
    if error.hint:
        print(f"  {_readable(redact_text(error.hint))}", file=sys.stderr)
    sys.exit(error.exit_code)


def _readable(text: str) -> str:
    """Without control characters of a hostile value, and not longer than anyone reads."""
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return shown if len(shown) <= _LONGEST_MESSAGE else shown[:_LONGEST_MESSAGE] + " …"


app = typer.Typer(
    cls=_Commands,
    name="tuner",
    help="Search the memory and scheduling settings of a vLLM server by running it.\n\n"
    "Exit codes: 0 fine, 2 the input, 3 the environment, 4 no configuration worked, "
    "130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Space = Annotated[Path, typer.Argument(metavar="SPACE", help="The space file (YAML).")]
Study = Annotated[
    str,
    typer.Argument(
        metavar="STUDY", help="A name under studies/, a study's directory, or a storage URL."
    ),
]
StudyName = Annotated[
    str | None,
    typer.Option("--study", metavar="NAME", help="The study's name, instead of the space file's."),
]
InUrl = Annotated[
    str | None,
    typer.Option("--study", metavar="NAME", help="Which study, where a storage URL holds several."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@app.command()
def check(space: Space, as_json: Json = False) -> None:
    """Validate a space file and show what it means; starts no server."""
    from tuner.commands.check import check_space
    from tuner.report.check import check_document, print_check

    with _listener() as listener:
        findings = check_space(space, listener)
    if as_json:
        _print_json(check_document(findings))
    else:
        print_check(_console(), findings)


@app.command()
def run(
    space: Space,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Finished trials at which to stop, instead of budget.trials."
        ),
    ] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(metavar="D", help="Time in trials, such as 90m, instead of budget.time."),
    ] = None,
    study: StudyName = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Database of the study (SQLAlchemy URL)."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Seed of the search, instead of search.seed."),
    ] = None,
) -> None:
    """Tune a vLLM server; goes on where an earlier run of the study stopped."""
    from tuner.commands.run import RunOptions, run_study

    options = RunOptions(trials, time_budget, study, storage, seed)
    run_study(space, options, _steady_console())


@app.command()
def status(study: Study, name: InUrl = None, as_json: Json = False) -> None:
    """Show where a study stands: its trials, the best, the gain over the reference."""
    from tuner.report.console import print_status
    from tuner.report.documents import status_document

    record = _read(study, name)
    if as_json:
        _print_json(status_document(record))
    else:
        print_status(_console(), record)


@app.command()
def show(
    study: Study,
    trial: Annotated[int, typer.Argument(metavar="TRIAL", min=0, help="Its number.")],
    name: InUrl = None,
    requests: Annotated[
        bool, typer.Option("--requests", help="Each of its requests instead, as it was measured.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show one trial: parameters, command line, measurement, memory facts, its log."""
    from tuner.report.documents import trial_document
    from tuner.report.trial import print_trial

    record = _read(study, name)
    found = next((t for t in record.trials if t.number == trial), None)
    if found is None:
        raise InputError(
            f"the study {record.name!r} has no trial {trial}",
            f"`tuner status {study}` lists them",
        )
    if requests:
        _show_requests(found, record.spec.objective.slo, as_json)
    elif as_json:
        _print_json(trial_document(found, record.trials))
    else:
        print_trial(_console(), found, record.trials)


def _show_requests(trial: TrialRecord, slo: Sequence[SloLimit], as_json: bool) -> None:
    from tuner.measuring.kept import read_requests
    from tuner.report.requests import print_requests, requests_document

    if trial.directory is None:
        raise InputError(f"trial {trial.number} has no folder, and so no requests")
    requests = read_requests(trial.directory)
    if as_json:
        _print_json(requests_document(requests, slo))
    else:
        print_requests(_console(), requests, slo)


@app.command()
def export(
    study: Study,
    form: Annotated[
        ExportFormat, typer.Option("--format", help="YAML is for `vllm serve --config`.")
    ] = ExportFormat.YAML,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write here, not to stdout."),
    ] = None,
    name: InUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Hand out the best configuration, checked by the installed vLLM's own parser."""
    from tuner.commands.export import export_study

    with _listener() as listener:
        text = export_study(_read(study, name), "json" if as_json else form.value, listener)
    if output is None:
        sys.stdout.write(text)
    else:
        _write(output, text)
        _note(f"wrote {output}")


@app.command()
def diagnose(
    log: Annotated[
        str, typer.Argument(metavar="LOG", help="A vLLM log (.gz too), or - for standard input.")
    ],
    exit_code: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of the server; it counts where the log says nothing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell from any vLLM log why the server failed, and what to change."""
    from tuner.commands.diagnose import diagnose_log
    from tuner.report.diagnosis import diagnosis_document, print_diagnosis

    diagnosis = diagnose_log(log, exit_code)
    if as_json:
        _print_json(diagnosis_document(diagnosis))
    else:
        print_diagnosis(_console(), diagnosis)


@app.command()
def simulate(
    space: Space,
    trials: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Trials a study, instead of budget.trials."),
    ] = None,
    sampler: Annotated[SamplerKind | None, typer.Option(help="Instead of search.sampler.")] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="K", help="How many studies.")] = 20,
    as_json: Json = False,
) -> None:
    """Run whole studies on the simulated engine and tell how near they came to the optimum."""
    from tuner.commands.simulate import simulate_space
    from tuner.report.simulation import print_simulation, simulation_document

    report = simulate_space(space, trials=trials, sampler=sampler, seeds=seeds)
    if as_json:
        _print_json(simulation_document(report))
    else:
        print_simulation(_console(), report)


@app.command()
def workload(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Recorded requests: CSV, JSON or JSON lines.")
    ],
    form: Annotated[
        TraceFormat | None, typer.Option("--format", help="Instead of what the content shows.")
    ] = None,
    max_model_len: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="Count requests that are longer; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a file of recorded traffic contains, and what of it cannot be used."""
    from tuner.commands.workload import describe_file
    from tuner.report.workload import print_workload, workload_document

    summary = describe_file(file, form, max_model_len)
    if as_json:
        _print_json(workload_document(summary))
    else:
        print_workload(_console(), summary)


@app.command()
def version() -> None:
    """Show the versions of the tuner and of what it stands on."""
    from tuner.commands.version import all_versions

    for part, number in all_versions().items():
        print(f"{part} {number}")


def _read(study: str, name: str | None) -> StudyRecord:
    from tuner import spec
    from tuner.storage import StudyStore, find

    store = StudyStore.open(find(study, name))
    try:
        return store.read(spec.parse)
    finally:
        store.close()


def _console() -> Console:
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # it would end the program with 1; see `_Commands`

    return Piped()


def _listener() -> ConsoleListener:
    """Progress and notices on stderr, so that stdout holds the result alone."""
    from rich.console import Console

    from tuner.report.console import ConsoleListener

    return ConsoleListener(Console(stderr=True))


def _steady_console() -> Console:
    """For a study: it outlives its terminal and the reader of its output."""
    from typing import IO, cast

    from rich.console import Console

    from tuner.report.steady import SteadyStream

    return Console(file=cast("IO[str]", SteadyStream(sys.stdout)))


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _print_json(document: JsonValue) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _write(path: Path, text: str) -> None:
    from tuner.errors import EnvironmentProblem

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be written: {error.strerror}") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `tuner`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows a `?`
    app(arguments)


if __name__ == "__main__":
    main()
