"""Waits before a start until the last server's memory and port are free again.

A driver frees memory some time after the process that held it is gone, and a start meanwhile
fails for a reason that is not its configuration's. What was in use before the first start
counts as others' and is not waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tuner.errors import EnvironmentProblem
from tuner.metrics.device import DeviceMonitor
from tuner.metrics.host import Host, ThisHost
from tuner.types import Progress, ProgressSink

GIVE_UP_S = 60.0
"""How long memory may take to come back: a driver unpins 64 GiB in many seconds, not a minute."""

PORT_LIMIT_S = 10.0
"""How long to wait for the last port, which the next server does not need: it tells of a
server that no process is seen of, as behind `docker run`."""

POLL_S = 0.25

DEVICE_TOLERANCE_GIB = 0.3
"""What another's monitor or display may come to use; a server's smallest rest, a CUDA context,
is more."""

HOST_TOLERANCE = 0.25
"""Share of the host's memory that others may come to use: on a machine with other work, less
would stop studies for nothing. A server's own is free as soon as its processes are gone."""

_STEADY_GIB = 0.02
"""Two readings that differ by more are of memory that is still being freed."""

_STEADY_LIMIT_S = 15.0
"""How long the first start waits for steady readings: others may be at work for ever."""

_NAMING_S = 2.0
"""Between looks at who holds what is waited for."""


def shared_tolerance_gib(total_gib: float) -> float:
    """Growth of others' files in /dev/shm that is let pass.

    Small where it is small, as in a container with 64 MiB; never as much as an offload region.
    """
    return min(max(0.016, 0.05 * total_gib), 1.0)


@dataclass(frozen=True, slots=True)
class _Reading:
    device_gib: tuple[float, ...]
    shared_gib: float
    host_gib: float


@dataclass(frozen=True, slots=True)
class _Want:
    """Something that is not free yet.

    Attributes:
        of: completes "waiting for ...".
        what: for a person, with numbers, before the names of those who hold it.
        holders: gives these names.
        limit_s: when to give up.
        is_vital: giving up ends the study; else it is started all the same.
    """

    of: str
    what: str
    holders: Callable[[], list[str]]
    hint: str
    limit_s: float = GIVE_UP_S
    is_vital: bool = True


class Settling:
    """Waits before each start of a study's servers.

    Attributes:
        last_port: of the last server; set by who chooses it.
    """

    def __init__(
        self,
        host: Host | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.last_port: int | None = None
        self._host = host or ThisHost()
        self._clock = clock
        self._sleep = sleep
        self._first: dict[tuple[str, ...], _Reading] = {}  # by the GPUs' UUIDs
        self._named = ""
        self._name_at_s = 0.0

    async def wait(self, device: DeviceMonitor, on_progress: ProgressSink) -> None:
        """Return when device memory, shared memory, host memory and the last port are free.

        That is, used no more than before the first start; of a device by two readings that
        agree. Without GPUs one look is enough, unless something is missing.

        Raises:
            EnvironmentProblem: memory stays in use; names who holds it. Or a device does not
                answer any more.
        """
        start_s = self._clock()
        self._name_at_s = start_s
        last: _Reading | None = None
        while True:
            now = self._read(device)
            elapsed_s = self._clock() - start_s
            is_steady = not now.device_gib or (last is not None and _agree(now, last))
            if device.uuids not in self._first:
                if is_steady or elapsed_s >= _STEADY_LIMIT_S:
                    self._first[device.uuids] = now
                    return
            else:
                wants = self._wants(now, self._first[device.uuids], device)
                if not wants and is_steady:
                    return
                if self._given_up(wants, elapsed_s) and is_steady:
                    return
                for want in wants[:1]:
                    on_progress(self._progress(want, elapsed_s))
            last = now
            await self._sleep(POLL_S)

    def _progress(self, want: _Want, elapsed_s: float) -> Progress:
        now_s = self._clock()
        if now_s >= self._name_at_s:  # it takes a look at every process
            self._name_at_s = now_s + _NAMING_S
            names = want.holders()
            self._named = f" ({names[0]}{' and others' if names[1:] else ''})" if names else ""
        what = f"{want.what}{self._named}"
        return Progress(f"waiting for {want.of}", elapsed_s, want.limit_s, what)

    def _read(self, device: DeviceMonitor) -> _Reading:
        shared = self._host.shared_memory_gib()
        return _Reading(
            device.memory_used_gib(),
            0.0 if shared is None else shared[0],
            self._host.memory_gib()[0],
        )

    def _given_up(self, wants: list[_Want], elapsed_s: float) -> bool:
        """Whether to start although something is not free.

        Raises:
            EnvironmentProblem: it cannot go on without.
        """
        for want in wants:
            if want.is_vital and elapsed_s >= want.limit_s:
                who = ", ".join(want.holders()) or "no process that can be seen from here"
                raise EnvironmentProblem(
                    f"{want.what}, {elapsed_s:.0f} s after the last server has ended, "
                    f"in use by {who}",
                    want.hint,
                )
        return bool(wants) and all(not w.is_vital and elapsed_s >= w.limit_s for w in wants)

    def _wants(self, now: _Reading, first: _Reading, device: DeviceMonitor) -> list[_Want]:
        wants = self._of_devices(now, first, device)
        shared = self._host.shared_memory_gib()
        if shared is not None:
            grown_gib = now.shared_gib - first.shared_gib
            if grown_gib > shared_tolerance_gib(shared[1]):
                wants.append(
                    _Want(
                        "shared memory",
                        f"/dev/shm still holds {grown_gib:.1f} GiB more than at first",
                        self._host.shared_memory_holders,
                        "Remove the files that nobody needs, or wait for their processes, "
                        f"{_AGAIN}",
                    )
                )
        # Where there are GPUs, the host's memory is not what a start fails for.
        grown_gib = now.host_gib - first.host_gib
        if not now.device_gib and grown_gib > HOST_TOLERANCE * self._host.memory_gib()[1]:
            wants.append(
                _Want(
                    "host memory",
                    f"the machine still uses {grown_gib:.1f} GiB more than at first",
                    self._host.memory_holders,
                    f"End what else needs much memory, or wait for it, {_AGAIN}",
                )
            )
        if self.last_port is not None and self._host.listens(self.last_port):
            what = f"somebody still listens at port {self.last_port}"
            wants.append(_Want("the port", what, list, "", PORT_LIMIT_S, is_vital=False))
        return wants

    def _of_devices(self, now: _Reading, first: _Reading, device: DeviceMonitor) -> list[_Want]:
        pairs = zip(now.device_gib, first.device_gib, strict=True)
        grown = [used - before for used, before in pairs]
        busy = [index for index, more in enumerate(grown) if more > DEVICE_TOLERANCE_GIB]
        if not busy:
            return []

        def holders() -> list[str]:
            found = [str(holder) for index in busy for holder in device.holders(index)]
            return list(dict.fromkeys(found))

        what = ", ".join(f"GPU {index} still holds {grown[index]:.1f} GiB" for index in busy)
        hint = (
            f"End these processes, or wait for them, {_AGAIN} In a container, those outside of it "
            "are not seen: `nvidia-smi` on the host names them."
        )
        return [_Want("device memory", what, holders, hint)]


_AGAIN = "and run the same command again: the study continues."


def _agree(one: _Reading, other: _Reading) -> bool:
    pairs = zip(one.device_gib, other.device_gib, strict=True)
    return all(abs(now - then) <= _STEADY_GIB for now, then in pairs)
