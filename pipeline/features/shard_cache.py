"""Sealed shards of a remote store on this machine's disk, for all of its processes.

What was used least recently makes room, and never a shard that is read. Three files a shard: `<shard>.lmdb`, whole;
`.lmdb.lock`, held by who brings or opens it; `.lmdb.room`, as long (in length, not in blocks) as what is being brought.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.errors import UnavailableShardError
from pipeline.features.catalogue import SealedShard
from pipeline.features.local_disk import FileLock
from pipeline.storage import Folder

_KEEP_FREE = 0.05  # of the disk; not measured
_LOOK_SECONDS = 0.05  # between looks whether another process has let go


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLimits:
    """`max_bytes` of shards on a machine, None for what its disk has; seconds within which one is to be there."""

    max_bytes: int | None = None
    fetch_seconds: float = 600.0


class ShardCache:
    """The shards in `folder`, on a local disk; nothing is made before it is needed."""

    def __init__(self, folder: str, limits: CacheLimits) -> None:
        self.folder = folder
        self.limits = limits

    def path(self, shard_id: str) -> str:
        """Where the shard is, when it is here."""
        return os.path.join(self.folder, f"{shard_id}.lmdb")

    @contextmanager
    def brought(self, source: Folder, name: str, shard: SealedShard) -> Iterator[str]:
        """The path of the published shard `name`, brought when it is not here; it stays until the block ends.

        Raises `UnavailableShardError` when it is not here in time or has no room, `FileNotFoundError` when it is gone,
        `ValueError` when it is not what was sealed.
        """
        target, deadline = self.path(shard.shard_id), time.monotonic() + self.limits.fetch_seconds
        os.makedirs(self.folder, exist_ok=True)
        with _lock_until(f"{target}.lock", deadline):
            if not os.path.exists(target):
                self._bring(source, name, shard, deadline)
            os.utime(target)
            yield target

    def keep(self, copy: str, shard_id: str) -> None:
        """Take in the whole file `copy`, which lies on the same disk; without room for it, delete it."""
        os.makedirs(self.folder, exist_ok=True)
        with FileLock(self._room_lock, blocking=True):
            if self._makes_room(os.path.getsize(copy)):
                os.replace(copy, self.path(shard_id))
            else:
                os.unlink(copy)

    def remove(self, shard_id: str) -> None:
        """Delete a shard; who reads it goes on reading."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(shard_id))

    @property
    def _room_lock(self) -> str:
        return os.path.join(self.folder, ".room.lock")

    def _bring(self, source: Folder, name: str, shard: SealedShard, deadline: float) -> None:
        target = self.path(shard.shard_id)
        temporary, room = f"{target}.tmp", f"{target}.room"
        late = UnavailableShardError(shard.shard_id, f"later than {self.limits.fetch_seconds:g} s")
        self._reserve(shard, room, deadline)
        try:
            source.download(name, temporary, functools.partial(_check_time, deadline, late))
            checksum = file_sha256(temporary)
            if checksum != shard.checksum:
                raise ValueError(f"shard {shard.shard_id} is damaged: SHA-256 {checksum}, sealed as {shard.checksum}")
            os.replace(temporary, target)
        finally:
            for leftover in (temporary, room):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(leftover)

    def _reserve(self, shard: SealedShard, room: str, deadline: float) -> None:
        max_bytes = self.limits.max_bytes
        none = UnavailableShardError(shard.shard_id, f"no room for its {shard.num_bytes} bytes")
        while max_bytes is None or shard.num_bytes <= max_bytes:
            with _lock_until(self._room_lock, deadline):
                if self._makes_room(shard.num_bytes):
                    with open(room, "wb") as file:
                        file.truncate(shard.num_bytes)
                    return
            _check_time(deadline, none)
            time.sleep(_LOOK_SECONDS)
        raise none

    def _makes_room(self, num_bytes: int) -> bool:
        """True when `num_bytes` more keep to the bound, for which shards are deleted; the room lock is held."""
        self._forget_dead()
        for path in sorted(self._files("*.lmdb"), key=_used_at):
            usage = shutil.disk_usage(self.folder)
            if self._keeps_bound(num_bytes) and usage.free > num_bytes + usage.total * _KEEP_FREE:
                return True
            _delete_unused(path)
        return self._keeps_bound(num_bytes)

    def _keeps_bound(self, num_bytes: int) -> bool:
        if self.limits.max_bytes is None:
            return True
        return num_bytes + sum(map(_length, self._files("*.lmdb", "*.room"))) <= self.limits.max_bytes

    def _forget_dead(self) -> None:
        """What processes left that were killed while they brought a shard."""
        for path in self._files("*.room", "*.tmp"):
            target = os.path.splitext(path)[0]
            with contextlib.suppress(BlockingIOError, FileNotFoundError), FileLock(f"{target}.lock", blocking=False):
                os.unlink(path)

    def _files(self, *patterns: str) -> list[str]:
        names = [name for pattern in patterns for name in glob.glob(pattern, root_dir=self.folder)]
        return [os.path.join(self.folder, name) for name in names]


def file_sha256(path: str) -> str:
    """In hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_time(deadline: float, error: Exception) -> None:
    if time.monotonic() > deadline:
        raise error


@contextmanager
def _lock_until(path: str, deadline: float) -> Iterator[None]:
    """The lock at `path`, waited for until `deadline` and for one try at least."""
    while True:
        try:
            lock = FileLock(path, blocking=False)
            break
        except BlockingIOError:
            name = os.path.basename(path).partition(".lmdb")[0]
            _check_time(deadline, UnavailableShardError(name, "being brought by another process for too long"))
            time.sleep(_LOOK_SECONDS)
    with lock:
        yield


def _delete_unused(path: str) -> None:
    """Delete a shard, unless a process reads it or is about to."""
    with (
        contextlib.suppress(BlockingIOError, FileNotFoundError),
        FileLock(f"{path}.lock", blocking=False),
        FileLock(path, blocking=False, create=False),
    ):
        os.unlink(path)


def _used_at(path: str) -> float:
    with contextlib.suppress(FileNotFoundError):
        return os.path.getmtime(path)
    return 0.0


def _length(path: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.path.getsize(path)
    return 0
