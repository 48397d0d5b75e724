"""Decoding in a child process that can be killed, so that bytes which nobody vouches for cost one item at most.

The child has no network, no files to write, no rights (`pipeline.media.isolation`), and the memory and time of the item
at hand. It is started once and used for many items. What it says is checked before it is used: it may be the bytes that
speak. Resizing is done in it, too: frames come out one by one at their full size, 6 MB each of 1080p, and go out at the
model's; and whoever has them decoded then need not load what resizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import mmap
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import numpy.typing as npt

from pipeline.errors import ConfigError, ItemError
from pipeline.media import channel
from pipeline.media.document import DEFAULT_DPI
from pipeline.media.resize import Resample
from pipeline.schema import DEFAULT_IMAGE_RULES, Frames, ImageRules, Modality, Probe, SamplePlan

SandboxMode = Literal["auto", "on", "off"]
NUM_PROBERS = 2
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
_INDEX_BYTES = 256 * 2**20  # of a video that is read by range: 200 bytes a packet, and as much of libav's
# The child is replaced when it has decoded so many, or holds so much more than it did at first: a start costs half a
# CPU-second, and 10,000 images of a megapixel 40. It is asked what it holds now and then: that takes 20 to 45 µs.
_MOST_ITEMS = 10_000
_GROWTH_BYTES = 256 * 2**20
_GROUPS_BETWEEN_LOOKS = 16
_KEPT_OUTPUT_BYTES = 64 * 2**20
_OUTPUT_STEP = 2**20
_PROBE_ROOM_BYTES = 512 * 2**20
# A header is read in pieces, some of them again; recordings that say no duration are read to their end.
_MOST_READ = 4
_LEAST_READ_BYTES = 4096
_MOST = 2**62
_NAME = re.compile("[A-Za-z0-9_,.-]{1,100}")
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


class Probers:
    """A few sandboxes for threads that probe, each of which waits for storage with a child of its own."""

    def __init__(self, sandboxes: Sequence[Sandbox]) -> None:
        self._free: queue.LifoQueue[Sandbox] = queue.LifoQueue()  # so that one does what one can
        for sandbox in sandboxes:
            self._free.put(sandbox)

    def probe(self, file: BinaryIO, **request: Any) -> Probe:
        """As `Sandbox.probe`."""
        sandbox = self._free.get()
        try:
            return sandbox.probe(file, **request)
        finally:
            self._free.put(sandbox)


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecoded:
    """What `decode_media` is called with. For a `size` of None, it is what `probe` says.

    `file` is given instead of bytes where it is read by range.
    """

    data: bytes = b""
    file: BinaryIO | None = None
    probe: Probe
    plan: SamplePlan
    size: tuple[int, int] | None
    resample: Resample = "bicubic"
    page: int | None = None
    dct_scaled: bool = False
    at_keyframes: bool = False
    rules: ImageRules = DEFAULT_IMAGE_RULES

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(T, H, W, 3) of what comes of it."""
        height, width = self.size or (self.probe.height, self.probe.width)
        return len(self.plan), height, width, 3

    @property
    def num_pixels(self) -> int:
        """Of the frames to take, at their own size."""
        return self.probe.width * self.probe.height * len(self.plan)

    @property
    def room_bytes(self) -> int:
        """What decoding may take: a power of two, so that most items have the same."""
        frame = _BYTES_PER_PIXEL * self.probe.width * self.probe.height
        stream = 2 * len(self.data) if self.file is None else _INDEX_BYTES
        more = (stream + frame + 2 * math.prod(self.shape)) / _ROOM_BYTES
        return int(_ROOM_BYTES * 2 ** math.ceil(math.log2(1 + more)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of an item, and how long that took."""

    result: Frames | ItemError
    seconds: float


class Sandbox:
    """A child that decodes, started when it is first needed, and anew when it has died or grown. For any thread."""

    def __init__(self, *, item_seconds: float, must_isolate: bool = False, module: str = CHILD) -> None:
        self._item_seconds = item_seconds
        self._must_isolate = must_isolate
        self._module = module
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._level: str | None = None

    def decode(self, items: Sequence[Undecoded]) -> list[Outcome]:
        """Frames, or why there are none, of each item.

        Items that are handed over together cost less: child and parent each stay at their work. Errors are those of
        `decode_media` and (stage `decode`) `timeout`, `crashed`, `out_of_memory`. Raises `ConfigError` when the child
        has a network and must not, RuntimeError when it cannot be started, and what reading an item's `file` raises.
        """
        with self._lock:
            ranged = any(item.file is not None for item in items)
            whole = not ranged and sum(len(item.data) for item in items) <= channel.WHOLE_BYTES
            groups = [items] if whole else [[item] for item in items]
            return [outcome for group in groups for outcome in self._decode(group)]

    def probe(
        self,
        file: BinaryIO,
        *,
        num_bytes: int,
        declared: Modality | None,
        name: str,
        page: int | None = None,
        dpi: float = DEFAULT_DPI,
    ) -> Probe:
        """As `probe_media`, whose errors it raises; the child asks for what it reads of `file`.

        Raises `ItemError` (stage `probe`): `timeout`, `crashed`, `out_of_memory`; as `decode` does; and what reading
        `file` raises.
        """
        request = {"num_bytes": num_bytes, "declared": declared, "name": name, "page": page, "dpi": dpi}
        with self._lock:
            while True:
                child = self._usable()
                is_new = child.num_items == 0
                try:
                    result = child.probe(file, request, self._item_seconds)
                except _ChildLost as lost:
                    self._drop()
                    if lost.is_conclusive or is_new:
                        raise ItemError("probe", lost.code, f"{name}: {lost.message}") from lost
                    continue
                except BaseException:  # of the file: the child still waits for it
                    self._drop()
                    raise
                if isinstance(result, ItemError):
                    raise result
                return result

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

    def _decode(self, items: Sequence[Undecoded]) -> list[Outcome]:
        done: list[Outcome] = []
        while len(done) < len(items):
            child, num_done, started = self._usable(), len(done), time.perf_counter()
            is_new = child.num_items == 0
            try:
                for outcome in child.decode(items[num_done:], self._item_seconds):
                    done.append(outcome)
                    started = time.perf_counter()
            except _ChildLost as lost:
                self._drop()
                # Items before may have left it broken: the verdict is that of a child which nothing else has touched.
                if lost.is_conclusive or (is_new and len(done) == num_done):
                    error = ItemError("decode", lost.code, lost.message)
                    done.append(Outcome(result=error, seconds=time.perf_counter() - started))
            except BaseException:  # of the file: the child still waits for it
                self._drop()
                raise
        return done

    def _usable(self) -> _Child:
        if self._child is not None and not self._child.is_usable():
            self._drop()
        if self._child is None:
            child = _starter.submit(_start, self._module).result()
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


class _ChildLost(Exception):
    """The child is of no more use. `is_conclusive` when that is the item's doing whatever came before it."""

    def __init__(self, code: str, message: str, *, is_conclusive: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.is_conclusive = code, message, is_conclusive


class _Child:
    """One process, its socket, and the two files that it shares: what is decoded, and the pixels."""

    def __init__(self, module: str, *, leaves_network: bool) -> None:
        self.num_items = 0
        self._room_bytes = self._num_looks = 0
        self._cores = os.cpu_count() or 1
        self._output: mmap.mmap | None = None
        self._socket, theirs = socket.socketpair()
        told = map(str, (theirs.fileno(), os.getpid(), int(leaves_network)))
        with theirs:
            command = [sys.executable, "-B", "-P", "-s", "-m", module, *told]
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

    def decode(self, items: Sequence[Undecoded], item_seconds: float) -> Iterator[Outcome]:
        """One after another, as they are done. Raises `_ChildLost` over the one that is next."""
        seconds = [item_seconds + item.num_pixels / _PIXELS_PER_SECOND for item in items]
        with self._losses(seconds[0]):
            self._limit(max(item.room_bytes for item in items), sum(seconds))
            self._hand_over(items)
            described = {"items": [_described(item) for item in items]}
            self._request(described, sum(math.prod(item.shape) for item in items), time.monotonic() + seconds[0])
        at = 0
        for item, limit in zip(items, seconds, strict=True):
            started = time.monotonic()
            result = self._result(item, at, started + limit, limit)
            at += math.prod(item.shape)
            self.num_items += 1
            yield Outcome(result=result, seconds=time.monotonic() - started)
        if len(items[0].data) > channel.WHOLE_BYTES:
            os.ftruncate(self._source, 0)

    def probe(self, file: BinaryIO, request: dict[str, Any], item_seconds: float) -> Probe | ItemError:
        """Raises `_ChildLost`, and what reading `file` raises."""
        deadline = time.monotonic() + item_seconds
        self.num_items += 1
        with self._losses(item_seconds):
            self._limit(_PROBE_ROOM_BYTES, item_seconds)
            self._request({"probe": request, "num_bytes": request["num_bytes"]}, 1, deadline)
            match self._reply(deadline, file, request["num_bytes"]):
                case {"probed": dict(facts)}:
                    return _checked_probe(facts, request)
                case reply:
                    return self._failed("probe", reply)

    def _reply(self, deadline: float, file: BinaryIO | None, num_bytes: int) -> dict[str, Any]:
        """What the child says in the end; until then it is given what it asks for of `file`, if there is one.

        What storage takes is not the child's time.
        """
        left_bytes = 0 if file is None else _MOST_READ * num_bytes + _ROOM_BYTES
        while True:
            match channel.receive(self._socket, deadline=deadline):
                case {"read": [int(at), int(size)]} if file is not None and left_bytes > 0 and _may_be_read(at, size):
                    left_bytes -= max(size, _LEAST_READ_BYTES)
                    started = time.monotonic()
                    data = _read(file, at, size)
                    deadline += time.monotonic() - started
                    os.pwrite(self._source, data, 0)
                    channel.send(self._socket, {"read": len(data)}, deadline=deadline)
                case reply:
                    return reply

    def is_usable(self) -> bool:
        """False once it has died, decoded many items, or keeps much memory."""
        if self._process.poll() is not None or self.num_items >= _MOST_ITEMS:
            return False
        self._num_looks += 1
        if self._num_looks % _GROUPS_BETWEEN_LOOKS:
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

    def _limit(self, room_bytes: int, seconds: float) -> None:
        """Memory beyond what it holds, and processor time beyond what it has used."""
        if room_bytes != self._room_bytes:
            addresses, data = self._held()
            self._set_limit(resource.RLIMIT_DATA, data + room_bytes)
            self._set_limit(resource.RLIMIT_AS, addresses + 2 * room_bytes)
            self._room_bytes = room_bytes
        try:
            used = time.clock_gettime(~self._process.pid << 3 | 2)  # the clock of a process: clock_getcpuclockid(3)
        except OSError as error:
            raise ProcessLookupError(str(error)) from error
        # For when nobody is there to see the deadline pass.
        self._set_limit(resource.RLIMIT_CPU, math.ceil(used + 2 * self._cores * seconds) + 1)

    def _set_limit(self, limit: int, value: int) -> None:
        _, hard = resource.getrlimit(limit)  # inherited, and only the privileged can raise it
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.prlimit(self._process.pid, limit, (soft, hard))

    def _hand_over(self, items: Sequence[Undecoded]) -> None:
        at = 0
        for item in items:
            rest = memoryview(item.data)
            while rest:
                written = os.pwrite(self._source, rest, at)
                at, rest = at + written, rest[written:]
        os.ftruncate(self._source, at)

    def _request(self, request: dict[str, Any], output_bytes: int, deadline: float) -> None:
        fds = self._make_output(output_bytes)
        try:
            request = {**request, "output_bytes": len(self._output or b"")}
            channel.send(self._socket, request, fds, deadline=deadline)
        finally:
            if fds:
                os.close(fds[1])

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

    def _result(self, item: Undecoded, at: int, deadline: float, seconds: float) -> Frames | ItemError:
        with self._losses(seconds):
            match self._reply(deadline, item.file, item.probe.num_bytes):
                case {"shown": list(times)}:
                    shown = _checked_times(times, len(item.plan))
                    return Frames(pixels=self._pixels(item.shape, at), pts_seconds=shown)
                case reply:
                    return self._failed("decode", reply)

    def _failed(self, stage: str, reply: dict[str, Any]) -> ItemError:
        """What the child says of the item. Raises `_ChildLost` when it says that of itself, or nothing known."""
        match reply:
            case {"failed": [str(of), str(code), str(message)]} if of == stage and _CODE.fullmatch(code):
                return ItemError(stage, code, _printable(message))
            case {"out_of_memory": True}:
                room = f"{self._room_bytes // 2**20:,} MB"
                raise _ChildLost("out_of_memory", f"decoding takes more than the {room} that an item of its size has")
            case {"raised": str(message)}:
                raise _ChildLost("crashed", f"the decoder failed: {_printable(message)}")
        raise channel.BadMessage(f"{sorted(map(_printable, reply))}")

    @contextlib.contextmanager
    def _losses(self, seconds: float) -> Iterator[None]:
        """What goes wrong with the child, as `_ChildLost`."""
        try:
            yield
        except TimeoutError:
            message = f"not decoded within {seconds:.1f} s (decode.item_seconds, more for many pixels)"
            raise _ChildLost("timeout", message, is_conclusive=True) from None
        except channel.BadMessage as error:
            raise _ChildLost("crashed", f"the decoder's answer makes no sense: {error}") from error
        except (channel.ChannelClosed, ProcessLookupError) as error:
            raise self._death() from error

    def _pixels(self, shape: tuple[int, ...], at: int) -> npt.NDArray[np.uint8]:
        """A copy: the child could still write to what it has answered with."""
        assert self._output is not None
        return np.frombuffer(self._output, np.uint8, math.prod(shape), at).reshape(shape).copy()

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


def _start(module: str) -> _Child:
    """In a namespace of users its rights count for nothing, so that it may not find what only those let it read."""
    try:
        return _Child(module, leaves_network=True)
    except RuntimeError:
        return _Child(module, leaves_network=False)


def _end(process: subprocess.Popen[bytes], parent: socket.socket, fds: tuple[int, ...]) -> None:
    """Kill it, and wait until it is gone."""
    process.kill()
    process.wait()
    parent.close()
    for fd in fds:
        os.close(fd)


def _may_be_read(at: int, size: int) -> bool:
    return 0 <= at < _MOST and 0 < size <= channel.READ_BYTES


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    """Its own errors do not pass for those of the child."""
    try:
        file.seek(at)
        return file.read(size)
    except (TimeoutError, ProcessLookupError) as error:
        raise OSError(f"the file cannot be read: {error!r}") from error


def _checked_probe(facts: dict[str, Any], request: dict[str, Any]) -> Probe:
    kinds: dict[str, type] = dict.fromkeys(Probe.__slots__, int)
    kinds.update(dict.fromkeys(("modality", "container", "codec"), str))
    kinds.update(dict.fromkeys(("duration_seconds", "rate_fps", "group_frames"), float))
    if facts.keys() != kinds.keys() or not all(type(facts[name]) is kind for name, kind in kinds.items()):
        raise channel.BadMessage("facts of other names or kinds")
    numbers = [value for value in facts.values() if not isinstance(value, str)]
    if not all(math.isfinite(number) and 0 <= number < _MOST for number in numbers):
        raise channel.BadMessage("numbers that cannot be")
    has_size = facts["modality"] == "audio" or min(facts["width"], facts["height"]) >= 1
    if not has_size or facts["num_bytes"] != request["num_bytes"]:
        raise channel.BadMessage("a size that cannot be")
    names = facts["modality"], facts["container"], facts["codec"]
    if names[0] not in get_args(Modality) or not all(_NAME.fullmatch(name) for name in names):
        raise channel.BadMessage("names that cannot be")
    return Probe(**facts)


def _described(item: Undecoded) -> dict[str, Any]:
    """All but its bytes."""
    return {
        "num_bytes": len(item.data) if item.file is None else item.probe.num_bytes,
        "by_range": item.file is not None,
        "probe": {name: getattr(item.probe, name) for name in item.probe.__slots__},
        "plan": item.plan.pts_seconds,
        "size": item.size,
        "resample": item.resample,
        "page": item.page,
        "dct_scaled": item.dct_scaled,
        "at_keyframes": item.at_keyframes,
        "rules": dataclasses.asdict(item.rules),
        "shape": item.shape,
    }


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
