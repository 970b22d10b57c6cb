"""A space file -> `StudySpec`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from tuner import expressions
from tuner.errors import InputError
from tuner.names import study_name_from
from tuner.space import Space
from tuner.spec import document as yaml_document
from tuner.spec.document import Document, kind_of
from tuner.spec.fields import expanded
from tuner.spec.knobs import read_knobs
from tuner.spec.problems import first_problem
from tuner.spec.sections import ServerSection, SpaceFile
from tuner.spec.values import environment, fixed_arguments, reference_values
from tuner.types import (
    ENV_PREFIX,
    BudgetSpec,
    Constraint,
    ObjectiveSpec,
    SearchSpec,
    ServerSpec,
    StudySpec,
)

POINTS_TRIED = 5_000
"""Spaces of constrained parameters up to this size are searched for a point that is allowed."""


def load(path: Path) -> StudySpec:
    """Read and check a space file, and that the files it names exist.

    Raises:
        InputError: file, line, what is wrong and what to write instead.
    """
    spec = parse(_text(path), path)
    requests = spec.workload.path
    if requests is not None and not requests.is_file():
        document = yaml_document.read(spec.text, path)
        raise document.error(
            document.at(["workload", "path"]),
            f"`workload.path`: there is no file {requests}",
            "Paths are relative to the current directory.",
        )
    return spec


def parse(text: str, path: Path) -> StudySpec:
    """Check the text of a space file; looks at no other file.

    Args:
        path: named in messages, and by its stem the study unless `study:` does.

    Raises:
        InputError: file, line, what is wrong and what to write instead.
    """
    return parse_with_remarks(text, path)[0]


def parse_with_remarks(text: str, path: Path) -> tuple[StudySpec, list[str]]:
    """As `parse`, with what is odd about the text but no error."""
    document = yaml_document.read(text, path)
    try:
        checked = SpaceFile.model_validate(document.root.plain())
    except ValidationError as error:
        raise first_problem(document, error) from None
    server = _server(document, checked.server)
    fixed = dict.fromkeys(server.args, "server.args")
    fixed |= {ENV_PREFIX + name: "server.env" for name in server.env}
    knobs, remarks = read_knobs(document, document.section("search_space"), fixed)
    known = [*fixed, *(knob.name for knob in knobs)]
    spec = StudySpec(
        name=checked.study or _name_from_path(path),
        server=server,
        search_space=tuple(knobs),
        constraints=_constraints(document, known),
        reference=reference_values(document, document.section("reference")),
        workload=checked.workload.spec(),
        objective=ObjectiveSpec(
            checked.objective.maximize, checked.objective.preemption_weight, checked.promised
        ),
        budget=BudgetSpec(checked.budget.trials, checked.budget.time),
        search=SearchSpec(checked.search.sampler, checked.search.seed),
        path=path,
        text=text,
        measure=checked.measure.spec(),
    )
    _refuse_unsatisfiable(path, spec, known)
    return spec, remarks


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder", "Name the space file in it.")
        if not path.exists():
            raise InputError(f"{path}: there is no such file", "See search_spaces/ for examples.")
        if not path.is_file():
            raise InputError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            content = file.read(yaml_document.MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > yaml_document.MAX_BYTES:
        raise yaml_document.too_large(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}:{line}: not a text in UTF-8", "A space file is plain UTF-8 text."
        ) from None


def _name_from_path(path: Path) -> str:
    name = study_name_from(path.stem)
    if not name:
        raise InputError(
            f"{path}:1: no study name can be made of the file's name", "Write `study: my-study`."
        )
    return name


def _server(document: Document, section: ServerSection) -> ServerSpec:
    return ServerSpec(
        command=section.command,
        model=expanded(section.model),
        args=fixed_arguments(document, document.section("server", "args")),
        env=environment(document, document.section("server", "env")),
        startup_timeout_s=section.startup_timeout,
        hang_timeout_s=section.hang_timeout,
    )


def _constraints(document: Document, known: Collection[str]) -> tuple[Constraint, ...]:
    constraints = []
    section = document.section("constraints").value
    for item in section if isinstance(section, list) else []:
        if not isinstance(item.value, str):
            raise document.error(
                item,
                f"a constraint must be an expression, not {kind_of(item.value)}",
                "Write it like `- max-num-seqs <= max-num-batched-tokens`.",
            )
        try:
            expressions.parse(item.value, known)
        except expressions.ExpressionError as error:
            shown = kind_of(" ".join(item.value.split()))
            raise document.error(item, f"constraint {shown}: {error}", error.hint) from None
        constraints.append(Constraint(item.value.strip(), item.line))
    return tuple(constraints)


def _refuse_unsatisfiable(path: Path, spec: StudySpec, known: Collection[str]) -> None:
    """Refuse constraints that leave no point, where that can be told by looking at them all."""
    alone = [(constraint,) for constraint in spec.constraints]
    for group in (*alone, spec.constraints):
        names = {name for c in group for name in expressions.parse(c.text, known).names}
        knobs = tuple(knob for knob in spec.search_space if knob.name in names)
        space = Space(replace(spec, search_space=knobs, constraints=group))
        size = space.size()
        if size is None or size > POINTS_TRIED:
            continue
        if all(space.violated(point) is not None for point in space.points()):
            what = f"`{group[0].text}`" if len(group) == 1 else "all constraints together"
            raise InputError(
                f"{path}:{group[0].line}: no point of the search space satisfies {what}",
                "Loosen the constraint or widen the ranges.",
            )
