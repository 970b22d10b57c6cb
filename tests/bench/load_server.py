#!/usr/bin/env python3
"""A server that streams tokens at a set pace, as vLLM writes them, and notes when it did.

    python tests/bench/load_server.py --record FILE --step 0.02 --tokens 200 [--streams 64]

Prints its port. Every request gets `--tokens` tokens, one `--step` seconds after the other, each
an event, a chunk and a write of its own. A stream's place within the step follows from its
number, so that tokens of all streams are spread evenly and alike for every client. `--step 0`:
as fast as they are taken, eight events a write.

On SIGTERM the record is written (`Record`) and the server ends. Clock: `time.perf_counter`
(CLOCK_MONOTONIC, the same in all processes of the machine).
"""

from __future__ import annotations

import argparse
import errno
import heapq
import json
import re
import resource
import select
import signal
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

MODEL = "benchmark"
FIRST_TOKEN_S = 0.05
"""From a request to its first token, at least."""

FLAT_OUT_EVENTS = 8

_NUMBER = re.compile(rb"request (\d+)\b")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)
_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True)
class Record:
    """What a server did; rows of writes are in the order of writing.

    Attributes:
        numbers: of the requests, one a request, in the order of their coming.
        received_s: when each had come, by the kernel.
        writer: which request a write was for.
        before_s, after_s: around each write of a token; the token left in between.
        cpu_s: processor time of the server between first and last write.
    """

    numbers: np.ndarray
    received_s: np.ndarray
    writer: np.ndarray
    before_s: np.ndarray
    after_s: np.ndarray
    cpu_s: float

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read what `Server.save` wrote."""
        with np.load(path) as data:
            return cls(
                **{name: data[name] for name in data.files if name != "cpu_s"},
                cpu_s=float(data["cpu_s"]),
            )


def chunk(event: bytes) -> bytes:
    """An event as a chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def token_event(request_id: str, text: str, finish_reason: str | None = None) -> bytes:
    """As vLLM 0.32 writes it."""
    choice = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": None,
    }
    return _event(_message(request_id) | {"choices": [choice]})


def last_events(request_id: str, tokens: int) -> bytes:
    """Usage and end of a stream, as chunks, with the end of the body."""
    usage = {"prompt_tokens": 32, "total_tokens": 32 + tokens, "completion_tokens": tokens}
    end = _event(_message(request_id) | {"choices": [], "usage": usage})
    return chunk(end) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _message(request_id: str) -> dict[str, object]:
    return {"id": request_id, "object": "text_completion", "created": 1796116837, "model": MODEL}


def _event(message: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


@dataclass(slots=True)
class Stream:
    """A connection, and the answer that is being written to it."""

    sock: socket.socket
    asked: bytearray = field(default_factory=bytearray)
    request: int = -1
    left: int = 0
    usual: bytes = b""
    first: bytes = b""
    last: bytes = b""
    end: bytes = b""
    unsent: bytes = b""


class Server:
    """Accepts, reads requests, and writes what is due, all in one thread.

    Args:
        step_s: from token to token; 0 for as fast as possible.
        tokens: of each answer.
        streams: how many places there are within a step.
    """

    def __init__(self, step_s: float, tokens: int, streams: int) -> None:
        self._step_s = step_s
        self._tokens = tokens
        self._streams = streams
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._open: dict[int, Stream] = {}
        self._due: list[tuple[float, int, Stream]] = []
        self._eager: dict[int, Stream] = {}
        self._stopped = False
        self._numbers, self._writer = array("q"), array("q")
        self._received_s, self._before_s, self._after_s = array("d"), array("d"), array("d")
        self._cpu_at_first_s = 0.0
        self._cpu_at_last_s = 0.0

    def serve(self) -> None:
        """Serve until SIGTERM."""
        signal.signal(signal.SIGTERM, self._stop)
        while not self._stopped:
            self._write_due()
            for descriptor, events in self._epoll.poll(self._patience_s(), 256):
                if descriptor == self._listener.fileno():
                    self._accept()
                elif events & select.EPOLLOUT:
                    self._resume(self._open[descriptor])
                elif descriptor in self._open:
                    self._read(self._open[descriptor])

    def save(self, path: Path) -> None:
        """Write the record."""
        np.savez(
            path,
            numbers=np.asarray(self._numbers),
            received_s=np.asarray(self._received_s),
            writer=np.asarray(self._writer),
            before_s=np.asarray(self._before_s),
            after_s=np.asarray(self._after_s),
            cpu_s=self._cpu_at_last_s - self._cpu_at_first_s,
        )

    def _stop(self, *_: object) -> None:
        self._stopped = True

    def _patience_s(self) -> float:
        if self._eager:
            return 0.0
        if not self._due:
            return 0.2
        return min(0.2, max(0.0, self._due[0][0] - time.perf_counter()))

    # --- requests -----------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            self._open[sock.fileno()] = Stream(sock)
            self._epoll.register(sock, select.EPOLLIN)

    def _read(self, stream: Stream) -> None:
        try:
            data, ancillary, _, _ = stream.sock.recvmsg(1 << 16, 64)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._close(stream)
            return
        now_s = time.perf_counter()
        if ancillary:
            seconds, nanoseconds = struct.unpack("@qq", ancillary[0][2])
            now_s -= max(0.0, time.time() - seconds - nanoseconds * 1e-9)
        stream.asked += data
        head, separator, body = bytes(stream.asked).partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if separator and len(body) >= (int(length[1]) if length else 0):
            stream.asked.clear()
            self._answer(stream, head, body, now_s)

    def _answer(self, stream: Stream, head: bytes, body: bytes, now_s: float) -> None:
        if not head.startswith(b"POST"):
            listed = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
            content = json.dumps(listed).encode()
            head = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            stream.sock.send(head % len(content) + content)
            return
        found = _NUMBER.search(body)
        number = int(found[1]) if found else -1
        request_id = f"cmpl-{len(self._numbers):016x}"
        stream.request, stream.left = len(self._numbers), self._tokens
        self._numbers.append(number)
        self._received_s.append(now_s)
        self._cpu_at_first_s = self._cpu_at_first_s or time.process_time()
        # The text names the request, for clients that keep the text and not the order.
        stream.first = _HEAD + chunk(token_event(request_id, f"answer {number}"))
        stream.usual = chunk(token_event(request_id, " always"))
        stream.last = chunk(token_event(request_id, " end", "length"))
        stream.end = last_events(request_id, self._tokens)
        if self._step_s == 0:
            self._eager[stream.sock.fileno()] = stream
            return
        phase_s = self._step_s * (number % self._streams) / self._streams
        steps = (now_s + FIRST_TOKEN_S - phase_s) // self._step_s + 1
        heapq.heappush(self._due, (steps * self._step_s + phase_s, stream.request, stream))

    def _close(self, stream: Stream) -> None:
        descriptor = stream.sock.fileno()
        if descriptor in self._open:
            del self._open[descriptor]
            self._eager.pop(descriptor, None)
            self._epoll.unregister(descriptor)
            stream.sock.close()
        stream.left = 0

    # --- answers ------------------------------------------------------------------------

    def _write_due(self) -> None:
        now_s = time.perf_counter()
        due = self._due
        while due and due[0][0] <= now_s:
            due_s, request, stream = due[0]
            if not stream.left:  # it hung up
                heapq.heappop(due)
                continue
            self._write(stream, 1)
            if stream.left:
                heapq.heapreplace(due, (due_s + self._step_s, request, stream))
            else:
                heapq.heappop(due)
        for stream in list(self._eager.values()):
            self._write(stream, min(stream.left, FLAT_OUT_EVENTS))

    def _write(self, stream: Stream, tokens: int) -> None:
        data = stream.unsent + b"".join(self._token(stream) for _ in range(tokens))
        before_s = time.perf_counter()
        try:
            sent = stream.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(stream)
            return
        after_s = time.perf_counter()
        for _ in range(tokens):
            self._writer.append(stream.request)
            self._before_s.append(before_s)
            self._after_s.append(after_s)
        if not stream.left:
            data += stream.end
            sent += self._send_end(stream) if sent + len(stream.end) == len(data) else 0
        self._cpu_at_last_s = time.process_time()
        stream.unsent = data[sent:]
        if stream.unsent:
            self._eager.pop(stream.sock.fileno(), None)
            self._epoll.modify(stream.sock, select.EPOLLIN | select.EPOLLOUT)
        elif not stream.left:
            self._eager.pop(stream.sock.fileno(), None)

    @staticmethod
    def _send_end(stream: Stream) -> int:
        try:
            return stream.sock.send(stream.end)
        except OSError:
            return 0

    def _token(self, stream: Stream) -> bytes:
        stream.left -= 1
        if stream.left == self._tokens - 1:
            return stream.first
        return stream.usual if stream.left else stream.last

    def _resume(self, stream: Stream) -> None:
        """Send what did not fit."""
        try:
            stream.unsent = stream.unsent[stream.sock.send(stream.unsent) :]
        except OSError as problem:
            if problem.errno != errno.EAGAIN:
                self._close(stream)
            return
        if not stream.unsent:
            self._epoll.modify(stream.sock, select.EPOLLIN)
            if stream.left and self._step_s == 0:
                self._eager[stream.sock.fileno()] = stream


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--step", type=float, required=True, help="seconds")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--streams", type=int, default=1)
    given = parser.parse_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))
    server = Server(given.step, given.tokens, given.streams)
    print(server.port, flush=True)
    server.serve()
    server.save(given.record)


if __name__ == "__main__":
    main()
