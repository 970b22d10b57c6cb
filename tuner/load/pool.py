"""Connections to one server, kept open between requests."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import time

from tuner.errors import EnvironmentProblem
from tuner.load.arrivals import Arrivals
from tuner.load.connection import Connection, Disconnected, SocketAddress, connect
from tuner.load.http_answer import BodySink, HttpAnswer

MOST_SOCKETS = 1 << 16

_OTHER_FILES = 128
"""Open files of this process that are no connections of the load: logs, database, pipes."""

_LACKING = {
    errno.EMFILE: "Raise this process's limit of open files (`ulimit -n`), or ask for less load.",
    errno.ENFILE: "Raise the machine's limit of open files (fs.file-max), or ask for less load.",
    errno.EADDRNOTAVAIL: (
        "All local ports are in use: widen net.ipv4.ip_local_port_range, wait a minute for those "
        "of ended connections, or ask for less load."
    ),
    errno.ENOBUFS: "Free memory for the kernel's buffers, or ask for less load.",
    errno.ENOMEM: "Free memory for the kernel's buffers, or ask for less load.",
}
"""What of this machine's a connection may lack, and what helps; none of it is the server's."""

KEEPALIVE_S = 2.0
"""How long an idle connection is kept. vLLM closes its end after 5 s
(VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request sent into a connection that is just being closed
would be held against the configuration."""


class NoMoreConnections(EnvironmentProblem):
    """This machine lets the client have no further connection: what it would see is void.

    Args:
        code: one of `errno`, of those that are this machine's own.
    """

    def __init__(self, code: int) -> None:
        super().__init__(
            f"the load generator can open no further connection to the server: {os.strerror(code)}",
            _LACKING[code],
        )


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
            NoMoreConnections: this machine has none left.
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
        lacking = []
        for family, address in self._addresses:
            if self._closed:
                raise Disconnected("the client is closed")
            try:
                connection = await connect(self._arrivals, family, address)
            except OSError as refused:
                problem = problem or refused
                lacking.append(refused.errno)
            else:
                self._addresses = [(family, address)]
                return connection
        # Of several addresses one may just be of a kind that this machine has not (IPv6).
        if lacking and lacking[0] is not None and all(code in _LACKING for code in lacking):
            raise NoMoreConnections(lacking[0]) from problem
        raise Disconnected(f"cannot connect: {problem}") from problem


def most_connections() -> int:
    """How many this process can have at a time, by its limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST_SOCKETS if hard == resource.RLIM_INFINITY else min(hard, MOST_SOCKETS)
    return max(1, files - _OTHER_FILES)


def _allow_many_sockets() -> None:
    """As many as the system lets this process have; the usual limit is 1024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_SOCKETS if hard == resource.RLIM_INFINITY else min(hard, MOST_SOCKETS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
