"""The API process once it has started: serves until a signal or its engine's death."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Sequence

from aiohttp import web

from tuner.engine.simulated.log_format import LogEntry
from tuner.engine.simulated.server.api import Api
from tuner.engine.simulated.server.engine_client import EngineClient
from tuner.engine.simulated.server.faults import Faults
from tuner.engine.simulated.server.incidents import Incidents
from tuner.engine.simulated.server.served import Served
from tuner.engine.simulated.server.stats_line import tell_stats

_KEEP_ALIVE_S = 5.0
"""uvicorn's; vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE."""

# Measured with vLLM 0.32: /health is 503 at once, nobody listens after 0.15 to 0.35 s, and the
# process ends 0.5 to 1.3 s after its engine.
_LISTENS_ON_S = 0.2
_LIVES_ON_S = 0.4

_POLL_S = 0.05


def serve(
    served: Served,
    faults: Faults,
    sock: socket.socket,
    engine: tuple[int, socket.socket],
    last_lines: Sequence[LogEntry],
) -> int:
    """Serve on the bound `sock`; returns the exit code.

    Args:
        engine: process id of the engine and the line to it.
        last_lines: of the start, written as soon as the server listens.
    """
    return asyncio.run(_ApiProcess(served, faults, engine).run(sock, last_lines))


class _ApiProcess:
    def __init__(self, served: Served, faults: Faults, engine: tuple[int, socket.socket]) -> None:
        self._served = served
        self._faults = faults
        self._engine = EngineClient(*engine, self._on_death)
        incidents = Incidents(faults, served, self._engine, self._on_failure)
        self._api = Api(served, self._engine, faults, incidents.after)
        self._ending: asyncio.Future[int] | None = None
        self._exit_code = 0
        self._said_why = False

    async def run(self, sock: socket.socket, last_lines: Sequence[LogEntry]) -> int:
        """Listen, and wait for the end."""
        self._ending = asyncio.get_running_loop().create_future()
        runner = web.AppRunner(
            self._api.app(),
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=_KEEP_ALIVE_S,
            shutdown_timeout=0.0,
        )
        await runner.setup()
        site = web.SockSite(runner, sock, backlog=2048)
        await site.start()
        self._on_signals()
        self._served.log.lines(last_lines)
        listening = asyncio.create_task(self._engine.run())
        telling = asyncio.create_task(tell_stats(self._served, self._engine))
        try:
            code = await self._ending
            if self._engine.dead:
                await asyncio.sleep(_LISTENS_ON_S)
                await site.stop()
                await asyncio.sleep(_LIVES_ON_S)
            else:
                await self._shut_down(runner, site)
            return code
        finally:
            telling.cancel()
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening
            await runner.cleanup()

    # --- signals ---------------------------------------------------------------------------

    def _on_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            if self._faults.has("ignore_term"):
                signal.signal(number, signal.SIG_IGN)
            else:
                asyncio.get_running_loop().add_signal_handler(number, self._end, 0)

    def _end(self, code: int) -> None:
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(code)

    async def _shut_down(self, runner: web.AppRunner, site: web.SockSite) -> None:
        """End as vLLM does: the engine first, then HTTP, which waits for its clients.

        Whose request is under way never gets an answer; until all of them have closed their
        connections the process stays.
        """
        say = self._served.log.say
        say("launcher.py:254", "[shutdown] API server: shutdown triggered")
        self._api.stopping = True
        drain_s = float(str(self._served.command.value("shutdown-timeout") or 0))
        mode = "drain" if drain_s else "abort"
        say(
            "launcher.py:270",
            f"[shutdown] API server: stopping engine client mode={mode} timeout={drain_s:.0f}s",
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._engine.until_idle()
        if not self._faults.has("leave_engine"):
            self._engine.kill()
        say("launcher.py:304", "[shutdown] API server: shutting down FastAPI HTTP server")
        self._served.log.text("INFO:     Shutting down")
        await site.stop()
        server = runner.server
        assert server is not None
        server.pre_shutdown()
        await asyncio.sleep(0)  # idle connections close
        if server.connections:
            self._served.log.text(
                "INFO:     Waiting for connections to close. (CTRL+C to force quit)"
            )
        while server.connections:
            await asyncio.sleep(_POLL_S)
            server.pre_shutdown()
        self._served.log.text("INFO:     Application shutdown complete.")

    # --- the engine's death ------------------------------------------------------------------

    def _on_failure(self, exit_code: int) -> None:
        """The engine is about to die, and why is written."""
        self._exit_code = exit_code
        self._said_why = True

    def _on_death(self, told: bool) -> None:
        if not (told or self._said_why):
            say = self._served.log.say
            say("async_llm.py:792", "AsyncLLM output_handler failed.", level="ERROR")
            say(
                "async_llm.py:792",
                "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See "
                "stack trace (above) for the root cause.",
                level="ERROR",
            )
            say(
                "core_client.py:818",
                "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup",
                level="WARNING",
            )
        if not self._faults.has("engine_dead"):
            self._end(self._exit_code)
