"""The API process' side of the engine: requests in flight, and the engine's life."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable

from tuner.engine.simulated.counters import EngineCounters
from tuner.engine.simulated.server.engine_process import TOLD
from tuner.engine.simulated.server.messages import Word, counters_from_list, decode, encode
from tuner.types import JsonValue

_LONGEST_MESSAGE = 16 * 2**20


class EngineDead(Exception):
    """The engine has died; nothing more comes of a request."""


class Answer:
    """The tokens of one request as they come."""

    __slots__ = ("_dead", "_ended", "_pending", "_waiter")

    def __init__(self) -> None:
        self._pending = 0
        self._ended = False
        self._dead = False
        self._waiter: asyncio.Future[None] | None = None

    async def more(self) -> tuple[int, bool]:
        """How many tokens have come since the last call (at least one), and whether that is all.

        Raises:
            EngineDead: no more will come.
        """
        while not self._pending:
            if self._dead:
                raise EngineDead
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pending, self._pending = self._pending, 0
        return pending, self._ended

    def take(self, tokens: int, *, ended: bool) -> None:
        """Some have come."""
        self._pending += tokens
        self._ended = ended
        self._wake()

    def give_up(self) -> None:
        """None will come."""
        self._dead = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class EngineClient:
    """Talks to the engine's process; `run` must be running.

    Args:
        on_death: called once when the engine has died without being told to; with whether it
            has written why.

    Attributes:
        counters: as of its last step.
        dead: whether it has died.
    """

    def __init__(self, pid: int, line: socket.socket, on_death: Callable[[bool], None]) -> None:
        self.pid = pid
        self.counters = EngineCounters()
        self.dead = False
        self._line = line
        self._on_death = on_death
        self._answers: dict[str, Answer] = {}
        self._idle = asyncio.Event()
        self._number = 0
        self._resets: list[asyncio.Future[bool]] = []
        self._stopping = False
        self._writer: asyncio.StreamWriter | None = None

    def submit(self, prompt: list[int], max_tokens: int) -> tuple[str, Answer]:
        """Send a request; its id and its answer.

        Raises:
            EngineDead: there is no engine.
        """
        if self.dead:
            raise EngineDead
        self._number += 1
        request_id, answer = str(self._number), Answer()
        self._answers[request_id] = answer
        ids: list[JsonValue] = list(prompt)
        self._send(encode(Word.ADD, request_id, ids, max_tokens))
        return request_id, answer

    def abort(self, request_id: str) -> None:
        """Drop a request, if it is not answered yet."""
        if self._answers.pop(request_id, None) is not None:
            self._send(encode(Word.ABORT, request_id))

    async def until_idle(self) -> None:
        """Wait until all requests are answered."""
        while self._answers:
            self._idle.clear()
            await self._idle.wait()

    async def reset_prefix_cache(self) -> bool:
        """Whether it was possible."""
        if self.dead:
            raise EngineDead
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append(done)
        self._send(encode(Word.RESET))
        return await done

    def hang(self) -> None:
        """Let it compute no more."""
        self._send(encode(Word.HANG))

    def lose_worker(self) -> None:
        """Let its worker be killed."""
        self._send(encode(Word.LOSE_WORKER))

    def kill(self) -> None:
        """End the engine's process on purpose: no death to tell of, no word to who waits."""
        self._stopping = True
        self.murder()

    def murder(self) -> None:
        """End the engine's process, as somebody else would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def run(self) -> None:
        """Listen to the engine until it is gone."""
        reader, self._writer = await asyncio.open_connection(
            sock=self._line, limit=_LONGEST_MESSAGE
        )
        self._send(encode(Word.SERVE))
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._hear(decode(line))
        _, status = await asyncio.to_thread(os.waitpid, self.pid, 0)
        if not self._stopping:
            self._bury(told=os.waitstatus_to_exitcode(status) == TOLD)

    def _send(self, message: bytes) -> None:
        if self._writer is not None and not self.dead:
            self._writer.write(message)

    def _hear(self, message: list[JsonValue]) -> None:
        match message:
            case [Word.TOKENS, int(steps), list(emitted), list(ended), list(counters)]:
                self.counters = counters_from_list(counters)
                for request_id in ended:
                    if (answer := self._answers.pop(str(request_id), None)) is not None:
                        answer.take(steps, ended=True)
                for request_id in emitted:
                    if (answer := self._answers.get(str(request_id))) is not None:
                        answer.take(steps, ended=False)
                if not self._answers:
                    self._idle.set()
            case [Word.WAS_RESET, bool(done)]:
                reset = self._resets.pop(0)
                if not reset.done():  # who asked may have gone
                    reset.set_result(done)

    def _bury(self, *, told: bool) -> None:
        self.dead = True
        self._on_death(told)
        for answer in self._answers.values():
            answer.give_up()
        self._answers.clear()
        self._idle.set()
        for reset in self._resets:
            if not reset.done():
                reset.set_exception(EngineDead())
