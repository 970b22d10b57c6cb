"""vLLM's own opinion of a configuration, without starting a server.

What its check refuses, a server would refuse too, after a quarter of a minute of imports;
here the answer takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import cast

from tuner.engine.asking import Asker, NoAnswer, question_argv, where_vllm_is
from tuner.engine.base import ConfigAnswer
from tuner.engine.introspect import CannotAsk, find_python, server_env
from tuner.engine.log_causes import classify
from tuner.engine.simulated.server.answers import StandInAnswers, is_stand_in
from tuner.errors import EnvironmentProblem
from tuner.types import FailureCause, JsonValue, Progress, ProgressSink, ServerSpec

FIRST_LIMIT_S = 60.0
"""How long a study waits for the check to become available."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A flag that a `--config` file sets to something else than was meant."""

    in_file: JsonValue
    meant: JsonValue


@dataclass(frozen=True, slots=True)
class FileAnswer:
    """What `vllm serve --config FILE` would make of a file.

    Attributes:
        accepted: also true where vLLM could not be asked (`known` is false then).
        values: effective value of each flag by name, and of `model`.
        differences: flags that come out different from the command line that was meant.
    """

    accepted: bool
    known: bool = True
    error: str = ""
    values: Mapping[str, JsonValue] = field(default_factory=dict)
    differences: Mapping[str, Difference] = field(default_factory=dict)


class ConfigChecker:
    """Asks the vLLM behind a server's command; starts its process when first asked.

    It never stands in a study's way: where vLLM cannot be asked, the answer is "accepted",
    with the reason in `error` and nothing resolved. An async context manager that closes it.
    """

    def __init__(self, server: ServerSpec, on_progress: ProgressSink | None = None) -> None:
        self._server = server
        self._on_progress: ProgressSink = on_progress or _silent
        self._asker: Asker | StandInAnswers | None = None
        self._restarted = False
        self._unavailable = ""

    async def __aenter__(self) -> ConfigChecker:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def ask(self, command: Sequence[str], env: Mapping[str, str]) -> ConfigAnswer:
        """Whether vLLM takes this server command (`tuner.engine.arguments.argv`).

        Args:
            env: what the configuration sets, on top of the server's environment.

        Returns:
            The cause of a refusal may lie in the environment (`cause.blame`), such as a
            model that is not there.
        """
        words = question_argv(command, self._server.model)
        answer = await self._answer({"ask": "config", "argv": words, "env": dict(env)})
        if isinstance(answer, str):
            return ConfigAnswer(accepted=True, error=answer)
        if answer["accepted"]:
            resolved = cast("dict[str, JsonValue]", answer["resolved"])
            return ConfigAnswer(accepted=True, resolved=resolved)
        error = _readable(str(answer["error"]))
        found = classify(error)
        return ConfigAnswer(
            accepted=False,
            error=error,
            cause=found.cause if found else FailureCause.BAD_CONFIG,
        )

    async def check_file(self, path: Path, meant: Sequence[str]) -> FileAnswer:
        """Read an exported file with vLLM's own parser.

        Args:
            meant: the server command that the file stands for. vLLM drops some keys without a
                word (`enable-prefix-caching: false`), and only a comparison shows that.
        """
        words = question_argv(meant, self._server.model)
        answer = await self._answer({"ask": "file", "path": str(path.absolute()), "meant": words})
        if isinstance(answer, str):
            return FileAnswer(accepted=True, known=False, error=answer)
        if not answer["accepted"]:
            return FileAnswer(accepted=False, error=_readable(str(answer["error"])))
        differences = cast("dict[str, dict[str, JsonValue]]", answer["differences"])
        return FileAnswer(
            accepted=True,
            values=cast("dict[str, JsonValue]", answer["values"]),
            differences={
                name: Difference(in_file=both["file"], meant=both["meant"])
                for name, both in differences.items()
                if name not in _CHOSEN_PER_TRIAL
            },
        )

    async def close(self) -> None:
        """End the process; safe to call more than once."""
        self._unavailable = "closed"
        if self._asker is not None:
            await self._asker.close()

    async def _answer(self, question: Mapping[str, object]) -> dict[str, object] | str:
        """vLLM's answer, or why there is none."""
        if self._asker is None and not self._unavailable:
            await self._start()
        if self._asker is None or self._unavailable:
            return self._unavailable
        try:
            return await self._asker.ask(question)
        except NoAnswer as error:
            await self._give_up_on(self._asker, str(error))
            return str(error)

    async def _give_up_on(self, asker: Asker | StandInAnswers, reason: str) -> None:
        """A process that is gone is started once more, for the next question."""
        if asker.is_alive:
            return
        await asker.close()
        self._asker = None
        if self._restarted:
            self._unavailable = reason
        self._restarted = True

    async def _start(self) -> None:
        try:
            python = find_python(self._server)
            if is_stand_in(self._server.command):
                self._asker = StandInAnswers(server_env(self._server))
            elif isinstance(python, CannotAsk):
                self._unavailable = python.reason
            elif await where_vllm_is(python) is None:
                self._unavailable = f"{python.path} has no vLLM installed"
            else:
                self._asker = await Asker.start(python, self._on_progress, FIRST_LIMIT_S)
        except EnvironmentProblem as problem:
            self._unavailable = problem.message


_CHOSEN_PER_TRIAL = frozenset({"host", "port", "disable-uvicorn-access-log"})


def _readable(error: str) -> str:
    """vLLM's complaint without what pydantic adds for programmers."""
    kept = [
        line.partition(" [type=")[0]
        for line in error.splitlines()
        if "For further information visit" not in line
    ]
    return "\n".join(kept).strip()


def _silent(progress: Progress) -> None:
    del progress
