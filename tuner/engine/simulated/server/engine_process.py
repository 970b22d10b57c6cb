"""The engine's process: the simulated engine, paced by the clock on the wall.

Like vLLM's EngineCore it is a child of the API process, in its process group, and does not
notice that process' death: it lives on until somebody ends it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from tuner.engine.simulated.engine import SimulatedEngine
from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.server.messages import Word, counters_to_list, decode, encode
from tuner.engine.simulated.server.shared import name_process
from tuner.engine.simulated.server.worker import kill_worker, start_worker
from tuner.types import JsonValue

TOLD = 70
"""Exit code of an engine that has written why it ends."""

_ORPHANED_S = 600.0
"""How long it waits, without an API process, for whoever ends it: for ever, nearly."""

_DYING_S = 0.5
"""From SIGTERM to its end, so that the API process, which gets one too, is first."""

_MOST_STEPS = 1 << 16
_READ_AT_ONCE = 1 << 16

Obituary = Callable[[StartFailure], None]
"""Writes what vLLM says when its engine dies of something."""


def start_engine(
    engine: SimulatedEngine,
    *,
    speed: float,
    stubborn: bool,
    worker_of: str | None,
    obituary: Obituary,
    not_its: socket.socket,
) -> tuple[int, socket.socket]:
    """Fork the engine's process.

    Args:
        speed: seconds of the engine's in a second.
        stubborn: it ignores SIGTERM.
        worker_of: it has a worker, that can be killed; the version to log.
        not_its: the API process' socket; it must not stay open when that process is gone.

    Returns:
        Its process id and this end of the line to it.
    """
    here, there = socket.socketpair()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            here.close()
            not_its.close()
            name_process("VLLM::EngineCore")
            _EngineProcess(engine, there, speed, stubborn, worker_of, obituary).run()
        except _Gone:
            code = 0
        except _Died:
            code = TOLD
        finally:
            os._exit(code)  # nothing of what the API process has at exit may happen twice
    there.close()
    return pid, here


class _Gone(Exception):
    """Nobody needs this process any more."""


class _Died(Exception):
    """The engine died, and said so."""


class _EngineProcess:
    def __init__(
        self,
        engine: SimulatedEngine,
        line: socket.socket,
        speed: float,
        stubborn: bool,
        worker_of: str | None,
        obituary: Obituary,
    ) -> None:
        self._engine = engine
        self._line = line
        self._speed = speed
        self._stubborn = stubborn
        self._obituary = obituary
        self._begin_s = time.monotonic()
        self._rest = b""
        self._hanging = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it counts from SERVE on
        self._version = worker_of or ""
        self._worker = None if worker_of is None else start_worker()

    def run(self) -> NoReturn:
        """Take requests and compute, for ever."""
        while True:
            idle = self._hanging or not self._engine.busy
            for message in self._messages(wait=idle):
                if idle:
                    self._engine.advance_to(self._clock_s())
                self._obey(message)
            if self._engine.busy and not self._hanging:
                self._compute()

    def _clock_s(self) -> float:
        """On the engine's clock."""
        return (time.monotonic() - self._begin_s) * self._speed

    def _compute(self) -> None:
        """One step, or as many as are overdue."""
        engine = self._engine
        result = engine.step(max_steps=_MOST_STEPS, until_s=self._clock_s())
        if result.died is not None:
            self._obituary(result.died)
            raise _Died
        early_s = (engine.now_s - self._clock_s()) / self._speed
        if early_s > 0:
            time.sleep(early_s)
        ended: list[JsonValue] = [request_id for request_id, _ in result.finished]
        emitted: list[JsonValue] = list(result.emitted)
        counters = counters_to_list(engine.counters)
        self._say(encode(Word.TOKENS, len(result.ends_s), emitted, ended, counters))

    def _obey(self, message: list[JsonValue]) -> None:
        match message:
            case [Word.ADD, str(request_id), list(prompt), int(max_tokens)]:
                self._engine.add(request_id, [int(str(t)) for t in prompt], max_tokens)
            case [Word.ABORT, str(request_id)]:
                self._engine.abort(request_id)
                self._say(encode(Word.TOKENS, 0, [], [], counters_to_list(self._engine.counters)))
            case [Word.RESET]:
                self._say(encode(Word.WAS_RESET, self._engine.reset_prefix_cache()))
            case [Word.SERVE]:
                if not self._stubborn:
                    signal.signal(signal.SIGTERM, _end_soon)
            case [Word.HANG]:
                self._hanging = True
            case [Word.LOSE_WORKER] if self._worker is not None:
                kill_worker(self._worker, self._version)
                raise _Died

    def _messages(self, *, wait: bool) -> list[list[JsonValue]]:
        """What has come; with `wait`, at least something."""
        chunk = b""
        try:
            chunk = self._line.recv(_READ_AT_ONCE, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            pass
        if not chunk:
            self._linger()
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [decode(line) for line in lines]

    def _say(self, message: bytes) -> None:
        try:
            self._line.sendall(message)
        except OSError:
            self._linger()

    def _linger(self) -> NoReturn:
        """The API process is dead; vLLM's engine does not notice."""
        time.sleep(_ORPHANED_S)
        raise _Gone


def _end_soon(*_: object) -> None:
    time.sleep(_DYING_S)
    raise _Gone
