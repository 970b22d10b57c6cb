"""Connections to one server, kept open between requests."""

from __future__ import annotations

import asyncio
import resource
import socket
import time

from tuner.load.arrivals import Arrivals
from tuner.load.connection import Connection, Disconnected, SocketAddress, connect
from tuner.load.http_answer import BodySink, HttpAnswer

MOST_SOCKETS = 1 << 16

KEEPALIVE_S = 2.0
"""How long an idle connection is kept. vLLM closes its end after 5 s
(VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request sent into a connection that is just being closed
would be held against the configuration."""


class ConnectionPool:
    """As many connections to one server as there are requests in flight.

    Made, by `open`, and used in one running event loop.
    """

    def __init__(self) -> None:
        self._arrivals = Arrivals()
        self._unknown: OSError | None = None
        self._addresses: list[tuple[socket.AddressFamily, SocketAddress]] = []
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False

    @classmethod
    async def open(cls, host: str, port: int) -> ConnectionPool:
        """Look up the server's address, for all requests; of an unknown one, all fail."""
        _allow_many_sockets()
        pool = cls()
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as unknown:
            pool._unknown = unknown
        else:
            pool._addresses = [(family, address) for family, _, _, _, address in found]
        return pool

    async def post(self, payload: bytes, sink: BodySink) -> HttpAnswer:
        """Send a request over an idle connection, or a new one, and follow its answer.

        Raises:
            Disconnected: no connection could be made, or it broke.
        """
        connection = self._take_idle() or await self._connect()
        self._busy.add(connection)
        try:
            answer = await connection.exchange(payload, sink)
        finally:
            self._busy.discard(connection)
        if connection.usable and not self._closed:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close all connections at once, those of requests in flight too (they fail)."""
        if self._closed:
            return
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close("the client is closed")
        self._idle.clear()
        self._arrivals.close()

    def _take_idle(self) -> Connection | None:
        """The connection that was used last, if it is fresh; close those that are not."""
        oldest_s = time.perf_counter() - KEEPALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since_s > oldest_s:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        problem = self._unknown
        for family, address in self._addresses:
            if self._closed:
                raise Disconnected("the client is closed")
            try:
                connection = await connect(self._arrivals, family, address)
            except OSError as refused:
                problem = problem or refused
            else:
                self._addresses = [(family, address)]
                return connection
        raise Disconnected(f"cannot connect: {problem}") from problem


def _allow_many_sockets() -> None:
    """As many as the system lets this process have; the usual limit is 1024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_SOCKETS if hard == resource.RLIM_INFINITY else min(hard, MOST_SOCKETS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
