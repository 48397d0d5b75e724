"""The feature store: the seam between an encode pass that puts records and the passes that use them.

    STORE/shards/<shard>.lmdb         sealed shards
    STORE/catalogue/<shard>.parquet   key → shard, one file a sealed shard
    STORE/sources/*.parquet           source id → content hash and probe
    STORE/frames/                     decoded frames, where they are kept: a store of their own, laid out as this one
    STORE/tenants/<tenant>/           the same again for each tenant but ""; its shards' names begin with its folder's
    LOCAL/open/<shard>/               open shards, one writer each
    LOCAL/cache/<shard>.lmdb          sealed shards brought here from elsewhere, of all tenants

LOCAL is STORE itself when that is on a local disk. A store on object storage or a network file system has its LOCAL
below `local_path`, in a folder named by the digest of STORE.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from types import MappingProxyType
from typing import IO, Any

from pipeline.errors import ConfigError, TransientError, UnavailableShardError
from pipeline.features.catalogue import (
    Catalogue,
    SealedShard,
    SourceCatalogue,
    entries_name,
    is_listed,
    load_catalogue,
    new_name,
    read_sealed,
)
from pipeline.features.codec import FeatureRecord, decode_record, same_terms
from pipeline.features.lifecycle import delete_shard, recover_shards, seal_shard, sealed_name
from pipeline.features.local_disk import network_filesystem
from pipeline.features.shard import ShardReader, ShardWriter, has_writer, is_read
from pipeline.features.shard_cache import CacheLimits, ShardCache
from pipeline.features.tenants import TENANTS, folder_of, shard_name, tenant_folder
from pipeline.features.writer import StoreWriter, TenantWriters
from pipeline.storage import Folder

SHARD_BYTES = 4 * 2**30
SHARD_WINDOWS = 16
_MAX_READERS = 16
_IO_THREADS = 8


def _local_folder(url: str, local_path: str | None) -> str:
    """Where this machine keeps its part of the remote store at `url`; no other store's part lies there."""
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    if local_path is not None:
        return os.path.join(os.path.abspath(local_path), name)
    own = os.path.join(tempfile.gettempdir(), f"headrace-{os.getuid()}")
    os.makedirs(own, mode=0o700, exist_ok=True)
    if os.stat(own).st_uid != os.getuid():
        raise ConfigError(f"{own} belongs to another user; set store.local_path to a folder of your own")
    return os.path.join(own, name)


class FeatureStore:
    """Feature records by key, in shards. Cheap to make and to pickle: nothing is opened until it is used.

    A hit is a claim: whatever cannot be read, or is not what was asked for, is None, and counted in `fallbacks`.
    """

    def __init__(
        self,
        path: str,
        local_path: str | None = None,
        shard_bytes: int = SHARD_BYTES,
        shard_windows: int = SHARD_WINDOWS,
        cache_limits: CacheLimits = CacheLimits(),  # noqa: B008 (immutable)
        tier: str = "",
        tenant: str = "",
    ) -> None:
        """`tier` (`frames`; "": features) and `tenant` (its folder's name) choose a part of the store at `path`."""
        root = Folder(path)
        below = [*([TENANTS, tenant] if tenant else []), *([tier] if tier else [])]
        self.folder = root.sub(os.path.join(*below)) if below else root
        self.is_local = root.is_local and network_filesystem(root.path) is None
        self.shard_bytes = shard_bytes
        self.shard_windows = shard_windows
        self.sources = SourceCatalogue(self.folder)
        self.fallbacks = 0
        self._root_url = root.url
        self._local_path = local_path
        self._tier, self._tenant = tier, tenant
        local = root.path if self.is_local else _local_folder(root.url, local_path)
        self._local_tenants = os.path.join(local, TENANTS)
        self._open_root = os.path.join(local, *below, "open")
        self._cache_limits = cache_limits
        self._cache = None if self.is_local else ShardCache(os.path.join(local, tier, "cache"), cache_limits)
        self._unavailable: dict[str, str] = {}  # shard id → why it is not asked for again before `reload`
        self._catalogue: Catalogue | None = None
        self._readers: OrderedDict[str, ShardReader] = OrderedDict()
        self._tenants: dict[str, FeatureStore] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[FeatureStore], tuple[Any, ...]]:
        return type(self), (self._root_url, *self._settings, self._tier, self._tenant)

    @property
    def _settings(self) -> tuple[str | None, int, int, CacheLimits]:
        return self._local_path, self.shard_bytes, self.shard_windows, self._cache_limits

    @functools.cached_property
    def frames(self) -> FeatureStore:
        """The store of decoded frames below this one; its records are those of `pipeline.features.frames`."""
        return FeatureStore(self._root_url, *self._settings, "frames", self._tenant)

    def of_tenant(self, tenant: str) -> FeatureStore:
        """The part that has this tenant's records, of the tier that this store has, and no other's."""
        return self._part(tenant_folder(tenant))

    def parts(self, tenant: str | None = None) -> list[FeatureStore]:
        """This store, and of a whole one the part of every tenant there is, on this machine or where the store lies.

        Of one tenant its part, and the root: it may have what was stored before the tenant had a folder.
        """
        if self._tenant or tenant == "":
            return [self]
        if tenant is not None:
            return [self, self.of_tenant(tenant)]
        names = self._tenants_here().union(Folder(self._root_url).folders(TENANTS))
        return [self, *map(self._part, sorted(names))]

    def _tenants_here(self) -> set[str]:
        """Folders of tenants that this machine writes or has written records of."""
        return set(os.listdir(self._local_tenants)) if os.path.isdir(self._local_tenants) else set()

    def _part(self, name: str) -> FeatureStore:
        if name == self._tenant:
            return self
        with self._lock:
            if name not in self._tenants:
                self._tenants[name] = FeatureStore(self._root_url, *self._settings, tier=self._tier, tenant=name)
            return self._tenants[name]

    def _of(self, shard_id: str) -> FeatureStore:
        """The part that has the shard."""
        return self._part(folder_of(shard_id))

    def writer(self, *, seals: bool = True, announce: Callable[[str], None] | None = None) -> StoreWriter:
        """A writer of shards of its own, in this part; one a worker. `announce` is told a shard's id before there is
        such a shard.

        Without `seals` full shards are only closed: they are read where they lie, and are never there twice.
        """
        return StoreWriter(self, seals=seals, announce=announce)

    def writers(self, *, seals: bool = True, announce: Callable[[str], None] | None = None) -> TenantWriters:
        """As `writer`, of every tenant's part, by what the records say."""
        return TenantWriters(self, seals=seals, announce=announce)

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        """Key → shard id of those in sealed shards, as of the first call in this process or the last `reload()`.

        Of this part alone: no tenant's key is found in another's.
        """
        if self._catalogue is None:
            self.reload()
        assert self._catalogue is not None
        return self._catalogue.find(keys)

    def find_of_tenants(self, keys: Mapping[str, Collection[str]], *, anew: bool = False) -> dict[str, str]:
        """As `find`, of each tenant's keys in its own part; `anew` as they are sealed by now."""

        def found(tenant: str) -> dict[str, str]:
            part = self.of_tenant(tenant)
            if anew:
                part._look_again()
            return part.find(sorted(keys[tenant]))

        with ThreadPoolExecutor(_IO_THREADS) as pool:
            return {key: shard for each in pool.map(found, keys) for key, shard in each.items()}

    def sealed_shards(self) -> list[SealedShard]:
        """The sealed shards, in the order they were made, a tenant's after another's; as `find` knows them."""
        return [shard for part in self.parts() for shard in part.own_shards()]

    def own_shards(self) -> list[SealedShard]:
        """As `sealed_shards`, of this part alone."""
        if self._catalogue is None:
            self.reload()
        assert self._catalogue is not None
        return [part.shard for part in self._catalogue.parts.values()]

    def shard_keys(self, shard_id: str) -> list[str]:
        """The keys that the catalogue has of a sealed shard, as of the last look; none when it does not list it."""
        store = self._of(shard_id)
        store.own_shards()
        assert store._catalogue is not None
        part = store._catalogue.parts.get(shard_id)
        return [] if part is None else list(part.keys.to_pylist())

    def entries(self, shard_id: str) -> IO[bytes]:
        """The Parquet file of a sealed shard's records in the catalogue. Raises `FileNotFoundError`."""
        return self._of(shard_id).folder.open(entries_name(shard_id))

    def reader(self, shard_id: str) -> ShardReader:
        """A reader of a shard's own, wherever it is; brings one that is elsewhere.

        Raises `FileNotFoundError` when it is nowhere, `ValueError` when it is damaged.
        """
        return self._of(shard_id)._open_reader(shard_id)

    @property
    def open_root(self) -> str:
        """The folder in which this machine's open shards lie."""
        return self._open_root

    def reload(self) -> None:
        """Look again for what others have sealed or deleted, and for what could not be had; of every tenant that was
        looked for."""
        for part in (self, *self._tenants.values()):
            part._look_again()

    def _look_again(self) -> None:
        self._unavailable.clear()
        self._catalogue = load_catalogue(self.folder, self._catalogue)

    def get(self, shard_id: str, key: str) -> FeatureRecord | None:
        """The record, wherever its shard is now: sealed, brought from the remote store, or open on this machine."""
        return self.fetch([(shard_id, key)])[0]

    def fetch(
        self, locations: Sequence[tuple[str, str]], expected_terms: Sequence[dict[str, Any]] | None = None
    ) -> list[FeatureRecord | None]:
        """The records at `locations` (shard id, key), in their order; None where there is none or its terms differ.

        Tensors are views into the shard's file and keep it mapped; in a cache that is bounded they are copies, and
        nothing stays in use. Raises `TransientError` when a remote store keeps failing.
        """
        records: list[FeatureRecord | None] = [None] * len(locations)
        order = sorted(range(len(locations)), key=lambda i: locations[i][0])
        for shard_id, places in itertools.groupby(order, key=lambda i: locations[i][0]):
            reader = self._of(shard_id)._reader(shard_id)
            for i in places:
                terms = None if expected_terms is None else expected_terms[i]
                records[i] = _read(reader, locations[i][1], terms, copied=self._lets_go)
            if self._lets_go and reader is not None:
                reader.close()
        self.fallbacks += records.count(None)
        return records

    def condition(self, shard_id: str) -> str:
        """Of a shard that did not answer: `missing`, `damaged` (its file), why it could not be had, or `sound`: then
        its records are not."""
        part = self._of(shard_id)
        if shard_id in part._unavailable:
            return part._unavailable[shard_id]
        try:
            part._open_reader(shard_id).close()
        except FileNotFoundError:
            return "missing"
        except ValueError:
            return "damaged"
        except UnavailableShardError as error:
            return error.reason
        except TransientError:
            return "out of reach"
        return "sound"

    def bring(self, shard_ids: Sequence[str]) -> None:
        """Have shards on this machine before they are read; what is not there to bring is left to `fetch` to say.

        Of a bounded cache they fill a half: more of them would make room for each other before they are read.
        """
        room = (self._cache_limits.max_bytes or 0) // 2
        for shard_id in shard_ids:
            if self._lets_go and room <= 0:
                return
            with contextlib.suppress(FileNotFoundError, ValueError, TransientError, UnavailableShardError):
                part = self._of(shard_id)
                part._open_reader(shard_id).close()
                room -= os.path.getsize(part._sealed_path(shard_id))

    def is_sealed(self, shard_id: str) -> bool:
        """True when the shard is sealed and listed, and so found by every machine."""
        folder = self._of(shard_id).folder
        return is_listed(folder, shard_id) and folder.exists(sealed_name(shard_id))

    def holds(self, shard_id: str) -> bool:
        """True when the shard is sealed, or open on this machine."""
        return os.path.exists(os.path.join(self._of(shard_id)._open_root, shard_id)) or self.is_sealed(shard_id)

    def recover(self, spared: Collection[str] = ()) -> list[SealedShard]:
        """Seal what dead writers left open on this machine, but for the shards `spared`."""
        # What is open is on this machine: a remote store is not asked for its tenants.
        parts = [self] if self._tenant else [self, *map(self._part, sorted(self._tenants_here()))]
        return [s for part in parts for s in recover_shards(part._open_root, part.folder, part._cache, spared)]

    def in_use(self, shard_ids: Sequence[str]) -> list[str]:
        """Those of the shards that a process of this machine writes or reads.

        Deleted now, an open one would stay where it is, and any that is read would keep its disk space.
        """
        return [shard_id for shard_id in shard_ids if self._of(shard_id)._in_use(shard_id)]

    def _in_use(self, shard_id: str) -> bool:
        open_dir = os.path.join(self._open_root, shard_id)
        return has_writer(open_dir) or is_read(open_dir) or is_read(self._sealed_path(shard_id))

    def num_bytes(self) -> int:
        """What the store takes where it lies; on a local disk in blocks, open shards and all."""
        return self.folder.num_bytes()

    def shard_num_bytes(self, shard_id: str) -> int:
        """The part of `num_bytes` that a shard has; 0 when it is not there."""
        folder = self._of(shard_id).folder
        sealed = folder.num_bytes(sealed_name(shard_id))
        return sealed + (folder.num_bytes(f"open/{shard_id}") if self.is_local else 0)

    def delete_shards(self, shard_ids: Sequence[str]) -> None:
        """Remove shards with all their records; absent ones are none the worse."""
        for part, own in self.by_part(shard_ids):
            for shard_id in own:
                delete_shard(shard_id, part.folder, part._open_root, part._cache)
            if part._catalogue is not None:
                kept = part._catalogue.parts.keys() - set(own)
                part._catalogue = Catalogue({shard_id: part._catalogue.parts[shard_id] for shard_id in kept})

    def remove_tenant(self, tenant: str) -> None:
        """Remove a tenant's folder, here and where the store lies: its shards, frames, and what is known of sources.

        Raises `ValueError` for the tenant "", which has no folder.
        """
        name = tenant_folder(tenant)
        if not name:
            raise ValueError("the tenant '' has the store's root, not a folder that could be removed")
        Folder(self._root_url).remove(f"{TENANTS}/{name}")
        shutil.rmtree(os.path.join(self._local_tenants, name), ignore_errors=True)
        self._tenants.pop(name, None)

    def by_part(self, shard_ids: Sequence[str]) -> list[tuple[FeatureStore, list[str]]]:
        """Each part that has some of the shards, with those that it has."""
        groups = itertools.groupby(sorted(shard_ids, key=folder_of), key=folder_of)
        return [(self._part(name), list(own)) for name, own in groups]

    def close(self) -> None:
        """Let go of every open shard; records that are still in use stay readable."""
        for part in (self, *self._tenants.values()):
            with part._lock:
                part._readers.clear()

    def _reader(self, shard_id: str) -> ShardReader | None:
        with self._lock:
            reader = self._readers.pop(shard_id, None)
            if reader is None or not os.path.exists(reader.path):  # a deleted file keeps its disk space while mapped
                if shard_id in self._unavailable:
                    return None
                try:
                    reader = self._open_reader(shard_id)
                except (FileNotFoundError, ValueError):
                    return None
                except UnavailableShardError as error:
                    self._unavailable[shard_id] = error.reason
                    return None
            if self._lets_go:
                return reader
            self._readers[shard_id] = reader
            if len(self._readers) > _MAX_READERS:
                self._readers.popitem(last=False)
            return reader

    def _open_reader(self, shard_id: str) -> ShardReader:
        try:
            return self._open_here(shard_id)
        except FileNotFoundError:  # sealed between the look and the opening: then it is where sealed ones are
            shard = read_sealed(self.folder, shard_id) if self._cache is not None else None
            if self._cache is None or shard is None:
                return self._open_here(shard_id)
            with self._cache.brought(self.folder, sealed_name(shard_id), shard) as path:
                return ShardReader(path)

    def _open_here(self, shard_id: str) -> ShardReader:
        sealed, open_dir = self._sealed_path(shard_id), os.path.join(self._open_root, shard_id)
        if os.path.exists(sealed):
            reader = ShardReader(sealed)
            if self._cache is not None:
                os.utime(sealed)  # it is in use, so it stays: the last to make room
            return reader
        if os.path.exists(open_dir):
            return ShardReader(open_dir)
        raise FileNotFoundError(f"shard {shard_id} is neither in {self.folder.url} nor open on this machine")

    def _sealed_path(self, shard_id: str) -> str:
        """Where this machine reads the sealed shard, when it is there."""
        return self.folder.locate(sealed_name(shard_id)) if self._cache is None else self._cache.path(shard_id)

    @property
    def _lets_go(self) -> bool:
        """True where shards that are in use would hold up others: their cache is bounded."""
        return self._cache is not None and self._cache_limits.max_bytes is not None

    def seal(self, open_dir: str, created: Mapping[str, datetime] = MappingProxyType({})) -> SealedShard | None:
        """Seal the open shard in the folder `open_dir`, whose writer is closed, as `seal_shard` does."""
        return seal_shard(open_dir, self.folder, cache=self._cache, created=created)

    def new_shard(self, announce: Callable[[str], None] = lambda shard_id: None) -> ShardWriter:
        """The one writer of a new open shard of this part, on this machine; `announce` is told its id before it is."""
        shard_id = shard_name(self._tenant, new_name())
        announce(shard_id)
        return ShardWriter(self._open_root, shard_id)


def _read(
    reader: ShardReader | None, key: str, expected_terms: dict[str, Any] | None, *, copied: bool
) -> FeatureRecord | None:
    try:
        data = reader.get(key) if reader is not None else None
        record = decode_record(bytes(data) if copied else data) if data is not None else None
        if record is None or expected_terms is None or same_terms(record.key_terms, expected_terms):
            return record
    except ValueError:
        pass
    return None
