"""From an open shard to a sealed one, to another machine, to nothing. Every step can be cut off and done again."""

from __future__ import annotations

import dataclasses
import errno
import glob
import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Collection, Mapping
from datetime import datetime
from types import MappingProxyType

from pipeline.features.catalogue import (
    Entry,
    SealedShard,
    read_sealed,
    remove_entries,
    write_entries,
)
from pipeline.features.codec import decode_record
from pipeline.features.local_disk import FileLock
from pipeline.features.shard import WRITER_LOCK, ShardReader, compact_shard, lock_leftover
from pipeline.storage import Folder

_log = logging.getLogger(__name__)
_KEEP_FREE = 0.05  # of the disk; not measured


def sealed_name(shard_id: str) -> str:
    """Where a sealed shard lies below the store's root."""
    return f"shards/{shard_id}.lmdb"


def seal_shard(
    open_dir: str,
    destination: Folder,
    *,
    keep_at: str | None = None,
    created: Mapping[str, datetime] = MappingProxyType({}),
) -> SealedShard | None:
    """Compact the open shard at `open_dir`, publish it, list it in the catalogue, then remove the open folder.

    Its writer must be closed. Cut off at any point, it is finished by doing it again; done by another meanwhile, it
    returns what the other made. `keep_at` is where this machine keeps its own copy of a shard that goes to another;
    `created` says of keys since when there are such records, if not since now.
    None for a shard without records, which is only removed.
    """
    try:
        lock = FileLock(os.path.join(open_dir, WRITER_LOCK), blocking=True, create=False)
    except FileNotFoundError:
        return read_sealed(destination, os.path.basename(open_dir))
    with lock:
        return _seal_locked(open_dir, destination, keep_at, created)


def recover_shards(
    open_root: str, destination: Folder, cache_dir: str | None, spared: Collection[str] = ()
) -> list[SealedShard]:
    """Seal every open shard below `open_root` whose writer is gone, and clear away what an earlier removal left.

    Those that are `spared` stay as they are. A damaged one is set aside as `.damaged-<shard>` with a warning: its
    records are misses from now on.
    """
    sealed = []
    names = os.listdir(open_root) if os.path.isdir(open_root) else []
    for name in sorted(set(names).difference(spared)):
        path = os.path.join(open_root, name)
        if name.startswith(".removed-"):
            shutil.rmtree(path, ignore_errors=True)
        lock = lock_leftover(path) if os.path.isdir(path) and not name.startswith(".") else None
        if lock is None:
            continue
        with lock:
            keep_at = os.path.join(cache_dir, f"{name}.lmdb") if cache_dir is not None else None
            sealed.append(_seal_or_set_aside(path, destination, keep_at))
    return [shard for shard in sealed if shard is not None]


def fetch_shard(source: Folder, shard: SealedShard, target: str) -> None:
    """Bring a published shard to the local file `target`, once for all processes of this machine.

    Raises `FileNotFoundError` when it is gone, `ValueError` when it is not what was sealed.
    """
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with FileLock(f"{target}.lock", blocking=True):
        if os.path.exists(target):
            return
        temporary = f"{target}.tmp"
        _make_room(os.path.dirname(target), shard.num_bytes)
        try:
            source.download(sealed_name(shard.shard_id), temporary)
            checksum = _sha256(temporary)
            if checksum != shard.checksum:
                raise ValueError(f"shard {shard.shard_id} is damaged: SHA-256 {checksum}, sealed as {shard.checksum}")
            os.replace(temporary, target)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)


def delete_shard(shard_id: str, destination: Folder, open_root: str, cached: str | None) -> None:
    """Remove a shard everywhere this machine can reach: catalogue first, so that nothing claims what is going.

    An open shard that has a live writer stays.
    """
    remove_entries(destination, shard_id)
    destination.remove(sealed_name(shard_id))
    if cached is not None and os.path.exists(cached):
        os.unlink(cached)
    open_dir = os.path.join(open_root, shard_id)
    lock = lock_leftover(open_dir) if os.path.isdir(open_dir) else None
    if lock is not None:
        with lock:
            _remove_folder(open_dir)


def _make_room(cache_dir: str, num_bytes: int) -> None:
    """Delete the oldest cached shards until `num_bytes` fit; readers that have one mapped keep it."""
    cached = [os.path.join(cache_dir, name) for name in glob.glob("*.lmdb", root_dir=cache_dir)]
    for path in sorted(cached, key=os.path.getmtime):
        usage = shutil.disk_usage(cache_dir)
        if usage.free > num_bytes + usage.total * _KEEP_FREE:
            return
        os.unlink(path)


def _seal_or_set_aside(open_dir: str, destination: Folder, keep_at: str | None) -> SealedShard | None:
    try:
        return _seal_locked(open_dir, destination, keep_at)
    except ValueError as error:
        aside = _beside(open_dir, "damaged")
        _log.warning("%s; set aside as %s", error, aside)
        os.rename(open_dir, aside)
        return None


def _seal_locked(
    open_dir: str,
    destination: Folder,
    keep_at: str | None,
    created: Mapping[str, datetime] = MappingProxyType({}),
) -> SealedShard | None:
    shard_id = os.path.basename(open_dir)
    sealed = read_sealed(destination, shard_id) or _publish(open_dir, destination, keep_at, created)
    _remove_folder(open_dir)
    return sealed


def _publish(
    open_dir: str, destination: Folder, keep_at: str | None, created: Mapping[str, datetime]
) -> SealedShard | None:
    """All of sealing but the removal. None when the shard has no records."""
    for leftover in glob.glob("*.tmp", root_dir=open_dir):
        os.unlink(os.path.join(open_dir, leftover))
    # A new name each time: this process may still hold the last attempt's file open.
    copy = os.path.join(open_dir, f"{uuid.uuid4().hex}.tmp")
    try:
        compact_shard(open_dir, copy)
    except FileNotFoundError:  # its writer died before the first commit
        return None
    entries = [dataclasses.replace(entry, created=created.get(entry.key)) for entry in shard_entries(copy)]
    if not entries:
        return None
    shard_id, num_bytes = os.path.basename(open_dir), os.path.getsize(copy)
    sealed = SealedShard(shard_id=shard_id, num_records=len(entries), num_bytes=num_bytes, checksum=_sha256(copy))
    _publish_file(copy, destination, sealed_name(shard_id))
    write_entries(destination, sealed, entries)
    if keep_at is not None and os.path.exists(copy):  # not when publishing was a rename
        os.makedirs(os.path.dirname(keep_at), exist_ok=True)
        os.replace(copy, keep_at)
    return sealed


def shard_entries(path: str) -> list[Entry]:
    """What a compacted copy holds; every record is checked, and a damaged one left out of the catalogue."""
    reader = ShardReader(path)
    entries = []
    for key in reader.keys():  # noqa: SIM118 (not a mapping)
        try:
            entries.append(_entry(key, reader.get(key)))
        except ValueError as error:
            _log.warning("%s: record %s is not listed: %s", path, key, error)
    reader.close()
    return entries


def _entry(key: str, data: memoryview | None) -> Entry:
    record = decode_record(data if data is not None else b"")
    return Entry(
        key=key,
        tenant=str(record.key_terms.get("tenant", "")),
        num_bytes=data.nbytes if data is not None else 0,
        feature_length=record.geometry.feature_length,
        grid=record.geometry.grid,
        key_terms=record.key_terms,
    )


def _publish_file(path: str, destination: Folder, name: str) -> None:
    """Show the local file `path` as `name`, whole; on the same file system by renaming it."""
    if not destination.is_local:
        destination.upload(path, name)
        return
    target = destination.locate(name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.replace(path, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        destination.upload(path, name)


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_folder(open_dir: str) -> None:
    # Renamed first: an open shard is there whole or not at all, also for who is killed half way.
    gone = _beside(open_dir, "removed")
    os.rename(open_dir, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _beside(open_dir: str, state: str) -> str:
    parent, name = os.path.split(open_dir)
    return os.path.join(parent, f".{state}-{name}-{uuid.uuid4().hex[:8]}")
