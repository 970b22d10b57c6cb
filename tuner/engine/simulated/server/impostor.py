"""Somebody else's server on our port: healthy, ready, and not ours."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

_LIVES_S = 120.0


def start_impostor(host: str, port: int, model: str) -> None:
    """Let another process listen on `host:port`, in a session of its own; returns at once.

    It looks like a vLLM that serves `model`: /health, /v1/models and completions of one token.
    """
    listening = socket.create_server((host, port))
    if os.fork():
        listening.close()
        return
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        server = HTTPServer((host, port), _handler(model), bind_and_activate=False)
        server.socket.close()
        server.socket = listening
        threading.Thread(target=server.serve_forever, daemon=True).start()
        time.sleep(_LIVES_S)
    finally:
        os._exit(0)


def _handler(model: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                self._answer(b"")
            elif self.path == "/v1/models":
                listed = {"object": "list", "data": [{"id": model, "max_model_len": 4096}]}
                self._answer(json.dumps(listed).encode())
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path != "/v1/completions":
                self.send_error(404)
                return
            choice = {"index": 0, "text": "not ours", "finish_reason": "length"}
            self._answer(json.dumps({"model": model, "choices": [choice]}).encode())

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the log is the other server's."""

    return Handler
