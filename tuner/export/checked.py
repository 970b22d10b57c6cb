"""What is handed out was read by the installed vLLM's own parser before."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from tuner.engine.arguments import argv
from tuner.engine.config_check import ConfigChecker
from tuner.engine.flags import FlagTable
from tuner.errors import EnvironmentProblem, InputError
from tuner.export.deployment import Deployment, best_deployment
from tuner.export.record import json_record
from tuner.export.serve_config import serve_config
from tuner.export.shell import shell_script
from tuner.records import StudyRecord
from tuner.types import EngineConfig

Render = Callable[[Deployment, FlagTable | None], str]

FORMATS: dict[str, Render] = {
    "yaml": lambda deployment, _flags: serve_config(deployment),
    "shell": shell_script,
    "json": lambda deployment, _flags: json_record(deployment),
}
"""By the name that `tuner export --format` takes."""


async def export_best(
    study: StudyRecord,
    form: str,
    flags: FlagTable | None,
    checker: ConfigChecker,
    notice: Callable[[str], None],
) -> str:
    """The best configuration of a study in one format.

    Raises:
        InputError: there is no such format.
        NoResult: no configuration worked.
        EnvironmentProblem: the installed vLLM does not accept it.
    """
    if form not in FORMATS:
        raise InputError(f"there is no format {form!r}", f"one of: {', '.join(FORMATS)}")
    deployment = best_deployment(study, flags)
    for text in deployment.notices:
        notice(text)
    return await _render_checked(deployment, form, flags, checker, notice)


async def _render_checked(
    deployment: Deployment,
    form: str,
    flags: FlagTable | None,
    checker: ConfigChecker,
    notice: Callable[[str], None],
) -> str:
    """One deployment in one format, after vLLM has read its YAML form as it was meant.

    The YAML form is checked whatever the format is: all are made from the same flags.

    Raises:
        EnvironmentProblem: the installed vLLM refuses it or reads something else.
    """
    config = EngineConfig(deployment.flags, deployment.env)
    meant = argv(deployment.study.spec.server, config, host="127.0.0.1", port=8000, flags=flags)
    with tempfile.TemporaryDirectory(prefix="tuner-") as folder:
        path = Path(folder) / "serve.yaml"
        path.write_text(serve_config(deployment), encoding="utf-8")
        answer = await checker.check_file(path, meant)
    if not answer.known:
        notice(f"not checked by vLLM: {answer.error}")
    elif not answer.accepted:
        raise EnvironmentProblem(
            f"the installed vLLM does not accept the configuration: {answer.error}",
            "it was measured with "
            + ", ".join(f"{part} {number}" for part, number in deployment.study.versions.items()),
        )
    elif answer.differences:
        differences = "; ".join(
            f"{name}: meant {both.meant!r}, read as {both.in_file!r}"
            for name, both in answer.differences.items()
        )
        raise EnvironmentProblem(
            f"the installed vLLM would read the exported file as something else ({differences})",
            "use --format shell",
        )
    return FORMATS[form](deployment, flags)
