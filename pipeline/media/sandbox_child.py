"""The child that decodes what `pipeline.media.sandbox` hands it, one item at a time, until it is left alone.

Started with the descriptors of its socket and of its bell, the process id of its parent, and 1 if it is to try to leave
the network.
Imports no torch: with the resizing kernel it is ready in half a second.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from pipeline.errors import ItemError
from pipeline.media import channel, isolation


def main() -> None:
    """Give up what decoding does not need, say what was given up, and serve."""
    descriptor, bell_descriptor, parent, leaves_network = map(int, sys.argv[1:5])
    isolation.end_with(parent)
    given_up = isolation.leave_network() if leaves_network else ()
    isolation.end_with(parent)  # once more: the kernel forgets it when credentials change
    parent_socket, bell = socket.socket(fileno=descriptor), socket.socket(fileno=bell_descriptor)
    try:
        _warm_up()
        given_up += isolation.give_up_rights()
    except BaseException:
        channel.send(parent_socket, {"broken": traceback.format_exc()})
        raise
    channel.send(parent_socket, {"ready": list(given_up)})
    serve(parent_socket, bell)


def serve(parent: socket.socket, bell: socket.socket) -> None:
    """Answer requests until the parent closes, or until an answer says that this process is not to be used again.

    Of items that are handed over together the parent may sleep until the bell rings; it wakes, too, when this ends."""
    source, output = -1, mmap.mmap(-1, 1)
    while True:
        try:
            request, fds = channel.receive_with_fds(parent)
        except channel.ChannelClosed:
            return
        if fds:  # the same two files as before, when none come
            os.close(source) if source >= 0 else None
            source, output = fds[0], mmap.mmap(fds[1], request["output_bytes"])
            os.close(fds[1])
        if "items" not in request:
            with _file(parent, source, 0, request) as file:
                reply = answer_reading(request, file)
            channel.send(parent, reply)
            if not reply.keys() & {"found", "failed"}:
                return
            continue
        source_at = output_at = 0
        for item in request["items"]:
            with _file(parent, source, source_at, item) as file:
                reply = answer(item, file, memoryview(output)[output_at:])
            channel.send(parent, reply)
            if not reply.keys() & {"shown", "failed"}:
                return
            source_at += item["num_bytes"]
            output_at += math.prod(item["shape"])
        if request["rings"]:
            bell.send(b"\0")


def _file(parent: socket.socket, source: int, at: int, item: dict[str, Any]) -> BinaryIO:
    """An item's bytes; of many, that are handed over alone, the file that they are; or what the parent has open."""
    num_bytes = item["num_bytes"]
    if item["by_range"]:
        return io.BufferedReader(ParentFile(parent, source, num_bytes, item["ahead_bytes"]))
    if num_bytes <= channel.WHOLE_BYTES:
        return io.BytesIO(os.pread(source, num_bytes, at))
    os.lseek(source, 0, os.SEEK_SET)
    return open(source, "rb", closefd=False)


class ParentFile(io.RawIOBase):
    """A file that the parent has open: the first bytes are in the file that both have, and it puts there, behind them,
    what is asked for."""

    def __init__(self, parent: socket.socket, source: int, num_bytes: int, ahead_bytes: int) -> None:
        self._parent, self._source, self._num_bytes, self._at = parent, source, num_bytes, 0
        self._ahead_bytes = ahead_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence])
        return self._at

    def readinto(self, target: Any) -> int:
        wanted = min(len(target), self._num_bytes - self._at, channel.READ_BYTES)
        if wanted <= 0:
            return 0
        if self._at < self._ahead_bytes:
            got, start = min(wanted, self._ahead_bytes - self._at), self._at
        else:
            channel.send(self._parent, {"read": [self._at, wanted]})
            got, start = int(channel.receive(self._parent)["read"]), self._ahead_bytes
        target[:got] = os.pread(self._source, got, start)
        self._at += got
        return got


def answer_reading(request: dict[str, Any], file: BinaryIO) -> dict[str, Any]:
    """What the header says, the number of pages or the text of one, or what is wrong with the item, or this process."""
    return _reply(lambda: {"found": _read(request, file)})


def answer(request: dict[str, Any], file: BinaryIO, output: memoryview) -> dict[str, Any]:
    """Decode: the pixels into `output`, and the times shown, or what is wrong with the item, or with this process."""
    started = time.perf_counter()
    reply = _reply(lambda: {"shown": list(_decode(request, file, output))})
    return {**reply, "seconds": time.perf_counter() - started}


def _reply(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except MemoryError:
        return {"out_of_memory": True}
    except ItemError as error:
        return {"failed": [error.stage, error.code, error.message]}
    except Exception as error:  # whatever bytes make a decoder raise is the item's fault, not the run's
        return {"out_of_memory": True} if _ran_out_of_memory(error) else {"raised": repr(error)}


def _probe(request: dict[str, Any], file: BinaryIO) -> dict[str, Any]:
    from pipeline.media.probe import probe_media

    probe = probe_media(file, **request)
    return {name: getattr(probe, name) for name in probe.__slots__}


def _read(request: dict[str, Any], file: BinaryIO) -> Any:
    from pipeline.media.document import page_text, read_page_count

    match request:
        case {"page_count": name}:
            return read_page_count(file, name)
        case {"page_text": page}:
            return page_text(file, page)
    return _probe(request["probe"], file)


def _decode(request: dict[str, Any], file: BinaryIO, output: memoryview) -> tuple[float, ...]:
    import numpy as np

    from pipeline.media.decode import decode_media
    from pipeline.schema import ImageRules, Probe, SamplePlan

    probe, plan = Probe(**request["probe"]), SamplePlan(pts_seconds=tuple(request["plan"]))
    size = request["size"] and tuple(request["size"])
    frames = decode_media(
        file,
        probe,
        plan,
        size,
        request["resample"],
        page=request["page"],
        dct_scaled=request["dct_scaled"],
        by_range=request["by_range"],
        at_keyframes=request["at_keyframes"],
        rules=ImageRules(**request["rules"]),
    )
    shape = tuple(request["shape"])
    if frames.pixels.shape != shape:
        message = f"frames of {frames.pixels.shape[1:3]} pixels, the header promised {shape[1:3]}"
        raise ItemError("decode", "corrupt", message)
    np.frombuffer(output, np.uint8, frames.pixels.size).reshape(shape)[...] = frames.pixels
    return frames.pts_seconds


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Libraries say it in their own ways, behind errors that say less."""
    while error is not None:
        if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _warm_up() -> None:
    """Load what decodes and resizes, so that what an item takes is its own."""
    import numpy as np

    import pipeline.media.decode  # noqa: F401
    from pipeline.media.resize import resize_frames

    resize_frames(np.zeros((1, 2, 2, 3), np.uint8), (1, 1))


if __name__ == "__main__":
    main()
