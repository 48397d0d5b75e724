"""Small messages over a Unix socket, between a process and the child that decodes for it: length, JSON, descriptors."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

# A plan of 100,000 frames is 2 MB.
_MAX_BYTES = 4 * 2**20
_MAX_FDS = 2
_CHUNK_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")


class ChannelClosed(Exception):
    """The other side has gone."""


class BadMessage(Exception):
    """What came is no message."""


def send(to: socket.socket, message: dict[str, Any], fds: Sequence[int] = (), *, deadline: float | None = None) -> None:
    """Send a message, with duplicates of descriptors. Raises `ChannelClosed`; TimeoutError at `deadline`
    (`time.monotonic`)."""
    body = json.dumps(message, separators=(",", ":")).encode()
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
        _wait_until(source, deadline)
        return _rest(source, source.recv(_CHUNK_BYTES), deadline)
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed(str(error)) from error


def receive_with_fds(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message, and the descriptors that came with it. Raises as `receive` does."""
    first, fds, _, _ = socket.recv_fds(source, _CHUNK_BYTES, _MAX_FDS)
    return _rest(source, first, None), fds


def _rest(source: socket.socket, data: bytes, deadline: float | None) -> dict[str, Any]:
    received = bytearray(data)
    while (missing := _missing(received)) > 0:
        _wait_until(source, deadline)
        more = source.recv(min(missing, _CHUNK_BYTES)) if data else b""
        if not more:
            raise ChannelClosed("closed")
        received += more
    if missing < 0:
        raise BadMessage("it says more than one thing at a time")
    try:
        message = json.loads(received[_LENGTH.size :])
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage("not a JSON object")
    return message


def _missing(received: bytes | bytearray) -> int:
    """Bytes up to the end of the message, or of its length as long as that is not there."""
    if len(received) < _LENGTH.size:
        return _LENGTH.size - len(received)
    [length] = _LENGTH.unpack_from(received)
    if length > _MAX_BYTES:
        raise BadMessage(f"a message of {length:,} bytes")
    return int(_LENGTH.size + length - len(received))


def _wait_until(which: socket.socket, deadline: float | None) -> None:
    """Have what comes next raise TimeoutError at `deadline`."""
    if deadline is None:
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    which.settimeout(left)
