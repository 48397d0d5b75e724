"""LMDB: one environment a shard, one writer a shard, on a local disk. The only module that imports `lmdb`.

An *open* shard is a folder with one live writer; a *sealed* shard is one immutable file. A value is the record's bytes
followed by their CRC-32, checked when a reader first reads a key.

Environments are never closed by hand: `lmdb` unmaps at once and a view that is still in use then kills the process
(measured: lmdb 3.0, SIGSEGV). Here every view holds its environment, which closes with the last of them.
"""

from __future__ import annotations

import math
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import lmdb
import numpy as np

from pipeline.errors import ConfigError
from pipeline.features.codec import Buffer
from pipeline.features.local_disk import FileLock, network_filesystem

MAP_BYTES = 2**30
WRITER_LOCK = "writer.lock"
CREATION_LOCK = ".creation.lock"
_CHECKSUM = struct.Struct("<I")
# Values below half a page lie among their neighbours at any even address; copied, they are aligned like the rest.
_COPY_BELOW_BYTES = 4096
_MAX_READERS = 1024
# What a shard takes besides its records: 41 KB measured when open (lmdb 3.0, batches of 1 to 16 records) with 4 KB of
# locks; 20 KB sealed, and its file in the catalogue.
SHARD_OVERHEAD_BYTES = 64 * 1024
_PAGE_BYTES = 4096
_ENTRY_BYTES = 128  # a key of 40 digits, the page numbers and headers that go with it


def disk_bytes(record_bytes: int) -> int:
    """The disk that a record takes in a shard, at most: whole pages, and half of others for its entry."""
    return _PAGE_BYTES * math.ceil((record_bytes + _ENTRY_BYTES) / _PAGE_BYTES) + 2 * _ENTRY_BYTES


def is_read(path: str) -> bool:
    """True while a process of this machine reads the shard at `path`: deleted then, it would keep its disk space."""
    try:
        FileLock(_data_file(path), blocking=False, create=False).close()
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def compact_shard(directory: str, target: str) -> None:
    """Write the committed records of the open shard at `directory` to the single file `target`, and sync it.

    Raises `FileNotFoundError` when the shard has no records file yet, `ValueError` when it is damaged.
    """
    source = _environment(directory)
    with open(target, "wb") as file:
        source.copy_to(file.fileno())
        os.fsync(file.fileno())


def lock_leftover(directory: str) -> FileLock | None:
    """The lock of an open shard whose writer is gone; None while one lives or when the shard is gone too."""
    # Under the creation lock no writer is between making its folder and locking it.
    with FileLock(os.path.join(os.path.dirname(directory), CREATION_LOCK), blocking=True):
        try:
            return FileLock(os.path.join(directory, WRITER_LOCK), blocking=False)
        except (BlockingIOError, FileNotFoundError):
            return None


def has_writer(directory: str) -> bool:
    """True while the writer of the open shard at `directory` lives."""
    lock = lock_leftover(directory) if os.path.isdir(directory) else None
    if lock is not None:
        lock.close()
    return lock is None and os.path.isdir(directory)


_environments: WeakValueDictionary[str, _Environment] = WeakValueDictionary()
_environments_lock = threading.Lock()


def _environment(path: str) -> _Environment:
    """The process's one environment on `path`: lmdb refuses a second one."""
    path = os.path.realpath(path)
    with _environments_lock:
        known = _environments.get(path)
        if known is not None:
            _refuse_after_fork(known.pid, path)
            return known
        opened = _open_folder(path) if os.path.isdir(path) else _open_file(path)
        _environments[path] = opened
        return opened


def _create(path: str, map_bytes: int) -> _Environment:
    """The writer's environment, which this process's readers share."""
    environment = _Environment(lmdb.open(path, map_size=map_bytes, max_readers=_MAX_READERS), sealed=False)
    with _environments_lock:
        _environments[os.path.realpath(path)] = environment
    return environment


def _open_folder(path: str) -> _Environment:
    opened = _open(path, max_readers=_MAX_READERS)
    return _Environment(opened, sealed=False, in_use=_use(path))


def _open_file(path: str) -> _Environment:
    opened = _open(path, subdir=False, lock=False)
    needed = (opened.info()["last_pgno"] + 1) * opened.stat()["psize"]
    if needed > os.path.getsize(path):  # reading past the end of a mapped file kills the process
        raise ValueError(f"{path}: damaged shard: {os.path.getsize(path)} bytes of {needed}")
    return _Environment(opened, sealed=True, in_use=_use(path))


def _use(path: str) -> FileLock:
    return FileLock(_data_file(path), blocking=True, create=False, shared=True)


def _data_file(path: str) -> str:
    return os.path.join(path, "data.mdb") if os.path.isdir(path) else path


def _open(path: str, **options: Any) -> lmdb.Environment:
    data_file = _data_file(path)
    if not os.path.exists(data_file) or os.path.getsize(data_file) == 0:
        raise FileNotFoundError(f"{data_file}: no records here")
    try:
        return _open_once_free(path, readonly=True, create=False, **options)
    except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
        raise ValueError(f"{path}: damaged shard: {error}") from error
    except lmdb.Error as error:
        if not os.path.exists(data_file):
            raise FileNotFoundError(f"{data_file}: moved while being opened") from error
        raise


def _open_once_free(path: str, **options: Any) -> lmdb.Environment:
    # An environment that another thread is just closing still counts as open for lmdb, no longer for us.
    for _ in range(100):
        try:
            return lmdb.open(path, **options)
        except lmdb.Error as error:
            if "already open" not in str(error):
                raise
            time.sleep(0.01)
    return lmdb.open(path, **options)


def _refuse_after_fork(pid: int, path: str) -> None:
    if pid != os.getpid():
        raise RuntimeError(f"{path}: opened by process {pid}, of which this is a fork; start workers by spawn")


def _owned(view: memoryview, owner: object) -> memoryview:
    """`view` made to keep `owner` alive, as every slice of it then does."""
    array = np.frombuffer(view, np.uint8).view(_OwnedBytes)
    array.owner = owner
    return array.data


def _checksum(parts: Sequence[Buffer]) -> bytes:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return _CHECKSUM.pack(value)


class _OwnedBytes(np.ndarray[Any, np.dtype[np.uint8]]):
    owner: object


class _Environment:
    """An LMDB environment that closes when the last view into it, and the last reader or writer, is gone.

    A sealed one is read through one transaction that stays open, so that views stay valid. In an open one every read is
    its own transaction and copies: a transaction that stayed open would show old records and pin their pages.
    """

    # `in_use` is what `is_read` asks for; a writer has a lock of its own.
    def __init__(self, environment: lmdb.Environment, *, sealed: bool, in_use: FileLock | None = None) -> None:
        self.pid = os.getpid()
        self._in_use = in_use
        self._lock = threading.Lock()  # one thread in a transaction; the map must not move under it
        self._environment = environment
        self._view = environment.begin(buffers=True) if sealed else None

    def __del__(self) -> None:
        if self._in_use is not None:
            self._in_use.close()

    def read(self, key: bytes) -> memoryview | None:
        if self._view is not None:  # what `_reading` would give takes 2 µs more
            with self._lock:
                kept = self._view.get(key)
            return None if kept is None else _owned(kept, self)
        with self._reading() as transaction:
            value = transaction.get(key)
        return None if value is None else memoryview(value)

    def read_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._reading() as transaction:
            found = map(transaction.get, keys)
            return [None if value is None else bytes(value) for value in found]

    def keys(self) -> list[str]:
        with self._reading() as transaction, transaction.cursor() as cursor:
            return [bytes(key).decode() for key in cursor.iternext(values=False)]

    def copy_to(self, descriptor: int) -> None:
        with self._lock:
            self._environment.copyfd(descriptor, compact=True)

    def write(self, items: Sequence[tuple[bytes, Sequence[Buffer]]]) -> None:
        with self._lock:
            while not self._committed(items):
                self._environment.set_mapsize(2 * self._environment.info()["map_size"])

    def _committed(self, items: Sequence[tuple[bytes, Sequence[Buffer]]]) -> bool:
        try:
            with self._environment.begin(write=True) as transaction:
                for key, parts in items:
                    # One at a time, in memory that was just used: a whole batch's took 45 µs more for each 64 KB.
                    transaction.put(key, b"".join([*parts, _checksum(parts)]))
        except lmdb.MapFullError:
            return False
        return True

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        with self._lock:
            if self._view is not None:
                yield self._view
                return
            try:
                transaction = self._environment.begin()
            except lmdb.MapResizedError:  # the writer, in its process, has grown the map
                self._environment.set_mapsize(0)
                transaction = self._environment.begin()
            with transaction:
                yield transaction


class ShardWriter:
    """The only writer a shard ever has. It makes the folder `directory/shard_id` and locks it for its own life.

    The lock dies with the process, which tells `lock_leftover` that the shard is nobody's. Raises `ConfigError` on a
    network file system and `FileExistsError` when the shard has, or had, a writer.
    """

    def __init__(self, directory: str, shard_id: str, map_bytes: int = MAP_BYTES) -> None:
        os.makedirs(directory, exist_ok=True)
        kind = network_filesystem(directory)
        if kind is not None:
            raise ConfigError(
                f"{directory} lies on {kind}, where LMDB's memory map and locks are not safe; "
                "set store.local_path to a folder on a local disk"
            )
        self.shard_id = shard_id
        self.path = os.path.join(directory, shard_id)
        self._pid = os.getpid()
        with FileLock(os.path.join(directory, CREATION_LOCK), blocking=True):
            try:
                os.mkdir(self.path)
            except FileExistsError as error:
                raise FileExistsError(
                    f"shard {self.path} has a writer or is a dead one's leftover (which recover() seals); "
                    "a new writer needs a new shard id"
                ) from error
            self._lock = FileLock(os.path.join(self.path, WRITER_LOCK), blocking=False)
        self._shard: _Environment | None = _create(self.path, map_bytes)

    def put_batch(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        """Commit all of `items` (key, the record's bytes in parts), or none; on return they survive this process.

        A key that is there already is replaced. Keys are 1 to 511 bytes.
        """
        _refuse_after_fork(self._pid, self.path)
        if self._shard is None:
            raise ValueError(f"shard {self.path} is closed")
        self._shard.write([(key.encode(), parts) for key, parts in items])

    def existing(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The records of those of `keys` that the shard has."""
        if self._shard is None:
            raise ValueError(f"shard {self.path} is closed")
        found = self._shard.read_all([key.encode() for key in keys])
        return {key: value[: -_CHECKSUM.size] for key, value in zip(keys, found, strict=True) if value is not None}

    def close(self) -> None:
        """Stop writing and give the lock back; the records stay in the open folder."""
        self._shard = None
        self._lock.close()


class ShardReader:
    """Reads a shard at `path`: a sealed file, or the folder of an open one, whoever is writing to it.

    Raises `FileNotFoundError` when nothing is there (any more), `ValueError` when the file is damaged.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._pid = os.getpid()
        self._verified: set[str] = set()
        self._shard: _Environment | None = _environment(path)

    def get(self, key: str) -> memoryview | None:
        """The record's bytes, read-only, at an 8-byte boundary; None when the shard does not have `key`.

        From a sealed shard without a copy: the view (and whatever is sliced from it) keeps the file mapped, also after
        `close()`. From an open shard a copy. Raises `ValueError` when the checksum is wrong.
        """
        value = self._source().read(key.encode())
        if value is None:
            return None
        record = value[: -_CHECKSUM.size]
        if key not in self._verified:
            if zlib.crc32(record) != int.from_bytes(value[-_CHECKSUM.size :], "little"):
                raise ValueError(f"{self.path}: record {key} is damaged: its checksum is wrong")
            self._verified.add(key)
        return memoryview(bytes(record)) if record.nbytes < _COPY_BELOW_BYTES else record

    def keys(self) -> list[str]:
        """Every key, in byte order."""
        return self._source().keys()

    def close(self) -> None:
        """Let go of the shard."""
        self._shard = None

    def _source(self) -> _Environment:
        _refuse_after_fork(self._pid, self.path)
        if self._shard is None:
            raise ValueError(f"reader of {self.path} is closed")
        return self._shard
