"""Looking a store over, whole: what is listed is there, and is what its key says; and putting right what is not."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import TransientError
from pipeline.features.catalogue import SealedShard, remove_entries, write_entries
from pipeline.features.codec import decode_record
from pipeline.features.identity import key_of
from pipeline.features.lifecycle import sealed_name, shard_entries
from pipeline.features.rewrite import rewrite_shards
from pipeline.features.shard import ShardReader, has_writer
from pipeline.features.shard_cache import file_sha256
from pipeline.features.store import FeatureStore

Code = Literal[
    "missing_file",  # listed, and not there: its records are misses
    "damaged_file",  # not the bytes that were sealed
    "damaged_record",  # a wrong checksum, not a record, or under a key that is not its own
    "unlisted_record",  # in a shard, and not in its part of the catalogue
    "missing_record",  # in the catalogue, and not in its shard
    "unlisted_file",  # a shard that no catalogue file names: sealing was cut off, or deleting
    "left_open",  # an open shard on this machine whose writer is gone
    "leftover",  # of an operation that was cut off, or a damaged shard that was set aside
]
_SMALL = 0.5  # of `shard_bytes`: shards below are worth putting together


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that is not as it has to be: in which shard or file, and which key where it is one record."""

    code: Code
    where: str
    key: str | None = None

    def __str__(self) -> str:
        return f"{self.code} {self.where}" + (f" {self.key}" if self.key else "")


def verify(store: FeatureStore) -> Iterator[Finding]:
    """Read every record of every sealed shard, and look for what is left over; nothing is changed.

    Of a remote store, shards that this machine does not have are fetched. What a living writer has open is as it has to
    be. Findings come as they are found, of one tenant after another.
    """
    for part in store.parts():
        yield from _verify(part)


def _verify(store: FeatureStore) -> Iterator[Finding]:
    store.reload()
    listed = store.own_shards()
    for shard in listed:
        yield from _verify_shard(store, shard)
    names = {sealed_name(shard.shard_id) for shard in listed}
    for name in store.folder.list("shards"):
        if f"shards/{name}" not in names:
            yield Finding(code="unlisted_file", where=f"shards/{name}")
    yield from _left_open(store)


def _verify_shard(store: FeatureStore, shard: SealedShard) -> Iterator[Finding]:
    if not store.folder.exists(sealed_name(shard.shard_id)):
        yield Finding(code="missing_file", where=shard.shard_id)
        return
    try:
        reader = store.reader(shard.shard_id)
        whole = file_sha256(reader.path) == shard.checksum
    except (FileNotFoundError, ValueError, TransientError):
        yield Finding(code="damaged_file", where=shard.shard_id)
        return
    if not whole:
        yield Finding(code="damaged_file", where=shard.shard_id)
    listed, found = set(store.shard_keys(shard.shard_id)), set()
    for key in reader.keys():  # noqa: SIM118 (not a mapping)
        found.add(key)
        if not _is_sound(reader, key):
            yield Finding(code="damaged_record", where=shard.shard_id, key=key)
        elif key not in listed:
            yield Finding(code="unlisted_record", where=shard.shard_id, key=key)
    for key in sorted(listed - found):
        yield Finding(code="missing_record", where=shard.shard_id, key=key)
    reader.close()


def _is_sound(reader: ShardReader, key: str) -> bool:
    try:
        data = reader.get(key)
        if data is None:
            return False
        own = key_of(dict(decode_record(data).key_terms))
        return key == own or key.startswith(f"{own}-")  # of a record of other terms that has the key: `put_named`
    except ValueError:
        return False


def _left_open(store: FeatureStore) -> Iterator[Finding]:
    root = store.open_root
    for name in sorted(os.listdir(root)) if os.path.isdir(root) else ():
        path = os.path.join(root, name)
        if name.startswith((".removed-", ".damaged-")):
            yield Finding(code="leftover", where=name)
        elif os.path.isdir(path) and not name.startswith(".") and not has_writer(path):
            yield Finding(code="left_open", where=name)
    for path in _temporary(store):
        yield Finding(code="leftover", where=path)


def _temporary(store: FeatureStore) -> list[str]:
    """Files that a publishing of this local store left, whose process was killed."""
    if not store.is_local:
        return []
    found = [glob.glob(os.path.join(store.folder.path, name, "*.tmp")) for name in ("shards", "catalogue", "sources")]
    return sorted(path for each in found for path in each)


def repair(store: FeatureStore) -> list[str]:
    """Put right what `verify` finds; returns what was done, a line each. Records that are lost are misses afterwards.

    Seals what dead writers left open, lists whole shards that are not listed, takes what is not there out of the
    catalogue, and writes damaged shards anew with the records that are sound. May be cut off, and done again. Raises
    `ConfigError` when a process of this machine reads a shard that has to be written anew.
    """
    done = [f"sealed {shard.shard_id}: {shard.num_records} records" for shard in store.recover()]
    return [*done, *(line for part in store.parts() for line in _repair(part))]


def _repair(store: FeatureStore) -> list[str]:
    done = []
    findings = list(_verify(store))
    damaged: dict[str, set[str]] = {}
    for finding in findings:
        if finding.code == "missing_file":
            remove_entries(store.folder, finding.where)
            done.append(f"no longer listed {finding.where}: its file is gone")
        elif finding.code == "unlisted_file":
            done.append(_list_or_remove(store, finding.where))
        elif finding.code == "leftover":
            path = os.path.join(store.open_root, finding.where)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            done.append(f"removed {finding.where}")
        elif finding.code != "left_open":
            unsound = damaged.setdefault(finding.where, set())
            if finding.code == "damaged_record" and finding.key is not None:
                unsound.add(finding.key)
    for shard_id, unsound in damaged.items():
        listed = set(store.shard_keys(shard_id))
        rewritten = rewrite_shards(store, [shard_id], unsound)
        kept = {key for shard in rewritten.made for key in store.shard_keys(shard.shard_id)}
        done.append(f"rewrote {shard_id}: {len(kept)} records kept, {len(listed - kept)} lost")
    store.reload()
    return done


def _list_or_remove(store: FeatureStore, name: str) -> str:
    shard_id = os.path.basename(name).removesuffix(".lmdb")
    local = store.folder.locate(name) if store.is_local else None
    try:
        if local is None:
            raise ValueError("of a remote store only what is listed is known to be whole")
        entries = shard_entries(local)
    except (ValueError, FileNotFoundError):
        entries = []
    if not entries or local is None:
        store.folder.remove(name)
        return f"removed {name}: not listed, and not whole"
    shard = SealedShard(
        shard_id=shard_id, num_records=len(entries), num_bytes=os.path.getsize(local), checksum=file_sha256(local)
    )
    write_entries(store.folder, shard, entries)
    return f"listed {name}: {len(entries)} records"


def compact(store: FeatureStore) -> Sequence[SealedShard]:
    """Put small shards together, and leave out records that a newer shard has again; returns the shards made.

    What a process of this machine uses is left as it is. Raises what `rewrite_shards` does.
    """
    store.recover()
    return [shard for part in store.parts() for shard in _compact(part)]


def _compact(store: FeatureStore) -> Sequence[SealedShard]:
    store.reload()
    shards = store.own_shards()
    newest: dict[str, str] = {}
    for shard in shards:
        newest.update(dict.fromkeys(store.shard_keys(shard.shard_id), shard.shard_id))
    superseded = {
        shard.shard_id: {key for key in store.shard_keys(shard.shard_id) if newest[key] != shard.shard_id}
        for shard in shards
    }
    used = set(store.in_use([shard.shard_id for shard in shards]))
    free = [shard for shard in shards if shard.shard_id not in used]
    small = [shard for shard in free if shard.num_bytes < _SMALL * store.shard_bytes]
    chosen = {shard.shard_id for shard in small} if len(small) > 1 else set()
    chosen |= {shard.shard_id for shard in free if superseded[shard.shard_id]}
    if not chosen:
        return ()
    drop = {key for shard_id in chosen for key in superseded[shard_id] if newest[key] not in chosen}
    return rewrite_shards(store, sorted(chosen), drop).made
