"""What a study measures with, put together from a space file: one place for all defaults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tuner import spec as spec_file
from tuner.engine.arguments import adapt
from tuner.engine.base import ConfigAnswer
from tuner.engine.config_check import ConfigChecker
from tuner.engine.flag_check import check_flags
from tuner.engine.flags import FlagTable
from tuner.engine.introspect import CannotAsk, flag_table
from tuner.engine.vllm import VllmLauncher, check_model_folder
from tuner.load.fit import unfitting
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
        warn_once: tells a sentence to the user, the first time only.
    """

    launcher: VllmLauncher
    checker: ConfigChecker
    flags: FlagTable | None
    warn_once: Callable[[str], None]

    @property
    def vllm_version(self) -> str | None:
        """As far as it is known before a start."""
        return self.flags.version if self.flags else None

    async def check(self, config: EngineConfig) -> ConfigAnswer:
        """See `tuner.engine.base.ConfigCheck`."""
        command = self.launcher.command_line(config, _NO_PORT)
        answer = await self.checker.ask(command, config.env)
        if answer.accepted and answer.error and self.flags is not None:
            self.warn_once(f"configurations are not checked before their launch: {answer.error}")
        return answer


@asynccontextmanager
async def open_workbench(spec: StudySpec, watcher: Watcher) -> AsyncIterator[Workbench]:
    """Ask vLLM for its flags, check the space file against them, and set up.

    Raises:
        EnvironmentProblem: there is no vLLM, or it cannot be imported.
        InputError: the space file names a flag or a value that this vLLM does not take.
    """
    check_model_folder(spec.server.model)
    flags = await known_flags(spec, watcher)
    async with ConfigChecker(spec.server, watcher.progress) as checker:
        yield make_workbench(spec, flags, checker, watcher)


def make_workbench(
    spec: StudySpec, flags: FlagTable | None, checker: ConfigChecker, watcher: Watcher
) -> Workbench:
    """The parts put together; `open_workbench` asks for them first."""
    told: set[str] = set()

    def warn_once(text: str) -> None:
        if text not in told:
            told.add(text)
            watcher.notice(text)

    return Workbench(VllmLauncher(spec.server, flags), checker, flags, warn_once)


async def remarks(spec: StudySpec, workbench: Workbench) -> list[str]:
    """What the space file allows but may not mean, for this vLLM and model."""
    _, reference = Space(spec).reference()
    answer = await workbench.check(reference)
    found = [*spec_file.warnings(spec), *unfitting(spec, answer.resolved)]
    if not answer.accepted:
        found.append(f"vLLM refuses the reference: {answer.error}")
    return found


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
