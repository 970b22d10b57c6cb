"""A connection to an HTTP server: one request out, its answer in, then the next."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import time

from tuner.load.arrivals import Arrivals
from tuner.load.http_answer import BodySink, HttpAnswer

LOOPBACK_WAIT_MS = 1
"""A handshake with this machine takes some 10 us, unless the kernel is busy."""

SocketAddress = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


class Disconnected(Exception):
    """No connection, or it ended before the answer did."""


class Connection:
    """One TCP connection, with one request at a time.

    Args:
        sock: connected and non-blocking; it is the connection's from now on.

    Attributes:
        idle_since_s: end of the last answer.
    """

    def __init__(self, arrivals: Arrivals, sock: socket.socket) -> None:
        self.idle_since_s = 0.0
        self._arrivals = arrivals
        self._sock = sock
        self._answer: HttpAnswer | None = None
        self._last_s = 0.0
        self._ended: asyncio.Future[Disconnected | None] | None = None
        arrivals.watch(sock, self)

    @property
    def usable(self) -> bool:
        """Whether the next request can be sent."""
        return self._sock.fileno() >= 0

    async def exchange(self, payload: bytes, sink: BodySink) -> HttpAnswer:
        """Send a request and follow its answer to the end; closes itself where it ends badly.

        Raises:
            Disconnected: the connection broke, or was closed, before the answer's end.
        """
        answer = self._answer = HttpAnswer(sink)
        ended = self._ended = asyncio.get_running_loop().create_future()
        self._last_s = time.perf_counter()
        rest = self._send(payload)
        self._arrivals.catch_up()
        try:
            if rest:
                await self._send_rest(rest, ended)
            problem = await ended
        finally:
            self._answer = self._ended = None
            if not answer.reusable:
                self.close()
        if problem is not None:
            raise problem
        self.idle_since_s = time.perf_counter()
        return answer

    def close(self, reason: str = "the client closed the connection") -> None:
        """Close at once; a request in flight fails with `reason`."""
        if self.usable:
            self._arrivals.forget(self._sock)
            self._sock.close()
        self._end(Disconnected(reason))

    # --- called when something arrived --------------------------------------------------

    def take(self, data: bytes, arrival_s: float) -> None:
        """Hand arrived bytes to the answer; b"" is the end of the connection."""
        answer = self._answer
        if answer is None:  # idle: the server hung up, or speaks unasked
            self.close()
        elif data:
            # A wall clock that was set must not make time run backwards.
            self._last_s = arrival_s = max(arrival_s, self._last_s)
            answer.feed(data, arrival_s)
            if answer.ended:
                self._end(None)
        else:
            in_order = answer.feed_eof()
            self._end(None if in_order else Disconnected("the server closed the connection"))

    def broke(self, problem: OSError) -> None:
        """The connection was reset."""
        self.close(str(problem))

    # --- inside -------------------------------------------------------------------------

    def _end(self, problem: Disconnected | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(problem)

    def _send(self, payload: bytes) -> memoryview:
        """Send what the socket takes at once; returns the rest."""
        try:
            sent = self._sock.send(payload)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:  # shows, after any answer that came before it, in what can be read
            sent = len(payload)
        return memoryview(payload)[sent:]

    async def _send_rest(
        self, rest: memoryview, ended: asyncio.Future[Disconnected | None]
    ) -> None:
        """Send on until all is sent, or the answer has ended without it (a 413)."""
        loop = asyncio.get_running_loop()
        sending = loop.create_task(loop.sock_sendall(self._sock, rest))
        try:
            await asyncio.wait((sending, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def connect(
    arrivals: Arrivals, family: socket.AddressFamily, address: SocketAddress
) -> Connection:
    """Open a connection.

    To this machine that is done in one go, so that a request leaves in the same step of
    the event loop: those that start together do not wait for each other's connecting.

    Raises:
        OSError: as the system says it.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await _handshake(sock, address)
        return Connection(arrivals, sock)
    except BaseException:
        sock.close()
        raise


async def _handshake(sock: socket.socket, address: SocketAddress) -> None:
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS and _is_loopback(address):
        waiting = select.poll()
        waiting.register(sock, select.POLLOUT)
        waiting.poll(LOOPBACK_WAIT_MS)
    if code == errno.EINPROGRESS:  # ask how it went
        code = sock.connect_ex(address)
    if code in (errno.EALREADY, errno.EINPROGRESS):
        await asyncio.get_running_loop().sock_connect(sock, address)
    elif code not in (0, errno.EISCONN):
        raise OSError(code, os.strerror(code))


def _is_loopback(address: SocketAddress) -> bool:
    host = address[0]
    return isinstance(host, str) and (host.startswith("127.") or host == "::1")
