"""The real child, but for items that end in an order, which it follows instead of decoding them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import pipeline.media.sandbox_child as child
from pipeline.errors import ItemError
from pipeline.media import document

MARK = b"\nORDER:"
HUGE = 2**40
real_answer, real_decode, real_probe, real_mmap = child.answer, child._decode, child._probe, mmap.mmap
real_count, real_text = document.read_page_count, document.page_text
parent_socket: list[int] = []
items = 0


def order_of(file: BinaryIO) -> tuple[str, str]:
    """(name, argument) of the order that a file ends in; ("", "") for a file to decode."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
    data = file.read()
    file.seek(0)
    name, _, argument = data.rpartition(MARK)[2].decode().partition(" ") if MARK in data else ("", "", "")
    return name, argument


def answer(request: dict[str, Any], file: BinaryIO, output: memoryview) -> Any:
    """What a child says that is not ours any more."""
    global items
    items += 1
    match order_of(file):
        case "say", what:
            return eval(what)
        case "write", what:
            os.write(parent_socket[0], eval(what))
            return {"shown": [0.0]}
        case "drip", _:
            os.write(parent_socket[0], (1000).to_bytes(4, "little"))
            while True:
                time.sleep(0.2)
                os.write(parent_socket[0], b" ")
    return real_answer(request, file, output)


def probe(request: dict[str, Any], file: BinaryIO) -> dict[str, Any]:
    """As `decode`, of one that reads headers."""
    match order_of(file):
        case "probe_hang", _:
            while True:
                pass
        case "probe_segfault", _:
            ctypes.string_at(0)
        case "probe_as", changes:
            return {**real_probe(request, file), **eval(changes)}
        case "probe_for_ever", _:
            while True:
                file.seek(0)
                file.read(2**20)
    return real_probe(request, file)


def count(file: BinaryIO, name: str) -> Any:
    """As `decode`, of one that counts pages."""
    return broken("count", file, lambda: real_count(file, name))


def text(file: BinaryIO, page: int) -> Any:
    """As `decode`, of one that reads the text of a page."""
    return broken("text", file, lambda: real_text(file, page))


def broken(what: str, file: BinaryIO, real: Callable[[], Any]) -> Any:
    """Follows an order for `what`, or does what is real."""
    name, argument = order_of(file)
    if name == f"{what}_hang":
        while True:
            pass
    if name == f"{what}_segfault":
        ctypes.string_at(0)
    if name == f"{what}_eat":
        bytearray(int(argument))
    return eval(argument) if name == f"{what}_as" else real()


def decode(request: dict[str, Any], file: BinaryIO, output: memoryview) -> tuple[float, ...]:
    """What a decoder does that its bytes have taken over, or broken."""
    match order_of(file):
        case "hang", _:
            while True:
                pass
        case "sleep", seconds:
            time.sleep(float(seconds))
        case "hang_in_c", _:
            ctypes.PyDLL(None).sleep(1000)  # the interpreter is held meanwhile
        case "segfault", _:
            ctypes.string_at(0)
        case "abort", _:
            os.abort()
        case "die_unless_new", _:
            if items > 1:
                os._exit(3)
        case "raise", _:
            raise TypeError("of its own")
        case "eat", num_bytes:
            held = [bytearray(2**20) for _ in range(int(num_bytes) // 2**20)]
            raise ItemError("decode", "ate", f"{len(held)} MB")
        case "attempt", what:
            try:
                raise ItemError("decode", "worked", f"{attempts[what.split()[0]](*map(int, what.split()[1:]))}")
            except OSError as error:
                raise ItemError("decode", "refused", f"{error.errno}") from error
    return real_decode(request, file, output)


def fork() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return pid


def connect(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=2):
        return


def own_signal_at(pid: int) -> None:
    """fcntl(2): have the kernel send SIGKILL to another process when something can be read."""
    import fcntl

    fcntl.fcntl(parent_socket[0], fcntl.F_SETOWN, pid)
    fcntl.fcntl(parent_socket[0], 10, signal.SIGKILL)  # F_SETSIG


attempts: dict[str, Any] = {
    "connect": connect,
    "kill": lambda pid: os.kill(pid, signal.SIGTERM),
    "fork": fork,
    "execute": lambda: os.execv("/bin/true", ["true"]),
    "create": lambda: os.open("/tmp/made_by_a_decoder", os.O_WRONLY | os.O_CREAT),
    "own_signal_at": own_signal_at,
    "list_fds": lambda: sorted(os.listdir("/proc/self/fd")),
}


def mapped(fd: int, size: int) -> mmap.mmap:
    """Maps the output, after an attempt to have the parent fall off its end."""
    if fd >= 0:
        for other_size in (0, 2 * size):
            with contextlib.suppress(OSError):
                os.ftruncate(fd, other_size)
    return real_mmap(fd, size)


def main(*, filtered: bool = True) -> None:
    """As the real one; without the filter of system calls, if not `filtered`."""
    real_serve = child.serve

    def serve(parent: socket.socket, bell: socket.socket) -> None:
        parent_socket.append(parent.fileno())
        real_serve(parent, bell)

    child.serve, child.answer, child._decode, child._probe = serve, answer, decode, probe
    document.read_page_count, document.page_text = count, text
    child.mmap.mmap = mapped  # type: ignore[misc, assignment]
    if not filtered:
        child.isolation.restrict_system_calls = lambda: False
    child.main()


if __name__ == "__main__":
    main()
