"""One HTTP/1 answer, taken apart by llhttp (`httptools`) as it arrives."""

from __future__ import annotations

from collections.abc import Callable

import httptools

BodySink = Callable[[bytes, float], bool]
"""Takes a part of the body and when it arrived; False when it makes no sense to read on.
Where the body is sent in chunks, as vLLM sends each event, a part is never more than one."""

MAX_HEAD_BYTES = 1 << 16
MAX_ERROR_BODY_BYTES = 1 << 14

HTTP_OK = 200


class HttpAnswer:
    """What has arrived of one answer.

    Args:
        sink: takes the body of an answer 200. Of any other, the first bytes are kept.

    Attributes:
        status: 0 before the head of the final answer is complete (1xx are passed over).
        error: why it is no answer to go on with; "" if it is one.
        error_body: of another status than 200, its first `MAX_ERROR_BODY_BYTES`.
        ended: nothing more is to be read: it is complete, hopeless, or the sink has enough.
        reusable: the connection can carry the next request.
    """

    def __init__(self, sink: BodySink) -> None:
        self.status = 0
        self.error = ""
        self.error_body = b""
        self.ended = False
        self.reusable = False
        self._sink = sink
        self._now_s = 0.0
        self._head_bytes = 0
        self._sized = False
        self._encoding = b""
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes that arrived at `now_s`."""
        self._now_s = now_s
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as problem:
            self.reusable = False
            if not self.ended:
                self._give_up(f"broken HTTP: {problem}")
        if not self.status and self._head_bytes > MAX_HEAD_BYTES:
            self._give_up("broken HTTP: headers without end")

    def feed_eof(self) -> bool:
        """The server closed the connection; whether that was the answer's proper end.

        It is where the answer has no length and no chunks (HTTP/1.0).
        """
        self.ended = True
        return self.status != 0 and not self._sized

    # --- called by the parser -----------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head begins: the first, one after a 1xx, or one that nobody asked for."""
        self.reusable = False
        self._sized = False
        self._encoding = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Remember what matters for reading the body."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._sized = True
        elif name == b"content-encoding":
            self._encoding = value.strip().lower()

    def on_headers_complete(self) -> None:
        """The final answer is judged by its status; informational ones are passed over."""
        status = self._parser.get_status_code()
        if self.ended or 100 <= status < 200:
            return
        self.status = status
        if status == HTTP_OK and self._encoding not in (b"", b"identity"):
            self._give_up(f"compressed ({self._encoding.decode(errors='replace')}), unasked for")

    def on_body(self, data: bytes) -> None:
        """A part of the body; one chunk at most."""
        if self.ended:
            return
        if self.status == HTTP_OK:
            self.ended = not self._sink(data, self._now_s)
        else:
            self.error_body += data[: MAX_ERROR_BODY_BYTES - len(self.error_body)]
            self.ended = len(self.error_body) >= MAX_ERROR_BODY_BYTES

    def on_message_complete(self) -> None:
        """The end of an answer, or of a 1xx."""
        if self.status and not self.ended:
            self.ended = True
            self.reusable = self._parser.should_keep_alive()

    def _give_up(self, error: str) -> None:
        self.error = error
        self.ended = True
