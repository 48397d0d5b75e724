"""Small messages over a Unix socket, between a process and the child that decodes for it: length, JSON, descriptors."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

# Up to here a file is read at once by the child, or several together; above, by what asks for its parts.
WHOLE_BYTES = 16 * 2**20
READ_BYTES = 2**20  # asked of the parent at a time
# A plan of 100,000 frames is 2 MB, a page of a million letters 4,000,000 bytes.
_MAX_BYTES = 4 * 2**20
_MAX_FDS = 2
_LENGTH = struct.Struct("<I")


class ChannelClosed(Exception):
    """The other side has gone."""


class BadMessage(Exception):
    """What came is no message."""


def send(to: socket.socket, message: dict[str, Any], fds: Sequence[int] = (), *, deadline: float | None = None) -> None:
    """Send a message, with duplicates of descriptors. Raises `ChannelClosed`; TimeoutError at `deadline`
    (`time.monotonic`)."""
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    data = _LENGTH.pack(len(body)) + body
    try:
        _wait_until(to, deadline)
        sent = socket.send_fds(to, [data], fds) if fds else to.send(data)
        if sent < len(data):
            _wait_until(to, deadline)
            to.sendall(data[sent:])
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed(str(error)) from error


def receive(source: socket.socket, *, deadline: float | None = None) -> dict[str, Any]:
    """The next message; descriptors that come with it are not taken. Raises as `send` does, and `BadMessage`."""
    try:
        return _message(_read(source, _length(_read(source, _LENGTH.size, deadline)), deadline))
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed(str(error)) from error


def receive_with_fds(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message, and the descriptors that came with it. Raises as `receive` does."""
    first, fds, _, _ = socket.recv_fds(source, _LENGTH.size, _MAX_FDS)
    first += _read(source, _LENGTH.size - len(first), None) if first else b""
    if not first:
        raise ChannelClosed("closed")
    return _message(_read(source, _length(first), None)), fds


def _read(source: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    received = b""
    while len(received) < num_bytes:
        _wait_until(source, deadline)
        more = source.recv(num_bytes - len(received))
        if not more:
            raise ChannelClosed("closed")
        received += more
    return received


def _length(header: bytes) -> int:
    [length] = _LENGTH.unpack(header)
    if length > _MAX_BYTES:
        raise BadMessage(f"a message of {length:,} bytes")
    return int(length)


def _message(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage("not a JSON object")
    return message


def _wait_until(which: socket.socket, deadline: float | None) -> None:
    """Have what comes next raise TimeoutError at `deadline`."""
    if deadline is None:
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    which.settimeout(left)
