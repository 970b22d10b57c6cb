"""`tuner export`: the best configuration of a study, read by the installed vLLM before."""

from __future__ import annotations

import asyncio

from tuner.engine.config_check import ConfigChecker
from tuner.engine.flags import FlagTable
from tuner.engine.introspect import CannotAsk, flag_table
from tuner.errors import EnvironmentProblem
from tuner.export import export_best
from tuner.records import StudyRecord
from tuner.workbench import Watcher


def export_study(study: StudyRecord, form: str, watcher: Watcher) -> str:
    """The text of one format of `tuner.export.FORMATS`.

    Raises:
        InputError: there is no such format.
        NoResult: no configuration worked.
        EnvironmentProblem: the installed vLLM does not accept it.
    """
    return asyncio.run(_export(study, form, watcher))


async def _export(study: StudyRecord, form: str, watcher: Watcher) -> str:
    server = study.spec.server
    flags: FlagTable | None = None
    try:
        answer = await flag_table(server, watcher.progress)
        flags = None if isinstance(answer, CannotAsk) else answer
    except EnvironmentProblem:
        pass  # the study may be exported where no vLLM is; the checker says so
    async with ConfigChecker(server, watcher.progress) as checker:
        return await export_best(study, form, flags, checker, watcher.notice)
