"""Parquet beside the shards: which shard holds a key, and which content a source id stands for.

`catalogue/<shard>.parquet` is written once, when a shard is sealed, and makes it findable; the file's metadata carries
the shard's size and checksum. `sources/<time>-<random>.parquet` are append-only. Both are read once a process and again
only when asked, and then only the files that are new.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.schema import Probe, fields_of
from pipeline.storage import Folder

CATALOGUE = "catalogue"
SOURCES = "sources"
_SHARD = b"headrace"
_IO_THREADS = 8
_JOIN_KEYS = 65_536  # at a time: their hashes stay in the processor's cache, 1.3 million keys/s instead of 1.0
_ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads the bits of digits, of which each has four
# Of a key's terms, those by which records are looked for; null where a key has no such term, and in the files of
# shards that were sealed before there were these columns.
TERM_COLUMNS = (
    "content",
    "decode_backend",
    "resize_backend",
    "processor",
    "weights",
    "precision",
    "placeholder",
    "prompt",
    "decode_rules",
)
_ENTRIES = pa.schema(
    {
        "key": pa.string(),
        "shard": pa.string(),
        "tenant": pa.string(),
        "num_bytes": pa.int64(),
        "feature_length": pa.int64(),
        "grid": pa.list_(pa.int32()),
        "created": pa.timestamp("us", tz="UTC"),
        **dict.fromkeys(TERM_COLUMNS, pa.string()),
    }
)
_SOURCES = pa.schema(
    {
        "source_id": pa.string(),
        "content": pa.string(),
        "modality": pa.string(),
        "container": pa.string(),
        "codec": pa.string(),
        "width": pa.int64(),
        "height": pa.int64(),
        "num_bytes": pa.int64(),
        "duration_seconds": pa.float64(),
        "rate_fps": pa.float64(),
        "num_frames": pa.int64(),
        "sample_rate_hz": pa.int64(),
        "num_channels": pa.int64(),
        "coded_frames": pa.int64(),
        "coded_bytes": pa.int64(),
        "keyframes": pa.int64(),
        "keyframe_bytes": pa.int64(),
        "keyframe_spacing": pa.int64(),
        "group_frames": pa.float64(),
        "reorder_depth": pa.int64(),
    }
)


def new_name() -> str:
    """A name that no one else makes and that sorts after those made before it."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{uuid.uuid4().hex[:12]}"


def write_entries(folder: Folder, shard: SealedShard, entries: Sequence[Entry]) -> None:
    """Publish a sealed shard's catalogue file: from now on its keys are found."""
    now = datetime.now(UTC)
    rows = [{**_columns(entry), "shard": shard.shard_id, "created": entry.created or now} for entry in entries]
    metadata = {_SHARD: json.dumps(dataclasses.asdict(shard))}
    table = pa.Table.from_pylist(rows, _ENTRIES).replace_schema_metadata(metadata)
    folder.write_bytes(entries_name(shard.shard_id), _parquet(table))


def _columns(entry: Entry) -> dict[str, Any]:
    columns = fields_of(entry)
    terms = columns.pop("key_terms")
    return columns | {name: str(terms[name]) for name in TERM_COLUMNS if name in terms}


def remove_entries(folder: Folder, shard_id: str) -> None:
    """Take a shard out of the catalogue: its keys are no longer found."""
    folder.remove(entries_name(shard_id))


def read_sealed(folder: Folder, shard_id: str) -> SealedShard | None:
    """What the catalogue says of one shard; None when it does not list it."""
    try:
        return _sealed(pq.read_schema(pa.BufferReader(folder.read_bytes(entries_name(shard_id)))))
    except FileNotFoundError:
        return None


def is_listed(folder: Folder, shard_id: str) -> bool:
    """True when the shard's catalogue file, the last that is written of it, is there."""
    return folder.exists(entries_name(shard_id))


def load_catalogue(folder: Folder, known: Catalogue | None = None) -> Catalogue:
    """Every sealed shard's keys, without reading again what `known` has."""
    parts = known.parts if known is not None else {}
    listed = [name.removesuffix(".parquet") for name in folder.list(CATALOGUE, suffix=".parquet")]
    with ThreadPoolExecutor(_IO_THREADS) as pool:
        loaded = pool.map(lambda shard_id: parts.get(shard_id) or _load_part(folder, shard_id), listed)
        return Catalogue({part.shard.shard_id: part for part in loaded if part is not None})


def _load_part(folder: Folder, shard_id: str) -> CataloguePart | None:
    try:
        data = folder.read_bytes(entries_name(shard_id))
    except FileNotFoundError:  # deleted since it was listed
        return None
    table = pq.read_table(pa.BufferReader(data), columns=["key"], use_threads=False)
    return CataloguePart(shard=_sealed(table.schema), keys=table.column("key").combine_chunks())


def entries_name(shard_id: str) -> str:
    """Where a shard's catalogue file lies below the store's root."""
    return f"{CATALOGUE}/{shard_id}.parquet"


def _sealed(schema: pa.Schema) -> SealedShard:
    return SealedShard(**json.loads(schema.metadata[_SHARD]))


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _hashes(keys: pa.StringArray) -> npt.NDArray[np.uint64]:
    """(N,) of the first 16 characters of each, 64 bits of a digest's hex digits."""
    start = pc.binary_slice(keys.cast(pa.binary()), 0, 16)
    padded = pc.utf8_rpad(start.cast(pa.string()), 16, "\0") if len(keys) else start
    words = np.frombuffer(padded.buffers()[2] or b"", np.uint64, 2 * len(keys)).reshape(-1, 2)
    return words[:, 0] * np.uint64(_ODD) ^ words[:, 1]


def _matches(column: pa.ChunkedArray, wanted: Iterable[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Row numbers, ascending, whose value is one of `wanted`. One pass; the only index built is over `wanted`."""
    mask = pc.is_in(column, value_set=pa.array(wanted, pa.string()))
    return np.flatnonzero(mask.to_numpy())


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedShard:
    """An immutable shard: `checksum` is the SHA-256 of its file, in hex, and `num_bytes` the file's size."""

    shard_id: str
    num_records: int
    num_bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What the catalogue says of one record; of `key_terms` it keeps `tenant` and those in `TERM_COLUMNS`, as text.

    `created` is given for records that were in another shard before.
    """

    key: str
    tenant: str
    num_bytes: int
    feature_length: int
    grid: tuple[int, int, int]
    key_terms: Mapping[str, Any]
    created: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CataloguePart:
    """One shard's keys."""

    shard: SealedShard
    keys: pa.StringArray


class Catalogue:
    """The keys of every sealed shard at one moment; `parts` is by shard id, in the order the shards were made.

    The first search makes an index of hashes, 16 bytes a key besides the key itself.
    """

    def __init__(self, parts: Mapping[str, CataloguePart]) -> None:
        self.parts = {shard_id: parts[shard_id] for shard_id in sorted(parts)}
        self._shard_ids = list(self.parts)
        self._keys = [part.keys for part in self.parts.values()]
        self._ends = np.cumsum([len(keys) for keys in self._keys], dtype=np.int64)

    @functools.cached_property
    def _index(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """The keys' hashes, ascending, and the row of each."""
        hashes = np.concatenate([_hashes(keys) for keys in self._keys])
        rows = np.argsort(hashes)
        return hashes[rows], rows

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        """Key → shard id for those that are listed; the newest shard wins."""
        if not self._keys or not self._ends[-1]:  # a first run asks once an item
            return {}
        found: dict[str, str] = {}
        for start in range(0, len(keys), _JOIN_KEYS):
            found.update(self._find(keys[start : start + _JOIN_KEYS]))
        return found

    def _find(self, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
        known, rows = self._index
        wanted = pa.array(keys, pa.string())
        hashes = _hashes(wanted)
        order = np.argsort(hashes)  # searched in order, one page after another: three times as fast
        hashes = hashes[order]
        first = np.searchsorted(known, hashes, side="left")
        count = np.searchsorted(known, hashes, side="right") - first
        # Each of `keys` beside each row of its hash.
        places = np.repeat(order, count)
        found = rows[np.repeat(first - np.cumsum(count) + count, count) + np.arange(len(places))]
        shards = np.full(len(keys), -1)
        for number, each in self._by_shard(found):
            shards[places[each][self._is_same(number, found[each], wanted, places[each])]] = number
        has_shard = shards >= 0
        # In the order of `keys`: to look them up by place took three times as long.
        listed = itertools.compress(keys, has_shard.tolist())
        return zip(listed, map(self._shard_ids.__getitem__, shards[has_shard].tolist()), strict=True)

    def _by_shard(self, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """The shards that have some of `rows`, oldest first, each with where in `rows` those are."""
        order = np.argsort(rows)  # a shard's rows are then read in their order, too
        ends = np.searchsorted(rows[order], self._ends)
        for number in np.flatnonzero(np.diff(ends, prepend=0)).tolist():
            yield number, order[ends[number - 1] if number else 0 : ends[number]]

    def _is_same(
        self, number: int, rows: npt.NDArray[np.int64], wanted: pa.StringArray, places: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        # Shard by shard: to take rows of a chunked array, Arrow copies all of it each time.
        keys = self._keys[number]
        own = keys.take(pa.array(rows - (self._ends[number] - len(keys))))
        return pc.equal(own, wanted.take(pa.array(places))).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceEntry:
    """What a source id stands for: the content's hash, such as `sha256:<hex>`, and the facts of its header."""

    content: str
    probe: Probe


def _entry(row: Mapping[str, Any]) -> SourceEntry:
    facts = {f.name: row[f.name] for f in dataclasses.fields(Probe) if row.get(f.name) is not None}
    return SourceEntry(content=row["content"], probe=Probe(**facts))


class SourceCatalogue:
    """Source id → content hash and probe, so that a known source costs no fetch."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._tables: dict[str, pa.Table] | None = None

    def find(self, source_ids: Sequence[str]) -> dict[str, SourceEntry]:
        """The entries of those that are known; the last recorded wins."""
        if self._tables is None:
            self._tables = self._load({})
        tables = [self._tables[name] for name in sorted(self._tables)] or [_SOURCES.empty_table()]
        table = pa.concat_tables(tables, promote_options="default")  # older ones lack the latest columns
        hits = table.take(_matches(table.column("source_id"), source_ids)).to_pylist()
        return {row["source_id"]: _entry(row) for row in hits}

    def record(self, entries: Mapping[str, SourceEntry]) -> None:
        """Publish `entries` as one new file, and know them from now on."""
        if not entries:
            return
        rows = [{"source_id": k, "content": e.content, **fields_of(e.probe)} for k, e in entries.items()]
        table = pa.Table.from_pylist(rows, _SOURCES)
        name = f"{new_name()}.parquet"
        self._folder.write_bytes(f"{SOURCES}/{name}", _parquet(table))
        if self._tables is not None:
            self._tables[name] = table

    def forget(self, contents: Collection[str]) -> int:
        """Take out what is known of these contents; returns how many entries that were. Files are written anew."""
        forgotten = 0
        for name in self._folder.list(SOURCES, suffix=".parquet"):
            table = self._read(name, {})
            mask = pc.is_in(table.column("content"), value_set=pa.array(sorted(contents), pa.string()))
            count = int(pc.sum(mask).as_py() or 0)
            if count == len(table):
                self._folder.remove(f"{SOURCES}/{name}")
            elif count:
                self._folder.write_bytes(f"{SOURCES}/{name}", _parquet(table.filter(pc.invert(mask))))
            forgotten += count
        self._tables = None
        return forgotten

    def reload(self) -> None:
        """Read what others have recorded since."""
        self._tables = self._load(self._tables or {})

    def _load(self, known: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
        names = self._folder.list(SOURCES, suffix=".parquet")
        with ThreadPoolExecutor(_IO_THREADS) as pool:
            return dict(zip(names, pool.map(lambda name: self._read(name, known), names), strict=True))

    def _read(self, name: str, known: Mapping[str, pa.Table]) -> pa.Table:
        if name in known:
            return known[name]
        return pq.read_table(pa.BufferReader(self._folder.read_bytes(f"{SOURCES}/{name}")), use_threads=False)
