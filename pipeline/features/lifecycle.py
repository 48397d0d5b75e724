"""From an open shard to a sealed one, to another machine, to nothing. Every step can be cut off and done again."""

from __future__ import annotations

import dataclasses
import errno
import glob
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
from pipeline.features.shard_cache import ShardCache, file_sha256
from pipeline.storage import Folder

_log = logging.getLogger(__name__)


def sealed_name(shard_id: str) -> str:
    """Where a sealed shard lies below the store's root."""
    return f"shards/{shard_id}.lmdb"


def seal_shard(
    open_dir: str,
    destination: Folder,
    *,
    cache: ShardCache | None = None,
    created: Mapping[str, datetime] = MappingProxyType({}),
) -> SealedShard | None:
    """Compact the open shard at `open_dir`, publish it, list it in the catalogue, then remove the open folder.

    Its writer must be closed. Cut off at any point, it is finished by doing it again; done by another meanwhile, it
    returns what the other made. `cache` is where this machine keeps its own copy of a shard that goes to another;
    `created` says of keys since when there are such records, if not since now.
    None for a shard without records, which is only removed.
    """
    try:
        lock = FileLock(os.path.join(open_dir, WRITER_LOCK), blocking=True, create=False)
    except FileNotFoundError:
        return read_sealed(destination, os.path.basename(open_dir))
    with lock:
        return _seal_locked(open_dir, destination, cache, created)


def recover_shards(
    open_root: str, destination: Folder, cache: ShardCache | None, spared: Collection[str] = ()
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
            sealed.append(_seal_or_set_aside(path, destination, cache))
    return [shard for shard in sealed if shard is not None]


def delete_shard(shard_id: str, destination: Folder, open_root: str, cache: ShardCache | None) -> None:
    """Remove a shard everywhere this machine can reach: catalogue first, so that nothing claims what is going.

    An open shard that has a live writer stays.
    """
    remove_entries(destination, shard_id)
    destination.remove(sealed_name(shard_id))
    if cache is not None:
        cache.remove(shard_id)
    open_dir = os.path.join(open_root, shard_id)
    lock = lock_leftover(open_dir) if os.path.isdir(open_dir) else None
    if lock is not None:
        with lock:
            _remove_folder(open_dir)


def _seal_or_set_aside(open_dir: str, destination: Folder, cache: ShardCache | None) -> SealedShard | None:
    try:
        return _seal_locked(open_dir, destination, cache)
    except ValueError as error:
        aside = _beside(open_dir, "damaged")
        _log.warning("%s; set aside as %s", error, aside)
        os.rename(open_dir, aside)
        return None


def _seal_locked(
    open_dir: str,
    destination: Folder,
    cache: ShardCache | None,
    created: Mapping[str, datetime] = MappingProxyType({}),
) -> SealedShard | None:
    shard_id = os.path.basename(open_dir)
    sealed = read_sealed(destination, shard_id) or _publish(open_dir, destination, cache, created)
    _remove_folder(open_dir)
    return sealed


def _publish(
    open_dir: str, destination: Folder, cache: ShardCache | None, created: Mapping[str, datetime]
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
    sealed = SealedShard(shard_id=shard_id, num_records=len(entries), num_bytes=num_bytes, checksum=file_sha256(copy))
    _publish_file(copy, destination, sealed_name(shard_id))
    write_entries(destination, sealed, entries)
    if cache is not None and os.path.exists(copy):  # not when publishing was a rename
        cache.keep(copy, shard_id)
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
        made_seconds=record.made_seconds,
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


def _remove_folder(open_dir: str) -> None:
    # Renamed first: an open shard is there whole or not at all, also for who is killed half way.
    gone = _beside(open_dir, "removed")
    os.rename(open_dir, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _beside(open_dir: str, state: str) -> str:
    parent, name = os.path.split(open_dir)
    return os.path.join(parent, f".{state}-{name}-{uuid.uuid4().hex[:8]}")
