"""Archives in storage: their indexes, made once a process, and files within them."""

from __future__ import annotations

import dataclasses
import io
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from pipeline.media.archive_index import HEADER_BYTES, MAX_MEMBERS, ArchiveIndex, Member, data_offset, index_archive
from pipeline.media.source_id import SourceFacts, Strength
from pipeline.media.url_policy import SourcePolicy

_LOOK_AGAIN_SECONDS = 60  # how old what is known of a remote archive may be
_MAX_ARCHIVES = 1024
_MAX_REMEMBERED = 2 * MAX_MEMBERS  # members, of 290 bytes each


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """An archive as it was found at a time of the monotonic clock."""

    source_id: str
    strength: Strength
    index: ArchiveIndex
    looked_at: float


class Archives:
    """The archives that were read last. Threads that want the same one wait for one index of it.

    `look` gives the facts of a URI, `open` its file.
    """

    def __init__(
        self,
        look: Callable[[str, SourcePolicy], SourceFacts],
        open: Callable[[str, SourcePolicy], BinaryIO],
    ) -> None:
        self._look = look
        self._open = open
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, SourcePolicy], tuple[threading.Lock, list[Archive]]] = OrderedDict()

    def member(self, uri: str, name: str, policy: SourcePolicy) -> tuple[Archive, Member]:
        """The archive, and the member of that name. Raises what `look`, `open` and `ArchiveIndex.find` raise."""
        archive = self._get(uri, policy)
        return archive, archive.index.find(name, uri)

    def _get(self, uri: str, policy: SourcePolicy) -> Archive:
        """The archive as it is now, or was up to a minute ago where asking costs a request."""
        with self._lock:
            making, made = self._known.setdefault((uri, policy), (threading.Lock(), []))
            self._known.move_to_end((uri, policy))
        self._forget()
        with making:
            is_remote = "://" in uri and not uri.lower().startswith("file://")
            if not (made and is_remote and time.monotonic() - made[0].looked_at < _LOOK_AGAIN_SECONDS):
                made[:] = [self._indexed(uri, policy, made)]
            return made[0]

    def _indexed(self, uri: str, policy: SourcePolicy, made: list[Archive]) -> Archive:
        facts = self._look(uri, policy)
        if made and made[0].source_id == facts.source_id:
            return dataclasses.replace(made[0], looked_at=time.monotonic())
        with self._open(uri, policy) as file:
            index = index_archive(file, facts.num_bytes, uri)
        return Archive(source_id=facts.source_id, strength=facts.strength, index=index, looked_at=time.monotonic())

    def _forget(self) -> None:
        """All but the last few, by how many members they have."""
        with self._lock:
            total = sum(len(archive.index.members) for _, made in self._known.values() for archive in made)
            while (total > _MAX_REMEMBERED and len(self._known) > 1) or len(self._known) > _MAX_ARCHIVES:
                _, (_, made) = self._known.popitem(last=False)
                total -= sum(len(archive.index.members) for archive in made)


def content_offset(member: Member, file: BinaryIO) -> int:
    """Where the content of a member begins, counted from its `start`. Raises what `data_offset` raises."""
    file.seek(member.start)
    return data_offset(member, file.read(HEADER_BYTES))


class PartOfFile(io.RawIOBase):
    """A seekable file that is a part of another, which is closed with it."""

    def __init__(self, file: BinaryIO, begin: int, num_bytes: int) -> None:
        super().__init__()
        self._file = file
        self._begin = begin
        self._num_bytes = num_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence] + offset
        if at < 0:
            raise OSError(f"cannot seek to {at}")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._num_bytes - self._at)
        self._file.seek(self._begin + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
