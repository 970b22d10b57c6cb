"""When bytes arrived at this machine, for as many connections as are open.

Sockets are watched by an epoll set of their own, which is itself one descriptor to asyncio:
what is ready is read in one go, without a pass through the event loop for each token.

Arrival times are the kernel's (`SO_TIMESTAMPNS`, socket(7)): taken when the packet came in, so
that a busy client is late to read but not wrong about when. Where the kernel gives none, it is
the time of reading.

With the kernel's times there is no hurry: where tokens come faster than that, reading pauses for
a part of the usual time between two tokens of a stream, and takes all that came meanwhile, as
network cards do with their interrupts. A wake-up costs ten times what reading a token does, and
the server may need the processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
import struct
import time
from typing import Protocol

PAUSE_PART = 1 / 8
"""Pauses are at most this part of the mean time between reads of one stream, so that two tokens
of one stream do not come together: only the later one's time is known then. An answer's end is
seen as much later, and with it the next request of a closed loop is sent."""

LONGEST_PAUSE_S = 0.005
SHORTEST_PAUSE_S = 0.002
"""Shorter ones are not worth their timer, which the event loop rounds up to milliseconds: below
16 ms a token there are none."""

_MEAN_OF = 64
"""The mean is of about so many reads."""

OVERDUE_S = 0.005

READ_BYTES = 1 << 16
"""Read at most at a time. Larger ones are dear: malloc(3) maps 128 KiB and more anew."""

_MAX_READY = 256
"""Read this many sockets, then let the event loop do something else."""

_SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)
_TIMESPEC = struct.Struct("@qq")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)

_CLOCK_READING_S = 20e-6
"""Two clocks are read within this time, or a pause in between spoilt it."""

_CLOCK_STEP_S = 0.001
"""The wall clock was set when it moves against the monotonic one by this much at once."""


class Reader(Protocol):
    """Who takes what arrived at a socket; hashable by identity."""

    def take(self, data: bytes, arrival_s: float) -> None:
        """Take bytes that arrived at `arrival_s` of `time.perf_counter`; b"" is the end."""

    def broke(self, problem: OSError) -> None:
        """The connection broke; nothing more will come."""


class _Watched:
    """A socket, who reads it, and when something last arrived."""

    __slots__ = ("last_s", "reader", "recvmsg")

    def __init__(self, sock: socket.socket, reader: Reader) -> None:
        self.recvmsg = sock.recvmsg
        self.reader = reader
        self.last_s = 0.0


class Arrivals:
    """Reads sockets as they become ready. Made and used in one running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._watched: dict[int, _Watched] = {}
        self._gap_s = 0.0
        self._wall_offset_s: float | None = None
        self._last_s = 0.0
        self._stamped = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._epoll.fileno(), self._on_ready)

    def watch(self, sock: socket.socket, reader: Reader) -> None:
        """Hand to `reader` what arrives at `sock`, which is non-blocking, until `forget`.

        Raises:
            OSError: closed.
        """
        if self._epoll.closed:
            raise OSError(errno.EBADF, "the client is closed")
        with contextlib.suppress(OSError):  # no such clock here: times of reading then
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._watched[sock.fileno()] = _Watched(sock, reader)
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def forget(self, sock: socket.socket) -> None:
        """Read no more from `sock`; to be called before it is closed."""
        if self._watched.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def catch_up(self) -> None:
        """Read now if that has not been done for long.

        To be called by what keeps the event loop busy, as sending a thousand requests at once:
        meanwhile two tokens of one stream might come, and be taken for one.
        """
        if time.perf_counter() - self._last_s > OVERDUE_S:
            self._read_ready()

    def close(self) -> None:
        """Stop watching; the sockets stay open."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._epoll.fileno())
        self._watched.clear()
        self._epoll.close()

    # --- reading -----------------------------------------------------------------------

    def _on_ready(self) -> None:
        last_s = self._last_s
        ready = self._read_ready()
        if self._epoll.closed:
            return
        pause_s = self._pause_s()
        if ready < _MAX_READY and self._last_s - last_s < pause_s:
            self._loop.remove_reader(self._epoll.fileno())
            self._timer = self._loop.call_later(pause_s, self._on_pause_over)

    def _on_pause_over(self) -> None:
        self._timer = None
        ready = self._read_ready()
        if self._epoll.closed:
            return
        pause_s = self._pause_s()
        if ready and pause_s:
            delay_s = pause_s if ready < _MAX_READY else 0.0  # more is there already
            self._timer = self._loop.call_later(delay_s, self._on_pause_over)
        else:
            self._loop.add_reader(self._epoll.fileno(), self._on_ready)

    def _pause_s(self) -> float:
        pause_s = min(self._gap_s * PAUSE_PART, LONGEST_PAUSE_S)
        return pause_s if self._stamped and pause_s >= SHORTEST_PAUSE_S else 0.0

    def _read_ready(self) -> int:
        """Read each ready socket once; returns how many there were."""
        ready = self._epoll.poll(0, _MAX_READY)
        offset_s = self._offset_s()
        for descriptor, _ in ready:
            watched = self._watched.get(descriptor)
            if watched is None:  # forgotten by a reader before it in this round
                continue
            try:
                data, ancillary, _, _ = watched.recvmsg(READ_BYTES, _ANCILLARY_BYTES)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as problem:
                watched.reader.broke(problem)
                continue
            arrival_s = time.perf_counter()
            if offset_s is not None and ancillary and len(ancillary[0][2]) == _TIMESPEC.size:
                seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
                arrival_s = min(arrival_s, seconds + nanoseconds * 1e-9 + offset_s)
                self._stamped = True
            if watched.last_s:
                self._note_gap(arrival_s - watched.last_s)
            watched.last_s = arrival_s
            watched.reader.take(data, arrival_s)
        self._last_s = time.perf_counter()
        return len(ready)

    def _note_gap(self, gap_s: float) -> None:
        """Keep the mean; waits for a first token, which are no such gaps, count as two at most."""
        mean_s = self._gap_s or gap_s
        self._gap_s = mean_s + (min(gap_s, 2 * mean_s) - mean_s) / _MEAN_OF

    def _offset_s(self) -> float | None:
        """`time.perf_counter` less the wall clock, in which the kernel's times are.

        None when it is not known yet, or the wall clock was just set: stamps of before and after
        cannot be told apart.
        """
        before_s = time.perf_counter()
        wall_s = time.time()
        now_s = time.perf_counter()
        last_s = self._wall_offset_s
        if now_s - before_s > _CLOCK_READING_S:
            return last_s
        self._wall_offset_s = offset_s = before_s - wall_s
        if last_s is not None and abs(offset_s - last_s) > _CLOCK_STEP_S:
            return None
        return offset_s
