"""A small HTTPS or HTTP server on loopback with a certificate of its own authority, whose answers tests script."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import trustme

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers by the path; what there is no answer for is 404."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        web = self.server.web
        web.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        web.clients.add(self.client_address)
        answer = web.answers.get(self.path.partition("?")[0])
        if answer is None:
            self.reply(404, b"nothing here")
        else:
            answer(self)

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        """A whole answer; names of headers are written with _ for -."""
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def reply_object(self, data: bytes, *, ranges: bool = True, **headers: str) -> None:
        """As object stores answer: parts, as long as the `If-Range` is the object's."""
        asked = self.headers.get("Range")
        if asked is None or not ranges or self.headers.get("If-Range", headers.get("ETag")) != headers.get("ETag"):
            self.reply(200, data, **headers)
            return
        start, stop = (int(part) for part in asked.removeprefix("bytes=").split("-"))
        if start >= len(data):
            self.reply(416, b"<html>", Content_Type="text/html", Content_Range=f"bytes */{len(data)}", **headers)
            return
        part = data[start : stop + 1]
        self.reply(206, part, Content_Range=f"bytes {start}-{start + len(part) - 1}/{len(data)}", **headers)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


class _Server(ThreadingHTTPServer):
    web: Web
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Clients that hang up are a part of the tests."""


class Web:
    """`answers` by path; `asked` are the (path, headers) of requests; `clients` the connections that they came on."""

    def __init__(self, context: ssl.SSLContext | None = None, *, address: str = "127.0.0.1") -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.clients: set[Any] = set()
        self.ending = threading.Event()
        self._server = _Server((address, 0), Handler)
        self._server.web = self
        self.scheme = "http" if context is None else "https"
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def url(self, path: str, host: str = "localhost") -> str:
        """The URL of `path` under a name of the server."""
        return f"{self.scheme}://{host}:{self.port}{path}"

    def hold(self, path: str, data: bytes, **options: Any) -> str:
        """Has an object at `path`; its URL."""
        self.answers[path] = lambda handler: handler.reply_object(data, **options)
        return self.url(path)

    def redirect(self, path: str, location: str, status: int = 302) -> str:
        """Has `path` lead to `location`; its URL."""
        self.answers[path] = lambda handler: handler.reply(status, Location=location)
        return self.url(path)

    def __enter__(self) -> Web:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.ending.set()
        self._server.shutdown()
        self._server.server_close()


def make_authority(folder: Path, *names: str) -> tuple[ssl.SSLContext, str]:
    """(a server's context with a certificate for `names`, the file of the authority that signed it)."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    file = folder / "authority.pem"
    authority.cert_pem.write_to_path(str(file))
    return context, str(file)
