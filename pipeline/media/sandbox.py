"""Decoding in a child process that can be killed, so that bytes which nobody vouches for cost one item at most.

The child has no network, no files to write, no rights (`pipeline.media.isolation`), and the memory and time of the item
at hand. It is started once and used for many items. What it says is checked before it is used: it may be the bytes that
speak. Resizing is done in it, too: frames come out one by one at their full size, 6 MB each of 1080p, and go out at the
model's; and whoever has them decoded then need not load what resizes.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO, Literal, TypeVar

from pipeline.errors import ConfigError, ItemError
from pipeline.media import channel
from pipeline.media.document import DEFAULT_DPI
from pipeline.media.sandbox_process import CHILD, Child, ChildLost, start_child
from pipeline.media.undecoded import Outcome, Undecoded
from pipeline.schema import Modality, Probe

T = TypeVar("T")
SandboxMode = Literal["auto", "on", "off"]
NUM_PROBERS = 2
READER_LOST = ("timeout", "crashed", "out_of_memory")  # codes of what an item did to the child, not of what it is
OFF = "off"  # what `Sandbox.level` is called where there is none

# A child ends with the thread that started it, so that one has to stay.
_starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox-starter")


def open_sandbox(mode: SandboxMode, item_seconds: float) -> Sandbox | None:
    """What decodes; None for `off`, and for `auto` where there is no Linux. Raises `ConfigError` for `on` there."""
    if mode == "off" or (mode == "auto" and sys.platform != "linux"):
        return None
    if sys.platform != "linux":
        raise ConfigError(f"decode.sandbox: on needs Linux, this is {sys.platform}; set it to auto or off")
    return Sandbox(item_seconds=item_seconds, must_isolate=mode == "on")


def open_probers(mode: SandboxMode, item_seconds: float) -> Probers | None:
    """As `open_sandbox`, of several."""
    sandboxes = [open_sandbox(mode, item_seconds) for _ in range(NUM_PROBERS)]
    opened = [sandbox for sandbox in sandboxes if sandbox is not None]
    return Probers(opened) if opened else None


class Probers:
    """A few sandboxes for threads that read, each of which waits for storage with a child of its own."""

    def __init__(self, sandboxes: Sequence[Sandbox]) -> None:
        self._sandboxes = sandboxes
        self._free: queue.LifoQueue[Sandbox] = queue.LifoQueue()  # so that one does what one can
        for sandbox in sandboxes:
            self._free.put(sandbox)

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
        """As `Sandbox.probe`."""
        with self._one() as sandbox:
            return sandbox.probe(file, num_bytes=num_bytes, declared=declared, name=name, page=page, dpi=dpi)

    def page_count(self, file: BinaryIO, *, num_bytes: int, name: str) -> int:
        """As `Sandbox.page_count`."""
        with self._one() as sandbox:
            return sandbox.page_count(file, num_bytes=num_bytes, name=name)

    def page_text(self, data: bytes, page: int) -> str:
        """As `Sandbox.page_text`."""
        with self._one() as sandbox:
            return sandbox.page_text(data, page)

    @property
    def children(self) -> list[int]:
        """As `Sandbox.children`, of all."""
        return [pid for sandbox in self._sandboxes for pid in sandbox.children]

    def close(self) -> None:
        """End the children. What is read next starts others."""
        for sandbox in self._sandboxes:
            sandbox.close()

    @contextmanager
    def _one(self) -> Iterator[Sandbox]:
        sandbox = self._free.get()
        try:
            yield sandbox
        finally:
            self._free.put(sandbox)


class Sandbox:
    """A child that decodes, started when it is first needed, and anew when it has died or grown. For any thread."""

    def __init__(self, *, item_seconds: float, must_isolate: bool = False, module: str = CHILD) -> None:
        self._item_seconds = item_seconds
        self._must_isolate = must_isolate
        self._module = module
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._level: str | None = None

    def decode(self, items: Sequence[Undecoded]) -> list[Outcome]:
        """Frames, or why there are none, of each item.

        Frames lie where the child can still write, and are written over by the next call: copy what is to be kept. They
        are not copied here, since whoever makes batches of them copies them anyway.

        Items that are handed over together cost less: child and parent each stay at their work. Errors are those of
        `decode_media` and (stage `decode`) `timeout`, `crashed`, `out_of_memory`. Raises `ConfigError` when the child
        has a network and must not, RuntimeError when it cannot be started, and what reading an item's `file` raises.
        """
        with self._lock:
            ranged = any(item.file is not None for item in items)
            whole = not ranged and sum(len(item.data) for item in items) <= channel.WHOLE_BYTES
            groups = [items] if whole else [[item] for item in items]
            if len(groups) == 1:
                return self._decode(items)
            return [_kept(outcome) for group in groups for outcome in self._decode(group)]

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
        return self._read(lambda child: child.probe(file, request, self._item_seconds), "probe", name)

    def page_count(self, file: BinaryIO, *, num_bytes: int, name: str) -> int:
        """As `read_page_count`, whose errors it raises; else as `probe`."""
        return self._read(lambda child: child.page_count(file, num_bytes, name, self._item_seconds), "probe", name)

    def page_text(self, data: bytes, page: int) -> str:
        """As `pipeline.media.document.page_text`, whose errors it raises, and those of `probe` (stage `decode`)."""
        name = f"page {page + 1}"
        return self._read(lambda child: child.page_text(data, page, self._item_seconds), "decode", name)

    @property
    def children(self) -> list[int]:
        """The process id of the child, while there is one."""
        child = self._child
        return [] if child is None else [child.pid]

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

    def _read(self, read: Callable[[Child], T | ItemError], stage: str, name: str) -> T:
        with self._lock:
            while True:
                child = self._usable()
                is_new = child.num_items == 0
                try:
                    result = read(child)
                except ChildLost as lost:
                    self._drop()
                    if lost.is_conclusive or is_new:
                        raise ItemError(stage, lost.code, f"{name}: {lost.message}") from lost
                    continue
                except BaseException:  # of the file: the child still waits for it
                    self._drop()
                    raise
                if isinstance(result, ItemError):
                    raise result
                return result

    def _decode(self, items: Sequence[Undecoded]) -> list[Outcome]:
        done: list[Outcome] = []
        while len(done) < len(items):
            child, num_done, started = self._usable(), len(done), time.perf_counter()
            is_new = child.num_items == 0
            try:
                for outcome in child.decode(items[num_done:], self._item_seconds):
                    done.append(outcome)
                    started = time.perf_counter()
            except ChildLost as lost:
                self._drop()
                # Items before may have left it broken: the verdict is that of a child which nothing else has touched.
                if lost.is_conclusive or (is_new and len(done) == num_done):
                    error = ItemError("decode", lost.code, lost.message)
                    done.append(Outcome(result=error, seconds=time.perf_counter() - started))
            except BaseException:  # of the file: the child still waits for it
                self._drop()
                raise
        return done

    def _usable(self) -> Child:
        if self._child is not None and not self._child.is_usable():
            self._drop()
        if self._child is None:
            child = _starter.submit(start_child, self._module).result()
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


def _kept(outcome: Outcome) -> Outcome:
    """The same, with frames of its own."""
    if isinstance(outcome.result, ItemError):
        return outcome
    return replace(outcome, result=replace(outcome.result, pixels=outcome.result.pixels.copy()))
