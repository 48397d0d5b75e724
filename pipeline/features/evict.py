"""What a store that is kept lets go: what is older than it may be, and what there is no room for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.features.rewrite import rewrite_shards
from pipeline.features.shard import disk_bytes
from pipeline.features.store import FeatureStore

_COLUMNS = ("key", "num_bytes", "created", "content", "prompt", "made_seconds")
_MONTH_SECONDS = 365.25 * 86400 / 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Evicted:
    """Of one tier: records that are older than `ttl`, others that go for want of room or are not worth it, and the
    bytes of all."""

    tier: str
    expired: int
    evicted: int
    num_bytes: int


def worth_seconds(gb_month: float, worker_hour: float, held_seconds: float) -> float:
    """Seconds of a worker, at `worker_hour` an hour, that cost what holding a byte for `held_seconds` does, at
    `gb_month` for 10^9 of them a month (a twelfth of 365.25 days)."""
    return gb_month / 1e9 * held_seconds / _MONTH_SECONDS / (worker_hour / 3600)


def choose_evictions(
    store: FeatureStore,
    *,
    ttl: timedelta | None = None,
    max_bytes: int | None = None,
    frames_max_bytes: int | None = None,
    byte_seconds: float | None = None,
) -> list[tuple[Evicted, dict[str, set[str]]]]:
    """Of each tier what would go, and the keys by shard.

    Older than `ttl`; what took less than `byte_seconds` (as `worth_seconds` gives it) for each of its bytes to make;
    and then, until what is left fits into `max_bytes` on disk, what answers fewest questions first:
    features that read a prompt, then what is known by its source's version alone, then features, which are of one
    model, then decoded frames, which are of any; of one kind the largest, and of those the oldest. Before that frames
    alone, until what is left of them fits into `frames_max_bytes`. Shards that a process of this machine writes or
    reads stay as they are.
    """
    tables = [_records(tier, name) for name, tier in _tiers(store)]
    records = pa.concat_tables(tables)
    expired = np.zeros(len(records), bool)
    if ttl is not None:
        limit = pa.scalar(datetime.now(UTC) - ttl, pa.timestamp("us", tz="UTC"))
        expired = pc.less(records["created"], limit).to_numpy(zero_copy_only=False)
    on_disk = _disk_bytes(records["num_bytes"].to_numpy())
    evicted = np.zeros(len(records), bool)
    if byte_seconds is not None:
        # Of what earlier versions wrote nobody knows what it took (null, or 0 once it was written anew): it stays.
        took = pc.fill_null(records["made_seconds"], 0.0).to_numpy()
        evicted = (took > 0) & (took < byte_seconds * records["num_bytes"].to_numpy()) & ~expired
    is_frames = pc.equal(records["tier"], "frames").to_numpy(zero_copy_only=False)
    frames_bytes = 0 if frames_max_bytes is None else sum(part.frames.num_bytes() for part in store.parts())
    bounds = [(frames_max_bytes, frames_bytes, is_frames), (max_bytes, store.num_bytes(), np.ones(len(records), bool))]
    for bound, taken, own in bounds:
        going = own & (expired | evicted)
        missing = 0 if bound is None else taken - int(on_disk[going].sum()) - bound
        if missing > 0:
            order = [n for n in _in_order(records) if own[n] and not going[n]]
            enough = int(np.searchsorted(np.cumsum(on_disk[order]), missing)) + 1
            evicted[order[:enough]] = True
    return [_of_tier(name, records, expired, evicted) for name, _ in _tiers(store)]


def evict(
    store: FeatureStore,
    *,
    ttl: timedelta | None = None,
    max_bytes: int | None = None,
    frames_max_bytes: int | None = None,
    byte_seconds: float | None = None,
) -> list[Evicted]:
    """Drop what `choose_evictions` chooses; shards that hold other records as well are written anew.

    Cut off, it may be done again. Raises `ConfigError` when a process of this machine has begun to read a shard since.
    """
    for _, tier in _tiers(store):
        tier.recover()
        tier.reload()
    told = []
    bounds = {"max_bytes": max_bytes, "frames_max_bytes": frames_max_bytes}
    chosen = choose_evictions(store, ttl=ttl, byte_seconds=byte_seconds, **bounds)
    for (found, by_shard), (_, tier) in zip(chosen, _tiers(store), strict=True):
        if by_shard:
            rewrite_shards(tier, sorted(by_shard), set().union(*by_shard.values()))
        told.append(found)
    return told


def _tiers(store: FeatureStore) -> Iterator[tuple[str, FeatureStore]]:
    yield "frames", store.frames
    yield "features", store


def _records(tier: FeatureStore, name: str) -> pa.Table:
    """Of the shards that nobody uses."""
    shards = [shard.shard_id for shard in tier.sealed_shards()]
    used = set(tier.in_use(shards))
    schema = pa.schema(
        {
            "key": pa.string(),
            "num_bytes": pa.int64(),
            "created": pa.timestamp("us", tz="UTC"),
            "content": pa.string(),
            "prompt": pa.string(),
            "made_seconds": pa.float64(),
            "shard": pa.string(),
            "tier": pa.string(),
        }
    )
    tables = [schema.empty_table()]
    for shard in shards:
        if shard in used:
            continue
        with tier.entries(shard) as file:
            table = pq.read_table(file)
        columns = {
            column: table[column] if column in table.column_names else pa.nulls(len(table), pa.string())
            for column in _COLUMNS
        }
        columns |= {"shard": pa.repeat(shard, len(table)), "tier": pa.repeat(name, len(table))}
        tables.append(pa.table(columns).cast(schema))
    return pa.concat_tables(tables)


def _in_order(records: pa.Table) -> list[int]:
    """Row numbers, first those that go first."""
    validity = pa.table(
        {
            "prompt": pc.fill_null(pc.not_equal(records["prompt"], ""), False),
            "version": pc.fill_null(pc.starts_with(records["content"], "version:"), False),
            "features": pc.equal(records["tier"], "features"),
            "num_bytes": records["num_bytes"],
            "created": records["created"],
            "key": records["key"],
        }
    )
    keys = [(name, "descending") for name in ("prompt", "version", "features", "num_bytes")]
    return list(pc.sort_indices(validity, [*keys, ("created", "ascending"), ("key", "ascending")]).to_pylist())


def _disk_bytes(num_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.fromiter((disk_bytes(int(each)) for each in num_bytes), np.int64, len(num_bytes))


def _of_tier(
    name: str, records: pa.Table, expired: npt.NDArray[np.bool_], evicted: npt.NDArray[np.bool_]
) -> tuple[Evicted, dict[str, set[str]]]:
    own = pc.equal(records["tier"], name).to_numpy(zero_copy_only=False)
    chosen = records.filter(pa.array(own & (expired | evicted)))
    by_shard: dict[str, set[str]] = {}
    for shard, key in zip(chosen["shard"].to_pylist(), chosen["key"].to_pylist(), strict=True):
        by_shard.setdefault(shard, set()).add(key)
    told = Evicted(
        tier=name,
        expired=int((own & expired).sum()),
        evicted=int((own & evicted).sum()),
        num_bytes=int(pc.sum(chosen["num_bytes"]).as_py() or 0),
    )
    return told, by_shard
