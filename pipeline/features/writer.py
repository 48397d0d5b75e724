"""Who puts records into a store: batches into shards of their own, one tenant's apart from another's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.features.catalogue import SealedShard
from pipeline.features.codec import FeatureRecord, decode_record, encode_parts, same_terms
from pipeline.features.shard import ShardWriter

if TYPE_CHECKING:
    from pipeline.features.store import FeatureStore

_OPEN_TENANTS = 16  # whose shards a writer holds open at a time; not tuned


def _apart(shard: ShardWriter, records: Sequence[tuple[str, FeatureRecord]]) -> list[str]:
    """A key for each, that no record of other terms has."""
    taken: dict[str, Mapping[str, Any]] = {
        key: decode_record(data).key_terms for key, data in shard.existing([key for key, _ in records]).items()
    }
    keys = []
    for key, record in records:
        free, number = key, 0
        while free in taken and not same_terms(taken[free], record.key_terms):
            number += 1
            free = f"{key}-{number}"
            held = shard.existing([free]).get(free)
            if held is not None:
                taken[free] = decode_record(held).key_terms
        taken[free] = record.key_terms
        keys.append(free)
    return keys


class StoreWriter:
    """Puts batches of one tenant's records into a shard of its own, opened with the first batch.

    It is full when it holds `shard_bytes`, or when a batch comes of one window more than `shard_windows`. `put_bytes`
    are those of all records that it has put, in whatever shard.
    """

    def __init__(self, store: FeatureStore, *, seals: bool, announce: Callable[[str], None] | None) -> None:
        self._store = store
        self._seals = seals
        self._announce = announce
        self._shard: ShardWriter | None = None
        self._num_bytes = 0
        self.put_bytes = 0
        self._windows: set[int] = set()

    def put(self, records: Sequence[tuple[str, FeatureRecord]], window: int = 0) -> str:
        """Commit a batch whole, or not at all; returns the id of the shard that has it, for its receipt."""
        return self.put_named(records, window)[0]

    def put_named(self, records: Sequence[tuple[str, FeatureRecord]], window: int = 0) -> tuple[str, list[str]]:
        """As `put`; returns the keys, too, that the records are under: their own, unless a record of other terms has
        that in this shard. A record under another key is found by whoever was told it, and by nobody else."""
        if len(self._windows | {window}) > self._store.shard_windows:
            self.end()
        if self._shard is None:
            self._shard = self._start_shard()
            self._num_bytes = 0
            self._windows = set()
        self._windows.add(window)
        keys = _apart(self._shard, records)
        items = [(key, encode_parts(record)) for key, (_, record) in zip(keys, records, strict=True)]
        self._shard.put_batch(items)
        num_bytes = sum(len(part) for _, parts in items for part in parts)
        self._num_bytes += num_bytes
        self.put_bytes += num_bytes
        shard_id = self._shard.shard_id
        if self._num_bytes >= self._store.shard_bytes:
            self.end()
        return shard_id, keys

    def _start_shard(self) -> ShardWriter:
        return self._store.new_shard() if self._announce is None else self._store.new_shard(self._announce)

    def end(self) -> None:
        """Seal the current shard, or close it, as it is when it is full."""
        if self._seals:
            self.seal()
        else:
            self.close()

    def seal(self) -> SealedShard | None:
        """Close the current shard and seal it: its records outlive this machine's process and, remote, the machine."""
        path = self._shard.path if self._shard is not None else None
        self.close()
        return self._store.seal(path) if path is not None else None

    def close(self) -> None:
        """Close the current shard without sealing it; `FeatureStore.recover()` on this machine will."""
        if self._shard is not None:
            self._shard.close()
            self._shard = None


class TenantWriters:
    """Puts batches of any tenants' records into the store, each tenant's into a shard of its own.

    The shards of the tenants that came last are open; those of one that has not come for long end, full or not.
    """

    def __init__(self, store: FeatureStore, *, seals: bool, announce: Callable[[str], None] | None) -> None:
        self._store = store
        self._seals = seals
        self._announce = announce
        self._writers: OrderedDict[str, StoreWriter] = OrderedDict()
        self._ended_bytes = 0

    @property
    def put_bytes(self) -> int:
        """Those of all records that were put."""
        return self._ended_bytes + sum(writer.put_bytes for writer in self._writers.values())

    def put(self, records: Sequence[tuple[str, FeatureRecord]], window: int = 0) -> list[tuple[str, str]]:
        """Commit a batch, each tenant's records whole or not at all; returns the (shard, key) that each record has."""
        places: dict[str, list[int]] = {}
        for place, (_, record) in enumerate(records):
            places.setdefault(str(record.key_terms["tenant"]), []).append(place)
        located: list[tuple[str, str]] = [("", "")] * len(records)
        for tenant, own in places.items():
            shard_id, keys = self._of(tenant).put_named([records[place] for place in own], window)
            for place, key in zip(own, keys, strict=True):
                located[place] = (shard_id, key)
        return located

    def close(self) -> None:
        """As `StoreWriter.close`, of every tenant's."""
        for writer in self._writers.values():
            writer.close()

    def _of(self, tenant: str) -> StoreWriter:
        writer = self._writers.pop(tenant, None)
        if writer is None:
            writer = StoreWriter(self._store.of_tenant(tenant), seals=self._seals, announce=self._announce)
        self._writers[tenant] = writer
        if len(self._writers) > _OPEN_TENANTS:
            _, oldest = self._writers.popitem(last=False)
            oldest.end()
            self._ended_bytes += oldest.put_bytes
        return writer
