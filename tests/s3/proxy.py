"""A reverse proxy before an S3 server that fails as networks and services do."""

from __future__ import annotations

import http.client
import os
import random
import socket
import struct
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

KINDS = ("slow_down", "internal_error", "reset", "lost_answer", "cut_off", "stall")
_STATUS = {"slow_down": (503, "SlowDown"), "internal_error": (500, "InternalError")}
_HOP_BY_HOP = {"connection", "keep-alive", "expect", "transfer-encoding"}


class FaultyProxy:
    """Passes requests on with their headers untouched (the signature covers `Host`); a share `faults` of them fails.

    `slow_down`, `internal_error`: 503 and 500 with S3's XML. `reset`: before the server has the request. `lost_answer`:
    reset when the server has done it. `cut_off`: reset in the middle of the body. `stall`: no answer for
    `stall_seconds`, then a reset. `injected` and `passed` count. Closed and ended by leaving the context.
    """

    methods: tuple[str, ...] = ("GET", "PUT", "POST", "HEAD", "DELETE")
    """The requests that may fail."""

    def __init__(self, port: int, *, faults: float, seed: int, stall_seconds: float) -> None:
        self.injected: Counter[str] = Counter()
        self.passed = 0
        self.upstream_port = port
        self.stall_seconds = stall_seconds
        self.ending = threading.Event()
        self._faults = faults
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self

    @property
    def url(self) -> str:
        """What clients call the S3 endpoint."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._server.serve_forever, name="faulty-proxy", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.ending.set()
        self._server.shutdown()
        self._server.server_close()

    def draw(self, method: str) -> str | None:
        """The fate of the next request: one of `KINDS`, or None; counted."""
        with self._lock:
            if method not in self.methods or self._random.random() >= self._faults:
                self.passed += 1
                return None
            kind = self._random.choice(KINDS)
            self.injected[kind] += 1
            return kind


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: FaultyProxy


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        proxy = self.server.proxy
        self.upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream_port, timeout=60)
        try:
            super().handle()
        except (ConnectionError, http.client.HTTPException):
            self.close_connection = True  # a client that no longer waits
        finally:
            self.upstream.close()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the counts say enough."""

    def _pass_on(self) -> None:
        fate = self.server.proxy.draw(self.command)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fate in _STATUS:
            self._refuse(*_STATUS[fate])
        elif fate == "reset":
            self._reset()
        elif fate == "stall":
            self.server.proxy.ending.wait(self.server.proxy.stall_seconds)
            self._reset()
        else:
            self._answer(fate, *self._ask(body))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP_BY_HOP:
                self.upstream.putheader(name, value)
        self.upstream.endheaders(body)
        response = self.upstream.getresponse()
        return response, response.read()

    def _answer(self, fate: str | None, response: http.client.HTTPResponse, body: bytes) -> None:
        if fate == "lost_answer":
            self._reset()
            return
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in {*_HOP_BY_HOP, "content-length"}:
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        if length is not None and response.status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fate == "cut_off" else body)
        self.wfile.flush()
        if fate == "cut_off":
            self._reset()

    def _refuse(self, status: int, code: str) -> None:
        xml = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(xml)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(xml.encode())
        self.wfile.flush()

    def _reset(self) -> None:
        """Close with RST. `detach`, because the socket stays open while `rfile` and `wfile` refer to it."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
