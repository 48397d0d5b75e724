"""Decoding in a child process that can be killed, so that bytes which nobody vouches for cost one item at most.

The child has no network, no files to write, no rights (`pipeline.media.isolation`), and the memory and time of the item
at hand. It is started once and used for many items. What it says is checked before it is used: it may be the bytes that
speak. Resizing is done in it, too: frames come out one by one at their full size, 6 MB each of 1080p, and go out at the
model's; and whoever has them decoded then need not load what resizes.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipeline.errors import ConfigError, ItemError
from pipeline.media import channel
from pipeline.media.resize import Resample
from pipeline.schema import Frames, Probe, SamplePlan

SandboxMode = Literal["auto", "on", "off"]
OFF = "off"  # what `Sandbox.level` is called where there is none

CHILD = "pipeline.media.sandbox_child"
_START_SECONDS = 120.0  # on a machine that starts many at a time; 0.6 s of CPU
# An item's time grows with its frames. Decoding and resizing pass 40 to 150 megapixels a second here; what lies between
# the frames that are taken of a video has to be decoded, too.
_PIXELS_PER_SECOND = 10e6
# What an item may take: measured were 32 bytes a pixel for 16-bit grey, and 17 frames of 3 bytes are what a decoder of
# 10-bit video keeps at most.
_ROOM_BYTES = 256 * 2**20
_BYTES_PER_PIXEL = 64
# The child is replaced when it has decoded so many, or holds so much more than it did at first: a start costs half a
# CPU-second, and 10,000 images of a megapixel 40. It is asked what it holds now and then: that takes 20 to 45 µs.
_MOST_ITEMS = 10_000
_GROWTH_BYTES = 256 * 2**20
_ITEMS_BETWEEN_LOOKS = 64
_KEPT_SOURCE_BYTES = 16 * 2**20
_KEPT_OUTPUT_BYTES = 64 * 2**20
_OUTPUT_STEP = 2**20
_CODE = re.compile("[a-z_]{1,40}")
_MESSAGE_LETTERS = 500
# A child ends with the thread that started it, so that one has to stay.
_starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox-starter")


def open_sandbox(mode: SandboxMode, item_seconds: float) -> Sandbox | None:
    """What decodes; None for `off`, and for `auto` where there is no Linux. Raises `ConfigError` for `on` there."""
    if mode == "off" or (mode == "auto" and sys.platform != "linux"):
        return None
    if sys.platform != "linux":
        raise ConfigError(f"decode.sandbox: on needs Linux, this is {sys.platform}; set it to auto or off")
    return Sandbox(item_seconds=item_seconds, must_isolate=mode == "on")


class Sandbox:
    """A child that decodes, started when it is first needed, and anew when it has died or grown. For any thread."""

    def __init__(self, *, item_seconds: float, must_isolate: bool = False, module: str = CHILD) -> None:
        self._item_seconds = item_seconds
        self._must_isolate = must_isolate
        self._module = module
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._level: str | None = None

    def decode(
        self,
        data: bytes,
        probe: Probe,
        plan: SamplePlan,
        size: tuple[int, int] | None,
        resample: Resample = "bicubic",
        *,
        page: int | None = None,
        dct_scaled: bool = False,
    ) -> Frames:
        """As `decode_media` of `data`; for None, `size` is what `probe` says.

        Raises `ItemError` (stage `decode`) as `decode_media` does, and `timeout`, `crashed`, `out_of_memory`;
        `ConfigError` when the child has a network and must not; RuntimeError when it cannot be started.
        """
        shape = (len(plan), *(size or (probe.height, probe.width)), 3)
        sampled_pixels = probe.width * probe.height * len(plan)
        item = _Item(
            data=data,
            request={
                "num_bytes": len(data),
                "probe": {name: getattr(probe, name) for name in probe.__slots__},
                "plan": plan.pts_seconds,
                "size": size,
                "resample": resample,
                "page": page,
                "dct_scaled": dct_scaled,
                "shape": shape,
            },
            shape=shape,
            seconds=self._item_seconds + sampled_pixels / _PIXELS_PER_SECOND,
            room_bytes=_room(2 * len(data) + _BYTES_PER_PIXEL * probe.width * probe.height + 2 * math.prod(shape)),
        )
        with self._lock:
            return self._decode(item)

    def start(self) -> None:
        """Have a child now. Raises as `decode` does."""
        with self._lock:
            self._usable()

    @property
    def level(self) -> str | None:
        """What keeps the child in: `network_namespace+seccomp`, one of them, or `none`. None before the first."""
        return self._level

    def close(self) -> None:
        """End the child. The next item starts another."""
        with self._lock:
            self._drop()

    def _decode(self, item: _Item) -> Frames:
        child = self._usable()
        is_new = child.num_items == 0
        try:
            return child.decode(item)
        except _ChildLost as lost:
            self._drop()
            if lost.is_conclusive or is_new:
                raise ItemError("decode", lost.code, lost.message) from lost
            # Items before may have left it broken: the verdict is that of a child which nothing else has touched.
            return self._decode(item)

    def _usable(self) -> _Child:
        if self._child is not None and not self._child.is_usable():
            self._drop()
        if self._child is None:
            child = _starter.submit(_Child, self._module).result()
            if self._must_isolate and child.level == "none":
                child.close()
                raise ConfigError(
                    "decode.sandbox is on, and this machine allows neither a network namespace nor seccomp, so what "
                    "decodes would have a network; allow one of them, or set it to auto or off"
                )
            self._child, self._level = child, child.level
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    data: bytes
    request: dict[str, Any]
    shape: tuple[int, ...]
    seconds: float
    room_bytes: int


class _ChildLost(Exception):
    """The child is of no more use. `is_conclusive` when that is the item's doing whatever came before it."""

    def __init__(self, code: str, message: str, *, is_conclusive: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.is_conclusive = code, message, is_conclusive


class _Child:
    """One process, its socket, and the two files that it shares: what is decoded, and the pixels."""

    def __init__(self, module: str) -> None:
        self.num_items = 0
        self._room_bytes = 0
        self._cores = os.cpu_count() or 1
        self._output: mmap.mmap | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-B", "-P", "-s", "-m", module, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # its own, which Ctrl-C does not reach
            )
        self._source = os.memfd_create("source", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        _seal(self._source, 0)
        self._statm = os.open(f"/proc/{self._process.pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        # Also when the program ends, or nobody refers to it any more.
        self._end = weakref.finalize(self, _end, self._process, self._socket, (self._source, self._statm))
        try:
            self.level = self._greeting()
            _, self._first_bytes = self._held()
        except BaseException:
            self.close()
            raise

    def decode(self, item: _Item) -> Frames:
        """Raises `ItemError` as the child says, `_ChildLost` when it is of no more use."""
        deadline = time.monotonic() + item.seconds
        self.num_items += 1
        try:
            self._limit(item)
            self._hand_over(item.data)
            fds = self._make_output(math.prod(item.shape))
            request = {**item.request, "output_bytes": len(self._output or b"")} if fds else item.request
            try:
                channel.send(self._socket, request, fds, deadline=deadline)
            finally:
                if fds:
                    os.close(fds[1])
            return self._frames(channel.receive(self._socket, deadline=deadline), item)
        except TimeoutError:
            message = f"not decoded within {item.seconds:.1f} s (decode.item_seconds, more for many pixels)"
            raise _ChildLost("timeout", message, is_conclusive=True) from None
        except channel.BadMessage as error:
            raise _ChildLost("crashed", f"the decoder's answer makes no sense: {error}") from error
        except (channel.ChannelClosed, ProcessLookupError) as error:
            raise self._death() from error

    def is_usable(self) -> bool:
        """False once it has died, decoded many items, or keeps much memory."""
        if self._process.poll() is not None or self.num_items >= _MOST_ITEMS:
            return False
        if self.num_items % _ITEMS_BETWEEN_LOOKS:
            return True
        self._room_bytes = 0  # counted anew from what it holds now
        try:
            return self._held()[1] - self._first_bytes < _GROWTH_BYTES
        except ProcessLookupError:
            return False

    def close(self) -> None:
        """Kill it, and wait until it is gone."""
        self._end()
        if self._output is not None:
            self._output.close()

    def _greeting(self) -> str:
        try:
            said = channel.receive(self._socket, deadline=time.monotonic() + _START_SECONDS)
        except (channel.ChannelClosed, channel.BadMessage, TimeoutError) as error:
            raise RuntimeError(
                f"the process that decodes did not start: {error!r}, its exit code is {self._process.poll()}; "
                "decode.sandbox: off does without it"
            ) from error
        if "ready" not in said:
            raise RuntimeError(f"the process that decodes did not start:\n{said.get('broken')}")
        return "+".join(said["ready"]) or "none"

    def _held(self) -> tuple[int, int]:
        """Bytes of addresses, and of memory that it alone writes to: what RLIMIT_AS and RLIMIT_DATA count."""
        try:
            pages = os.pread(self._statm, 200, 0).split()
            return int(pages[0]) * mmap.PAGESIZE, int(pages[5]) * mmap.PAGESIZE
        except (OSError, IndexError) as error:
            raise ProcessLookupError(str(error)) from error

    def _limit(self, item: _Item) -> None:
        """Memory beyond what it holds, and processor time beyond what it has used."""
        if item.room_bytes != self._room_bytes:
            addresses, data = self._held()
            self._set_limit(resource.RLIMIT_DATA, data + item.room_bytes)
            self._set_limit(resource.RLIMIT_AS, addresses + 2 * item.room_bytes)
            self._room_bytes = item.room_bytes
        try:
            used = time.clock_gettime(~self._process.pid << 3 | 2)  # the clock of a process: clock_getcpuclockid(3)
        except OSError as error:
            raise ProcessLookupError(str(error)) from error
        # For when nobody is there to see the deadline pass.
        self._set_limit(resource.RLIMIT_CPU, math.ceil(used + 2 * self._cores * item.seconds) + 1)

    def _set_limit(self, limit: int, value: int) -> None:
        _, hard = resource.getrlimit(limit)  # inherited, and only the privileged can raise it
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.prlimit(self._process.pid, limit, (soft, hard))

    def _hand_over(self, data: bytes) -> None:
        rest = memoryview(data)
        at = 0
        while rest:
            written = os.pwrite(self._source, rest, at)
            at, rest = at + written, rest[written:]
        os.ftruncate(self._source, at)

    def _make_output(self, num_bytes: int) -> tuple[int, ...]:
        """Have room for the pixels; where the child does not have it yet, the two files to send, to close the second.

        Nobody can shrink what is mapped here.
        """
        have = 0 if self._output is None else len(self._output)
        if num_bytes <= have <= max(num_bytes, _KEPT_OUTPUT_BYTES):
            return ()
        if self._output is not None:
            self._output.close()
        size = math.ceil(num_bytes / _OUTPUT_STEP) * _OUTPUT_STEP
        output = os.memfd_create("pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(output, size)
        _seal(output, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._output = mmap.mmap(output, size, prot=mmap.PROT_READ)
        return self._source, output

    def _frames(self, reply: Mapping[str, Any], item: _Item) -> Frames:
        if len(item.data) > _KEPT_SOURCE_BYTES:
            os.ftruncate(self._source, 0)
        match reply:
            case {"shown": list(times)}:
                assert self._output is not None
                shown = _checked_times(times, item.shape[0])
                # A copy: the child could still write to what it has answered with.
                pixels = np.frombuffer(self._output, np.uint8, math.prod(item.shape)).reshape(item.shape).copy()
                return Frames(pixels=pixels, pts_seconds=shown)
            case {"failed": ["decode", str(code), str(message)]} if _CODE.fullmatch(code):
                raise ItemError("decode", code, _printable(message))
            case {"out_of_memory": True}:
                message = f"decoding takes more than the {item.room_bytes // 2**20:,} MB that an item of its size has"
                raise _ChildLost("out_of_memory", message)
            case {"raised": str(message)}:
                raise _ChildLost("crashed", f"the decoder failed: {_printable(message)}")
        raise channel.BadMessage(f"{sorted(map(_printable, reply))}")

    def _death(self) -> _ChildLost:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return _ChildLost("crashed", "the decoder has hung up")
        if code == -signal.SIGXCPU:
            return _ChildLost("timeout", "the decoder has used up its processor time", is_conclusive=True)
        name = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        by_whom = ", perhaps as the machine ran out of memory" if code == -signal.SIGKILL else ""
        return _ChildLost("crashed", f"the decoder's process ended ({name}{by_whom})")


def _end(process: subprocess.Popen[bytes], parent: socket.socket, fds: tuple[int, ...]) -> None:
    """Kill it, and wait until it is gone."""
    process.kill()
    process.wait()
    parent.close()
    for fd in fds:
        os.close(fd)


def _room(num_bytes: int) -> int:
    """What is given to an item that takes so much: a power of two, so that most have the same."""
    return int(_ROOM_BYTES * 2 ** math.ceil(math.log2(1 + num_bytes / _ROOM_BYTES)))


def _environment() -> dict[str, str]:
    """What the child needs to import what its parent does, to find libraries, and to use one thread."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}


def _seal(fd: int, seals: int) -> None:
    """Forbid the child, too, what `seals` name, and to seal more."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)


def _checked_times(times: list[Any], count: int) -> tuple[float, ...]:
    if len(times) != count or not all(type(t) in (int, float) and math.isfinite(t) for t in times):
        raise channel.BadMessage(f"{count} times were due, {len(times)} came, or not all are numbers")
    return tuple(map(float, times))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MESSAGE_LETTERS])
