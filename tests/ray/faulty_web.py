"""A web server with as many different media as anybody asks for, some of them broken, that fails now and then."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import zlib
from collections import Counter
from pathlib import Path

from tests.media.web_server import Handler, Web

FAULTS = ("unavailable", "reset", "cut_off", "stall")


def is_broken(number: int, share: float) -> bool:
    """Whether the medium with that number is cut in half; the same ones each time."""
    return random.Random(number).random() < share


def numbered(data: bytes, suffix: str, number: int) -> bytes:
    """A JPEG, PNG or MP4 with bytes of its own that no decoder shows: a comment, a text, a box that is free."""
    note = b"%012d" % number
    if suffix == ".jpg":
        return data[:2] + b"\xff\xfe" + (len(note) + 2).to_bytes(2, "big") + note + data[2:]
    if suffix == ".png":
        chunk = b"tEXt" + b"number\0" + note
        whole = (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
        return data[:-12] + whole + data[-12:]
    assert suffix == ".mp4"
    return data + (len(note) + 8).to_bytes(4, "big") + b"free" + note


class FaultyMedia:
    """Answers `/NUMBER.SUFFIX` of `web` from `files`, by the number; a share `faults` of requests fails, and counts.

    `unavailable`: 503. `reset`: before an answer. `cut_off`: in the middle of a whole body. `stall`: no answer for
    `stall_seconds`, then a reset. A share `broken` of media is cut in half.
    """

    def __init__(
        self, web: Web, files: list[Path], *, faults: float, broken: float, stall_seconds: float, seed: int
    ) -> None:
        self.injected: Counter[str] = Counter()
        self._web = web
        self._files = [(path.read_bytes(), path.suffix) for path in files]
        self._faults, self._broken, self._stall_seconds = faults, broken, stall_seconds
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def calm(self) -> None:
        """Fail no more."""
        self._faults = 0.0

    def list(self, numbers: range) -> list[str]:
        """The URLs of so many media."""
        urls = []
        for number in numbers:
            path = f"/{number}{self._files[number % len(self._files)][1]}"
            self._web.answers[path] = lambda handler, number=number: self._answer(handler, number)
            urls.append(self._web.url(path))
        return urls

    def _answer(self, handler: Handler, number: int) -> None:
        data, suffix = self._files[number % len(self._files)]
        data = numbered(data, suffix, number)
        if is_broken(number, self._broken):
            data = data[: len(data) // 2]
        with self._lock:
            fault = self._random.choice(FAULTS) if self._random.random() < self._faults else None
            if fault == "cut_off" and handler.headers.get("Range"):
                fault = "unavailable"  # whoever asks for a byte, to learn the size, does not read on
            if fault is not None:
                self.injected[fault] += 1
        if fault == "unavailable":
            handler.reply(503, b"later", Retry_After="0")
        elif fault is None:
            handler.reply_object(data, ETag=f'"{number}"')
        else:
            if fault == "stall":
                self._web.ending.wait(self._stall_seconds)
            if fault == "cut_off":
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(data)))
                handler.end_headers()
                handler.wfile.write(data[: len(data) // 3])
                handler.wfile.flush()
            _reset(handler)


def _reset(handler: Handler) -> None:
    """Close with RST. `detach`, because the socket stays open while `rfile` and `wfile` refer to it."""
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(handler.connection.detach())
