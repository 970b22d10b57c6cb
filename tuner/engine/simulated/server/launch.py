"""From the command line to a server, or to the way in which vLLM refuses to become one."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from tuner.engine.simulated.failures import StartFailure
from tuner.engine.simulated.log_format import Pids
from tuner.engine.simulated.memory import MemoryPlan, plan_memory
from tuner.engine.simulated.server import environment, fault_kinds
from tuner.engine.simulated.server.argument_words import UnreadableArguments
from tuner.engine.simulated.server.command_line import (
    RefusedArguments,
    ServeCommand,
    read_command,
)
from tuner.engine.simulated.server.environment import StandIn, stand_in
from tuner.engine.simulated.server.faults import (
    Fault,
    Faults,
    faults_of_launch,
    read_faults,
)
from tuner.engine.simulated.server.impostor import start_impostor
from tuner.engine.simulated.server.log_output import Log
from tuner.engine.simulated.server.resolve import digest_of, resolve
from tuner.engine.simulated.server.start_play import EngineLost, StartPlay
from tuner.engine.simulated.settings import EngineSettings
from tuner.engine.simulated.words import VERSION, lines_of, start_lines
from tuner.errors import ExitCode, InputError
from tuner.types import FailureCause, Stage

HELP = f"""\
A stand-in for vLLM {VERSION}: its command line, its HTTP interface, its log and its
ways of failing, on an engine that only computes how long a GPU would take.

{environment.HELP}
{fault_kinds.help_text()}
"""


def main(words: Sequence[str]) -> int:
    """Run `vllm` with these words; returns its exit code.

    A code below 0 is a signal, with which this process ends itself.
    """
    begin_s = time.monotonic()
    try:
        told = stand_in(os.environ)
        faults = read_faults(told.fault)
        command = read_command(words, version=told.version, help_text=HELP)
        code = _Launch(told, command, begin_s).run(faults)
    except RefusedArguments as refused:
        print(f"{refused.usage}{refused.line}", file=sys.stderr, flush=True)
        code = 2
    except UnreadableArguments as problem:
        print(f"Traceback (most recent call last):\n{problem}", file=sys.stderr, flush=True)
        code = 1
    except InputError as problem:
        print(f"stand-in: error: {problem}", file=sys.stderr, flush=True)
        code = ExitCode.INPUT
    except KeyboardInterrupt:
        code = -signal.SIGINT
    if code < 0:
        with contextlib.suppress(OSError):  # KILL cannot be handled anyway
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


class _Launch:
    """One start and what becomes of it."""

    def __init__(self, told: StandIn, command: ServeCommand, begin_s: float) -> None:
        self._told = told
        self._command = command
        self._begin_s = begin_s
        self._begun = datetime.now()
        # Of the engine's process once there is one.
        self._log = Log(Pids(os.getpid(), os.getpid() + 1, os.getpid() + 1), told.version)

    def run(self, asked: Sequence[Fault]) -> int:
        """Start, and serve to the end; the exit code."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # vLLM swallows it while it starts
        settings = resolve(self._command, self._told, os.environ)
        known = None if isinstance(settings, StartFailure) else settings
        faults = faults_of_launch(asked, self._command, known)
        play = StartPlay(self._log, faults, self._begin_s, self._told.start_speed)
        play.noise()
        if (replay := faults.get("replay")) is not None:
            self._log.raw(Path(replay.text("file")).read_bytes())
            return int(replay.number("exit"))
        if isinstance(settings, StartFailure):
            return self._fail(play, settings)
        return self._start(play, faults, settings)

    def _start(self, play: StartPlay, faults: Faults, settings: EngineSettings) -> int:
        plan = plan_memory(settings)
        sized = MemoryPlan() if isinstance(plan, StartFailure) else plan
        if (other := faults.get("other_server")) is not None:
            host = self._command.host
            start_impostor(host, self._command.port, self._command.served_names[0])
            time.sleep(other.number("seconds"))
        try:
            sock = self._bind()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise InputError(
                    f"{self._command.host}:{self._command.port} cannot be listened on: {error}"
                ) from None
            taken = FailureCause.PORT_IN_USE
            return self._fail(
                play, StartFailure(taken, Stage.LAUNCH, settings=settings, plan=sized)
            )
        if isinstance(plan, StartFailure):
            return self._fail(play, plan)
        failing = faults.of_cause(under_load=False)
        if failing is not None and failing.cause not in (None, FailureCause.HANG):
            failure = StartFailure(
                failing.cause,
                failing.stage,
                exit_code=failing.exit_code,
                settings=settings,
                plan=plan,
            )
            return self._fail(play, failure)
        return self._serve(play, faults, settings, plan, sock)

    def _serve(
        self,
        play: StartPlay,
        faults: Faults,
        settings: EngineSettings,
        plan: MemoryPlan,
        sock: socket.socket,
    ) -> int:
        from tuner.engine.simulated.engine import SimulatedEngine
        from tuner.engine.simulated.server.engine_process import TOLD, start_engine
        from tuner.engine.simulated.server.messages import Word, encode
        from tuner.engine.simulated.server.shared import share

        seeds = (self._told.seed, digest_of(self._command))
        engine = SimulatedEngine(settings, plan, seed=seeds, noise=self._told.noise)
        share(sock)
        pid, line = start_engine(
            engine,
            speed=self._told.speed,
            stubborn=faults.has("leave_engine"),
            worker_of=self._told.version if faults.has("worker_killed") else None,
            obituary=self._obituary,
            not_its=sock,
        )
        play.engine_pid = pid
        play.lose_worker = lambda: line.sendall(encode(Word.LOSE_WORKER))
        self._log.pids = pids = Pids(os.getpid(), pid, pid)
        # Imported while the engine's process gets ready, and not at all where a start fails.
        from tuner.engine.simulated.server.metrics_page import Metrics
        from tuner.engine.simulated.server.served import Served
        from tuner.engine.simulated.server.serving import serve

        port = self._command.port
        lines = start_lines(settings, plan, port=port, pids=pids, begun=self._begun)
        try:
            last_lines = play.until_ready(lines)
        except EngineLost as lost:
            code = 1 if lost.exit_code == TOLD else lost.exit_code
            self._log.text(_CORE_FAILED.format(code=code))
            return 1
        metrics = Metrics(self._command.served_names[0], settings, plan)
        served = Served(
            self._command, settings, plan, engine, metrics, self._log, self._told.version
        )
        return serve(served, faults, sock, (pid, line), last_lines)

    def _bind(self) -> socket.socket:
        """The socket that will listen; vLLM binds it before it loads the model.

        Raises:
            OSError: somebody else listens there.
        """
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self._command.host, self._command.port))
        return sock

    def _fail(self, play: StartPlay, failure: StartFailure) -> int:
        play.until_ready(
            lines_of(failure, port=self._command.port, pids=self._log.pids, begun=self._begun)
        )
        return failure.exit_code

    def _obituary(self, failure: StartFailure) -> None:
        """For the engine's process."""
        pids = Pids(os.getppid(), os.getpid(), os.getpid())
        Log(pids, self._told.version).obituary(failure)


_CORE_FAILED = (
    "Traceback (most recent call last):\n"
    "RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {{'EngineCore': {code}}}"
)
