"""A conversation with a vLLM in its own process (see `tuner/engine/probe/ask_vllm.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tuner.engine.flags import FlagTable
from tuner.errors import EnvironmentProblem
from tuner.redact import redact_text
from tuner.types import Progress, ProgressSink

PROBE = Path(__file__).parent / "probe" / "ask_vllm.py"

IMPORT_LIMIT_S = 300.0
"""Importing vLLM takes 5 to 12 s from a warm disk, minutes from a cold network file system."""

_IMPORT_USUAL_S = 10.0
_WHERE_LIMIT_S = 60.0
ANSWER_LIMIT_S = 20.0
"""A configuration is checked in 0.1 s; a model that is only on the hub may take seconds."""

_LONGEST_LINE = 16 * 2**20

Answer = dict[str, object]


class NoAnswer(Exception):
    """The process is dead, hangs, or said something else; its question stays open."""


@dataclass(frozen=True, slots=True)
class VllmPython:
    """An interpreter that vLLM is, or may be, installed in.

    Attributes:
        env: the whole environment to run it with.
        required: whether the server's command cannot work if vLLM is not there.
    """

    path: str
    env: Mapping[str, str]
    required: bool


async def where_vllm_is(python: VllmPython) -> Answer | None:
    """Folder, version and age of its vLLM, at once, without importing it; None if it has none.

    Raises:
        EnvironmentProblem: this Python does not run.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(python.path, str(PROBE), "where"),
            env=dict(python.env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentProblem(
            f"{python.path} cannot be started: {error.strerror}",
            "Check `server: command:` and the environment it belongs to.",
        ) from error
    try:
        async with asyncio.timeout(_WHERE_LIMIT_S):
            out, err = await process.communicate()
        answer = json.loads(out)
    except (TimeoutError, ValueError) as error:
        detail = "" if isinstance(error, TimeoutError) else _tail(err)
        raise EnvironmentProblem(
            f"{python.path} does not say where vLLM is{detail}",
            f"Try it by hand: {python.path} {PROBE} where",
        ) from error
    finally:
        await _kill(process)
    return answer if answer["found"] else None


class Asker:
    """A Python process that has imported vLLM and answers questions; made by `start`.

    Questions are answered one after another. The process ends when this one does, however
    that happens: it reads its questions from a pipe and stops at its end.
    """

    def __init__(self, process: asyncio.subprocess.Process, noise: IO[bytes]) -> None:
        self._process = process
        self._noise = noise
        self._lock = asyncio.Lock()
        self._asked = 0

    @classmethod
    async def start(
        cls, python: VllmPython, on_progress: ProgressSink, limit_s: float = IMPORT_LIMIT_S
    ) -> Asker:
        """Start the process and wait until it has imported vLLM.

        Raises:
            EnvironmentProblem: vLLM cannot be imported, or not within `limit_s`.
        """
        noise = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        process = await asyncio.create_subprocess_exec(
            *(python.path, str(PROBE), "answer"),
            env=dict(python.env),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=noise,
            limit=_LONGEST_LINE,
            start_new_session=True,
        )
        asker = cls(process, noise)
        try:
            await asker._greet(python, on_progress, limit_s)
        except BaseException:
            await asker.close()
            raise
        return asker

    async def ask(self, question: Mapping[str, object]) -> Answer:
        """The answer to `question`, which the probe describes.

        Raises:
            NoAnswer: there is none within ANSWER_LIMIT_S (plus a margin), now or any more.
        """
        limit_s = ANSWER_LIMIT_S
        async with self._lock:
            self._asked += 1
            line = {"id": self._asked, "timeout_s": limit_s, **question}
            try:
                self._stdin.write(json.dumps(line).encode() + b"\n")
                async with asyncio.timeout(limit_s + 10):
                    await self._stdin.drain()
                    answer = await self._read()
                if answer.get("id") != self._asked:
                    raise NoAnswer(f"an answer to another question: {answer}")
            except (TimeoutError, OSError, asyncio.CancelledError, NoAnswer) as error:
                # The next answer would be the one to this question.
                await _kill(self._process)
                if isinstance(error, asyncio.CancelledError | NoAnswer):
                    raise
                raise NoAnswer(f"vLLM's own check does not answer: {error!r}") from error
        if "unanswered" in answer:
            raise NoAnswer(str(answer["unanswered"]))
        return answer

    @property
    def is_alive(self) -> bool:
        """Whether it can still answer."""
        return self._process.returncode is None

    async def flags(self) -> FlagTable:
        """All flags of `vllm serve`.

        Raises:
            EnvironmentProblem: it cannot say.
        """
        try:
            return FlagTable.from_json(await self.ask({"ask": "flags"}))
        except (NoAnswer, ValueError, TypeError, KeyError) as error:
            raise EnvironmentProblem(
                f"vLLM does not tell its flags: {error!r}{self._noise_tail()}",
                "Try `vllm serve --help=all`; this version may be too old or too new.",
            ) from error

    async def close(self) -> None:
        """End the process; safe to call more than once."""
        self._stdin.close()
        await _kill(self._process)
        self._noise.close()

    @property
    def _stdin(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None
        return self._process.stdin

    async def _read(self) -> Answer:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise NoAnswer(f"its process has ended with {await self._process.wait()}")
        try:
            answer: Answer = json.loads(line)
        except ValueError as error:
            raise NoAnswer("not JSON") from error
        return answer

    async def _greet(self, python: VllmPython, on_progress: ProgressSink, limit_s: float) -> None:
        """Wait for the first line, telling how long it takes."""
        start_s = time.monotonic()
        reading = asyncio.create_task(self._read())
        try:
            while not reading.done():
                elapsed_s = time.monotonic() - start_s
                if elapsed_s > limit_s:
                    raise _not_importable(python, f"not ready after {limit_s:.0f} s", "")
                on_progress(Progress("asking vLLM", elapsed_s, _IMPORT_USUAL_S))
                await asyncio.wait({reading}, timeout=0.25)
            greeting = reading.result()
        except NoAnswer as error:
            raise _not_importable(python, str(error), self._noise_tail()) from error
        finally:
            reading.cancel()
        if "broken" in greeting:
            raise _not_importable(python, str(greeting["broken"]), self._noise_tail())

    def _noise_tail(self) -> str:
        self._noise.seek(0)
        return _tail(self._noise.read())


def _not_importable(python: VllmPython, reason: str, tail: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"vLLM cannot be imported by {python.path}: {redact_text(reason)}{tail}",
        f"Mend that installation; this must work: {python.path} -c 'import vllm'",
    )


def _tail(output: bytes, lines: int = 8) -> str:
    """The last lines of what a process said, indented, for an error message."""
    said = redact_text(output[-8000:].decode(errors="replace")).splitlines()[-lines:]
    return "".join(f"\n    {line}" for line in said)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the process and what it has forked, and collect it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    await asyncio.shield(asyncio.ensure_future(process.wait()))


def question_argv(command: Sequence[str], model: str) -> list[str]:
    """The part of a server's command that vLLM's own parser reads, as `vllm serve` has it."""
    words = list(command)
    if "serve" in words:
        return words[words.index("serve") :]
    module = next((i for i, word in enumerate(words) if "api_server" in word), None)
    rest = words[module + 1 :] if module is not None else []
    if "--model" in rest:
        at = rest.index("--model")
        del rest[at : at + 2]
    return ["serve", model, *rest]
