"""A vLLM server's life: its process, its log, its memory, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

from tuner.engine.kernel_kills import oom_kills, with_killer
from tuner.engine.logs import LogReader, cause_of_exit
from tuner.engine.process import SupervisedProcess
from tuner.engine.readiness import SERVER_ERRORS, ServerHttp
from tuner.metrics.device import DeviceMonitor
from tuner.types import DeviceUse, Failure, FailureCause, MemoryFacts

WATCH_S = 0.5
"""Between looks at a serving server's log."""

_HEALTH_S = 2.0
_SAMPLE_S = 1.0
"""Between questions to /health and samples of memory: each takes the machine some
milliseconds while the server is measured."""

_SICK_ANSWERS = 2
"""5xx from /health in a row that mean death: vLLM answers so once its engine is dead."""

_LAST_WORDS_S = 2.0
"""How long a dying server may take to write why."""

_READ_AT_ONCE = 256 * 2**10

_LOOK_S = 0.2
"""Longest look at a log: whoever looks also watches process, HTTP and clients."""

_TO_THE_END_S = 3.0
"""The same where a verdict depends on it."""

_FAR_BEHIND = 64 * 2**20
_CATCH_UP = 2**20
"""A log that grows faster than it can be read is read on near its end."""

_START_SLACK_S = 3.0
"""A process' start is known to a second: the boot time that it is counted from is rounded."""

_CLOCK_STEP_S = 1.0
_SPAWN_S = 10.0
"""From the birth of the process to the time when this program knows it."""


class Life:
    """What there is of one server, from the launch on.

    Attributes:
        log: what its log has said so far (see `look`).
        device: peaks of device and host memory since the launch.
    """

    def __init__(self, process: SupervisedProcess, log_path: Path, device: DeviceMonitor) -> None:
        self.process = process
        self.log = LogReader()
        self.device = device
        self._log_path = log_path
        self._offset = 0
        self._start_s = time.monotonic()
        self._launch_s = time.time()
        self._kills_before = oom_kills()
        self._decisive_s: float | None = None
        self._progress_s = self._start_s
        self._sampled_s = 0.0

    @property
    def age_s(self) -> float:
        """Since the launch."""
        return time.monotonic() - self._start_s

    @property
    def quiet_s(self) -> float:
        """How long ago its log last showed progress."""
        return time.monotonic() - self._progress_s

    @property
    def last_line(self) -> str:
        """Of its log, secrets masked; empty if there is none."""
        return self.log.tail().rpartition("\n")[2]

    @property
    def decisive_for_s(self) -> float:
        """How long ago the log ended all hope of a start; 0 if it has not."""
        return 0.0 if self._decisive_s is None else time.monotonic() - self._decisive_s

    def look(self, limit_s: float = _LOOK_S) -> None:
        """Read what the log has got since the last time, for so long at most."""
        before = self.log.progress
        deadline_s = time.monotonic() + limit_s
        # A log that was removed tells nothing more; process and HTTP still do.
        with contextlib.suppress(FileNotFoundError), self._log_path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._offset or size - self._offset > _FAR_BEHIND:
                self._offset = max(0, size - _CATCH_UP) if size > self._offset else size
            file.seek(self._offset)
            while data := file.read(_READ_AT_ONCE):
                self._offset += len(data)
                self.log.feed(data)
                if time.monotonic() >= deadline_s:
                    break
        if self.log.progress != before:
            self._progress_s = time.monotonic()
        if self._decisive_s is None and self.log.decisive:
            self._decisive_s = time.monotonic()

    def is_foreign(self, started_s: float) -> bool:
        """Whether a server that says it was started then was there before this launch.

        Args:
            started_s: seconds since the epoch.
        """
        launched_s = self.process.record.create_time
        by_clock_s = time.time() - self._launch_s
        # Both times are counted from a boot time that the kernel reckons from the clock: if
        # that was set meanwhile, or is not to be trusted here, they do not compare.
        clock_is_true = abs(by_clock_s - self.age_s) < _CLOCK_STEP_S
        if not clock_is_true or abs(launched_s - self._launch_s) > _SPAWN_S:
            return False
        return started_s < launched_s - _START_SLACK_S

    def sample(self) -> None:
        """Look at device and host memory.

        Raises:
            EnvironmentProblem: a device does not answer any more.
        """
        self._sampled_s = time.monotonic()
        self.device.sample(self.process.descendants())

    def sample_at_times(self) -> None:
        """The same, if the last time is some while ago."""
        if time.monotonic() - self._sampled_s >= _SAMPLE_S:
            self.sample()

    def failure(self) -> Failure | None:
        """What the log tells, up to its end; None if it tells of no failure."""
        self.look(_TO_THE_END_S)
        if self.process.exit_code is not None:
            self.log.finish()
        failure = self.log.failure()
        return None if failure is None else self._signed(failure)

    async def failure_of_exit(self, code: int) -> Failure:
        """Why the process has ended, with the last words of those it leaves behind."""
        await self._last_words()
        self.log.finish()
        failure = self.log.failure(code)
        if failure is None:  # it was stopped in order, but not by the tuner
            return self.failure_because(*cause_of_exit(code, self.log.stage))
        return self._signed(failure)

    async def failure_of_engine(self, line: str) -> Failure:
        """Why the engine is dead while the process lives; `line` if the log does not say."""
        await self._last_words()
        failure = self.log.failure(self.process.exit_code)
        if failure is not None:
            return self._signed(failure)
        return self.failure_because(FailureCause.CRASH, line)

    def failure_because(self, cause: FailureCause, line: str) -> Failure:
        """A failure that the tuner saw and the log does not tell."""
        return self._signed(Failure(cause, self.log.stage, line, excerpt=self.log.tail()))

    def _signed(self, failure: Failure) -> Failure:
        return replace(
            with_killer(failure, self._kills_before),
            log_path=self._log_path,
            exit_code=self.process.exit_code,
            memory=self.log.memory,
        )

    async def _last_words(self) -> None:
        """Read on until the cause is known, or nothing more comes."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        quiet = 0
        while not self.log.explained and quiet < 3 and time.monotonic() < deadline_s:
            before = self._offset
            self.look()
            ended = self.process.exit_code is not None
            quiet = quiet + 1 if ended and self._offset == before else 0
            await asyncio.sleep(0.1)


class VllmServer:
    """A vLLM that serves; implements `tuner.engine.base.Server`.

    Made by `VllmLauncher`, which calls `serve` once it is ready.
    """

    def __init__(self, http: ServerHttp, life: Life) -> None:
        self.http = http
        self._life = life
        self._memory = MemoryFacts()
        self._death: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[Failure] | None = None

    @property
    def base_url(self) -> str:
        """See `tuner.engine.base.Server`."""
        return self.http.base_url

    @property
    def model_name(self) -> str:
        """See `tuner.engine.base.Server`."""
        return self.http.model_name

    @property
    def memory(self) -> MemoryFacts:
        """See `tuner.engine.base.Server`."""
        return self._memory

    def device_use(self) -> DeviceUse:
        """See `tuner.engine.base.Server`."""
        self._life.sample()
        return self._life.device.use()

    def energy_j(self, start_s: float, end_s: float) -> float | None:
        """See `tuner.engine.base.Server`."""
        return self._life.device.energy.between_j(start_s, end_s)

    async def died(self) -> Failure:
        """See `tuner.engine.base.Server`."""
        return await asyncio.shield(self._death)

    def examine(self) -> Failure | None:
        """See `tuner.engine.base.Server`."""
        if self._death.done():
            return self._death.result()
        failure = self._life.failure()
        return None if failure is None else replace(failure, memory=self._memory)

    def serve(self, memory: MemoryFacts) -> None:
        """It is ready: begin to watch it."""
        self._memory = memory
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._on_death)

    async def stop(self) -> None:
        """See `tuner.engine.base.Server`."""
        if self._watching is not None:
            self._watching.cancel()
        try:
            await self.http.close()
        finally:
            await self._life.process.stop()

    def _on_death(self, watching: asyncio.Task[Failure]) -> None:
        if watching.cancelled():
            return
        if (problem := watching.exception()) is not None:
            self._death.set_exception(problem)
        else:
            self._death.set_result(replace(watching.result(), memory=self._memory))

    async def _watch(self) -> Failure:
        """Until the server dies: why."""
        exiting = asyncio.create_task(self._life.process.wait())
        sickening = asyncio.create_task(self._sick())
        try:
            return await self._first_sign_of_death(exiting, sickening)
        finally:
            exiting.cancel()
            sickening.cancel()

    async def _first_sign_of_death(
        self, exiting: asyncio.Task[int], sickening: asyncio.Task[None]
    ) -> Failure:
        while True:
            await asyncio.wait(
                {exiting, sickening}, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED
            )
            if exiting.done():
                return await self._life.failure_of_exit(exiting.result())
            self._life.look()
            if self._life.log.engine_dead:
                return await self._life.failure_of_engine("the engine is dead")
            if sickening.done():
                return await self._life.failure_of_engine("/health says that the engine is dead")
            self._life.sample_at_times()

    async def _sick(self) -> None:
        """Return when /health says again and again that the engine is dead.

        No answer in time is what a busy server gives, too.
        """
        sick = 0
        while sick < _SICK_ANSWERS:
            await asyncio.sleep(_HEALTH_S)
            status = await self.http.health()
            sick = sick + 1 if status is not None and status >= SERVER_ERRORS else 0
