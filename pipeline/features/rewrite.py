"""Sealed shards written anew, without some of their records: nothing is ever changed in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow.parquet as pq

from pipeline.errors import ConfigError
from pipeline.features.catalogue import SealedShard
from pipeline.features.codec import Buffer
from pipeline.features.shard import ShardWriter
from pipeline.features.store import FeatureStore

_BATCH_BYTES = 64 * 2**20  # of records in memory at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """What became of some shards: `made` is what there is instead, `dropped` the keys of records that are gone.

    `damaged` are keys of records that could not be read, which are gone as well.
    """

    made: tuple[SealedShard, ...]
    removed: tuple[str, ...]
    dropped: tuple[str, ...]
    damaged: tuple[str, ...] = ()


def rewrite_shards(store: FeatureStore, shard_ids: Sequence[str], drop: Collection[str] = ()) -> Rewritten:
    """Put the records of sealed shards, but for the keys to `drop`, into as few new ones as `shard_bytes` allows.

    A tenant's stay apart from another's. Of a key that several have, the newest shard's record stays. The new shards
    are sealed and listed before the old ones go: cut off in between, both are there, no record is lost, and doing it
    again ends it. Only when it returns is what was dropped no longer found. Raises `ConfigError` when a process of this
    machine reads one of them.
    """
    used = store.in_use(shard_ids)
    if used:
        raise ConfigError(
            f"shards {', '.join(used)} are in use on this machine; end the runs that read the store first"
        )
    parts = [_rewrite(part, own, drop) for part, own in store.by_part(shard_ids)]
    return Rewritten(
        made=tuple(shard for part in parts for shard in part.made),
        removed=tuple(shard_ids),
        dropped=tuple(key for part in parts for key in part.dropped),
        damaged=tuple(key for part in parts for key in part.damaged),
    )


def _rewrite(store: FeatureStore, shard_ids: Sequence[str], drop: Collection[str]) -> Rewritten:
    writer = _Writer(store, _created(store, shard_ids))
    seen: set[str] = set()
    dropped: list[str] = []
    damaged: list[str] = []
    for shard_id in sorted(shard_ids, reverse=True):
        try:
            reader = store.reader(shard_id)
        except (FileNotFoundError, ValueError):
            damaged += store.shard_keys(shard_id)
            continue
        for key in reader.keys():  # noqa: SIM118 (not a mapping)
            if key in seen:
                continue
            if key in drop:
                dropped.append(key)
                continue
            try:
                data = reader.get(key)
            except ValueError:
                damaged.append(key)
                continue
            if data is not None:
                seen.add(key)
                writer.put(key, bytes(data))
        reader.close()
    made = writer.seal()
    store.close()
    store.delete_shards(shard_ids)
    store.reload()
    lost = tuple(key for key in dict.fromkeys(damaged) if key not in seen)
    return Rewritten(made=tuple(made), removed=tuple(shard_ids), dropped=tuple(dict.fromkeys(dropped)), damaged=lost)


def _created(store: FeatureStore, shard_ids: Sequence[str]) -> dict[str, datetime]:
    """Since when there are records with these shards' keys: they do not become younger by being written anew."""
    created: dict[str, datetime] = {}
    for shard_id in sorted(shard_ids):
        try:
            with store.entries(shard_id) as file:
                table = pq.read_table(file, columns=["key", "created"])
        except FileNotFoundError:
            continue
        created.update(zip(table["key"].to_pylist(), table["created"].to_pylist(), strict=True))
    return created


class _Writer:
    """Fills one shard after another."""

    def __init__(self, store: FeatureStore, created: Mapping[str, datetime]) -> None:
        self._store = store
        self._created = created
        self._shard: ShardWriter | None = None
        self._waiting: list[tuple[str, list[Buffer]]] = []
        self._waiting_bytes = self._shard_bytes = 0
        self._made: list[SealedShard] = []

    def put(self, key: str, data: bytes) -> None:
        if self._shard_bytes + len(data) > self._store.shard_bytes and self._shard_bytes:
            self._end()
        self._waiting.append((key, [data]))
        self._waiting_bytes += len(data)
        self._shard_bytes += len(data)
        if self._waiting_bytes >= _BATCH_BYTES:
            self._flush()

    def seal(self) -> list[SealedShard]:
        self._end()
        return self._made

    def _flush(self) -> None:
        if self._waiting:
            if self._shard is None:
                self._shard = self._store.new_shard()
            self._shard.put_batch(self._waiting)
        self._waiting, self._waiting_bytes = [], 0

    def _end(self) -> None:
        self._flush()
        if self._shard is not None:
            self._shard.close()
            sealed = self._store.seal(self._shard.path, self._created)
            if sealed is not None:
                self._made.append(sealed)
        self._shard, self._shard_bytes = None, 0
