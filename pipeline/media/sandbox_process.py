"""One child of the sandbox, seen from its parent."""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.errors import ItemError
from pipeline.media import answers, channel
from pipeline.media.undecoded import Outcome, Undecoded
from pipeline.schema import Frames, Probe, fields_of

T = TypeVar("T")
CHILD = "pipeline.media.sandbox_child"
_START_SECONDS = 120.0  # on a machine that starts many at a time; 0.6 s of CPU
# An item's time grows with its frames. Decoding and resizing pass 40 to 150 megapixels a second here; what lies between
# the frames that are taken of a video has to be decoded, too.
_PIXELS_PER_SECOND = 10e6
# The child is replaced when it has decoded so many, or holds so much more than it did at first: a start costs half a
# CPU-second, and 10,000 images of a megapixel 40. It is asked what it holds now and then: that takes 20 to 45 µs.
_MOST_ITEMS = 10_000
_GROWTH_BYTES = 256 * 2**20
_GROUPS_BETWEEN_LOOKS = 16
_KEPT_OUTPUT_BYTES = 64 * 2**20
_OUTPUT_STEP = 2**20
# To be woken for each of eight JPEGs of a megapixel took 2 % of their processor time: caches are cold each time. So the
# child rings when all are done; what it says of each waits in its socket, which has room for the times of so many.
_UNHEARD_TIMES = 2_000
_MOST_RINGS = 64
_GRACE_SECONDS = 0.1  # to read what has been said when an item's time is over
# Where most headers end. To ask for it takes a JPEG's 0.25 ms instead of 0.18, a PDF's of twenty pages 0.48 for 0.26.
_AHEAD_BYTES = 64 * 2**10
_READ_ROOM_BYTES = 512 * 2**20
# A header is read in pieces, some of them again; recordings that say no duration are read to their end.
_MOST_READ = 4
_LEAST_READ_BYTES = 4096
_MOST_AT = 2**62
_MORE_READ_BYTES = 256 * 2**20


class ChildLost(Exception):
    """The child is of no more use. `is_conclusive` when that is the item's doing whatever came before it."""

    def __init__(self, code: str, message: str, *, is_conclusive: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.is_conclusive = code, message, is_conclusive


class Child:
    """One process, its socket, and the two files that it shares: what is decoded, and the pixels."""

    def __init__(self, module: str, *, leaves_network: bool) -> None:
        self.num_items = 0
        self._room_bytes = self._num_looks = 0
        self._cores = os.cpu_count() or 1
        self._output: mmap.mmap | None = None
        self._socket, theirs = socket.socketpair()
        self._bell, their_bell = socket.socketpair()
        told = map(str, (theirs.fileno(), their_bell.fileno(), os.getpid(), int(leaves_network)))
        with theirs, their_bell:
            command = [sys.executable, "-B", "-P", "-s", "-m", module, *told]
            self._process = subprocess.Popen(
                command,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), their_bell.fileno()),
                process_group=0,  # its own, which Ctrl-C does not reach
            )
        self._source = os.memfd_create("source", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        _seal(self._source, 0)
        self._statm = os.open(f"/proc/{self._process.pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        # Also when the program ends, or nobody refers to it any more.
        self._end = weakref.finalize(self, _end, self._process, (self._socket, self._bell), (self._source, self._statm))
        try:
            self.level = self._greeting()
            _, self._first_bytes = self._held()
        except BaseException:
            self.close()
            raise

    def decode(self, items: Sequence[Undecoded], item_seconds: float) -> Iterator[Outcome]:
        """One after another, as they are done; frames last until the next call. Raises `ChildLost` over the next."""
        seconds = [item_seconds + item.num_pixels / _PIXELS_PER_SECOND for item in items]
        with self._losses(seconds[0]):
            self._limit(max(item.room_bytes for item in items), sum(seconds))
            self._hand_over([item.data for item in items])
            rings = len(items) > 1 and sum(len(item.plan) for item in items) <= _UNHEARD_TIMES
            request = {"items": [_described(item) for item in items], "rings": rings}
            self._request(request, sum(math.prod(item.shape) for item in items), time.monotonic() + seconds[0])
        at, started, is_ready = 0, time.monotonic(), not rings
        for item, limit in zip(items, seconds, strict=True):
            deadline = started + limit
            is_ready = is_ready or self._hears_bell(deadline)
            with self._losses(limit):
                reply = self._reply(deadline + _GRACE_SECONDS, item.file, item.probe.num_bytes)
                result = self._result(item, at, reply)
            taken = time.monotonic() - started
            if rings:  # they were not looked at one by one
                taken = answers.checked_seconds(reply.get("seconds"), taken)
            at += math.prod(item.shape)
            started += taken
            self.num_items += 1
            yield Outcome(result=result, seconds=taken)
        if len(items[0].data) > channel.WHOLE_BYTES:
            os.ftruncate(self._source, 0)

    def probe(self, file: BinaryIO, request: dict[str, Any], item_seconds: float) -> Probe | ItemError:
        """Raises `ChildLost`, and what reading `file` raises."""
        asked = {"probe": request, **self._within_reach(file, request["num_bytes"])}
        return self._read(asked, "probe", file, item_seconds, lambda facts: answers.checked_probe(facts, request))

    def page_count(self, file: BinaryIO, num_bytes: int, name: str, item_seconds: float) -> int | ItemError:
        """As `probe`."""
        asked = {"page_count": name, **self._within_reach(file, num_bytes)}
        return self._read(asked, "probe", file, item_seconds, answers.checked_count)

    def _within_reach(self, file: BinaryIO, num_bytes: int) -> dict[str, Any]:
        """The child asks for what it reads, but for the beginning of what is in memory here."""
        ahead = b""
        if type(file) is io.BytesIO:
            file.seek(0)
            ahead = file.read(_AHEAD_BYTES)
            with self._losses(0.0):
                self._hand_over([ahead])
        return {"num_bytes": num_bytes, "by_range": True, "ahead_bytes": len(ahead)}

    def page_text(self, data: bytes, page: int, item_seconds: float) -> str | ItemError:
        """Raises `ChildLost`."""
        with self._losses(item_seconds):
            self._hand_over([data])
        asked = {"page_text": page, "num_bytes": len(data), "by_range": False}
        return self._read(asked, "decode", None, item_seconds, answers.checked_text)

    def _read(
        self,
        asked: dict[str, Any],
        stage: str,
        file: BinaryIO | None,
        item_seconds: float,
        checked: Callable[[Any], T],
    ) -> T | ItemError:
        deadline = time.monotonic() + item_seconds
        self.num_items += 1
        with self._losses(item_seconds):
            self._limit(_READ_ROOM_BYTES, item_seconds)
            self._request(asked, 1, deadline)
            match self._reply(deadline, file, asked["num_bytes"], asked.get("ahead_bytes", 0)):
                case {"found": found}:
                    return checked(found)
                case reply:
                    return self._failed(stage, reply)

    def _reply(self, deadline: float, file: BinaryIO | None, num_bytes: int, ahead_bytes: int = 0) -> dict[str, Any]:
        """What the child says in the end; until then it is given what it asks for of `file`, if there is one.

        That is put behind the `ahead_bytes` that it has. What storage takes is not the child's time.
        """
        left_bytes = 0 if file is None else _MOST_READ * num_bytes + _MORE_READ_BYTES
        while True:
            match channel.receive(self._socket, deadline=deadline):
                case {"read": [int(at), int(size)]} if file is not None and left_bytes > 0 and _may_be_read(at, size):
                    left_bytes -= max(size, _LEAST_READ_BYTES)
                    started = time.monotonic()
                    data = _read(file, at, size)
                    deadline += time.monotonic() - started
                    os.pwrite(self._source, data, ahead_bytes)
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

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def close(self) -> None:
        """Kill it, and wait until it is gone."""
        self._end()
        self._output = None

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

    def _hand_over(self, files: Sequence[bytes]) -> None:
        at = 0
        for data in files:
            rest = memoryview(data)
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
        size = math.ceil(num_bytes / _OUTPUT_STEP) * _OUTPUT_STEP
        output = os.memfd_create("pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(output, size)
        _seal(output, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._output = mmap.mmap(output, size, prot=mmap.PROT_READ)
        return self._source, output

    def _hears_bell(self, deadline: float) -> bool:
        """Sleep until the child is through with all items, or gone, or it is the deadline of one of them."""
        self._bell.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            self._bell.recv(_MOST_RINGS)
        except OSError:  # too late, or gone
            return False
        return True

    def _result(self, item: Undecoded, at: int, reply: dict[str, Any]) -> Frames | ItemError:
        match reply:
            case {"shown": list(times)}:
                shown = answers.checked_times(times, len(item.plan))
                return Frames(pixels=self._pixels(item.shape, at), pts_seconds=shown)
            case _:
                return self._failed("decode", reply)

    def _failed(self, stage: str, reply: dict[str, Any]) -> ItemError:
        """What the child says of the item. Raises `ChildLost` when it says that of itself, or nothing known."""
        match reply:
            case {"failed": [str(of), str(code), str(message)]} if of == stage and answers.is_code(code):
                return ItemError(stage, code, answers.printable(message))
            case {"out_of_memory": True}:
                room = f"{self._room_bytes // 2**20:,} MB"
                raise ChildLost("out_of_memory", f"decoding takes more than the {room} that an item of its size has")
            case {"raised": str(message)}:
                raise ChildLost("crashed", f"the decoder failed: {answers.printable(message)}")
        raise channel.BadMessage(f"{sorted(map(answers.printable, reply))}")

    @contextlib.contextmanager
    def _losses(self, seconds: float) -> Iterator[None]:
        """What goes wrong with the child, as `ChildLost`."""
        try:
            yield
        except TimeoutError:
            message = f"not decoded within {seconds:.1f} s (decode.item_seconds, more for many pixels)"
            raise ChildLost("timeout", message, is_conclusive=True) from None
        except channel.BadMessage as error:
            raise ChildLost("crashed", f"the decoder's answer makes no sense: {error}") from error
        except (channel.ChannelClosed, ProcessLookupError) as error:
            raise self._death() from error

    def _pixels(self, shape: tuple[int, ...], at: int) -> npt.NDArray[np.uint8]:
        assert self._output is not None
        return np.frombuffer(self._output, np.uint8, math.prod(shape), at).reshape(shape)

    def _death(self) -> ChildLost:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return ChildLost("crashed", "the decoder has hung up")
        if code == -signal.SIGXCPU:
            return ChildLost("timeout", "the decoder has used up its processor time", is_conclusive=True)
        name = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        by_whom = ", perhaps as the machine ran out of memory" if code == -signal.SIGKILL else ""
        return ChildLost("crashed", f"the decoder's process ended ({name}{by_whom})")


def start_child(module: str) -> Child:
    """In a namespace of users its rights count for nothing, so that it may not find what only those let it read."""
    try:
        return Child(module, leaves_network=True)
    except RuntimeError:
        return Child(module, leaves_network=False)


def _end(process: subprocess.Popen[bytes], sockets: tuple[socket.socket, ...], fds: tuple[int, ...]) -> None:
    """Kill it, and wait until it is gone."""
    process.kill()
    process.wait()
    for each in sockets:
        each.close()
    for fd in fds:
        os.close(fd)


def _may_be_read(at: int, size: int) -> bool:
    return 0 <= at < _MOST_AT and 0 < size <= channel.READ_BYTES


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    """Its own errors do not pass for those of the child."""
    try:
        file.seek(at)
        return file.read(size)
    except (TimeoutError, ProcessLookupError) as error:
        raise OSError(f"the file cannot be read: {error!r}") from error


def _described(item: Undecoded) -> dict[str, Any]:
    """All but its bytes."""
    return {
        "num_bytes": len(item.data) if item.file is None else item.probe.num_bytes,
        "by_range": item.file is not None,
        "ahead_bytes": 0,
        "probe": fields_of(item.probe),
        "plan": item.plan.pts_seconds,
        "size": item.size,
        "resample": item.resample,
        "page": item.page,
        "dct_scaled": item.dct_scaled,
        "at_keyframes": item.at_keyframes,
        "rules": fields_of(item.rules),
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
