"""What a study measures with, put together from a space file: one place for all defaults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tuner.engine.arguments import adapt
from tuner.engine.base import ConfigAnswer
from tuner.engine.config_check import ConfigChecker
from tuner.engine.flag_check import check_flags
from tuner.engine.flags import FlagTable
from tuner.engine.introspect import CannotAsk, flag_table
from tuner.engine.vllm import VllmLauncher
from tuner.space import Space
from tuner.types import EngineConfig, Progress, StudySpec

_NO_PORT = 8000  # stands in a command line that is only asked about, never started


class Watcher(Protocol):
    """Whom the preparation tells what."""

    def notice(self, text: str) -> None:
        """Something worth a line."""

    def progress(self, progress: Progress) -> None:
        """Several times a second while something goes on."""


@dataclass(frozen=True, slots=True)
class Workbench:
    """A launcher and what vLLM itself says of configurations.

    Attributes:
        flags: of the vLLM that will run; None where it cannot be asked.
        checker: vLLM's own check; also of exported files.
    """

    launcher: VllmLauncher
    checker: ConfigChecker
    flags: FlagTable | None

    @property
    def vllm_version(self) -> str | None:
        """As far as it is known before a start."""
        return self.flags.version if self.flags else None

    async def check(self, config: EngineConfig) -> ConfigAnswer:
        """See `tuner.engine.base.ConfigCheck`."""
        command = self.launcher.command_line(config, _NO_PORT)
        return await self.checker.ask(command, config.env)


@asynccontextmanager
async def open_workbench(spec: StudySpec, watcher: Watcher) -> AsyncIterator[Workbench]:
    """Ask vLLM for its flags, check the space file against them, and set up.

    Raises:
        EnvironmentProblem: there is no vLLM, or it cannot be imported.
        InputError: the space file names a flag or a value that this vLLM does not take.
    """
    flags = await known_flags(spec, watcher)
    async with ConfigChecker(spec.server, watcher.progress) as checker:
        yield Workbench(VllmLauncher(spec.server, flags), checker, flags)


async def known_flags(spec: StudySpec, watcher: Watcher) -> FlagTable | None:
    """The flags of the vLLM that will run, the space file checked against them.

    Returns:
        None, with a notice, where nobody can be asked, such as a container.

    Raises:
        EnvironmentProblem, InputError: as `open_workbench`.
    """
    answer = await flag_table(spec.server, watcher.progress)
    if isinstance(answer, CannotAsk):
        watcher.notice(f"flags were not checked: {answer.reason}")
        return None
    for notice in check_flags(spec, answer):
        watcher.notice(notice)
    _, reference = Space(spec).reference()
    for notice in adapt(reference.args, answer).notices:
        watcher.notice(notice)
    return answer
