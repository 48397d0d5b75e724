"""Records by the terms of their keys, found in the catalogue without opening shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

import pyarrow.parquet as pq

from pipeline.features.catalogue import TERM_COLUMNS
from pipeline.features.codec import decode_record
from pipeline.features.rewrite import rewrite_shards
from pipeline.features.store import FeatureStore

_COLUMNS = ["key", "tenant", "num_bytes", "feature_length", "grid", "created"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFilter:
    """Which records are meant: those of which every term that is given matches (`*` and `?` stand for anything), and
    whose content is one of `contents`, where these are given."""

    tenant: str | None = None
    content: str | None = None
    weights: str | None = None
    processor: str | None = None
    decode_backend: str | None = None
    resize_backend: str | None = None
    key: str | None = None
    contents: frozenset[str] | None = None

    def matches(self, record: Listed) -> bool:
        """True when the record is meant."""
        if self.contents is not None and record.terms.get("content") not in self.contents:
            return False
        known: dict[str, str | None] = {"tenant": record.tenant, "key": record.key, **record.terms}
        patterns = {name: getattr(self, name) for name in self.__slots__ if name != "contents"}
        return all(pattern is None or _matches(known.get(name), pattern) for name, pattern in patterns.items())

    @property
    def is_empty(self) -> bool:
        """True when nothing is given, so that every record is meant."""
        return all(getattr(self, name) is None for name in self.__slots__)


def _matches(value: str | None, pattern: str) -> bool:
    return value is not None and fnmatchcase(value, pattern)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A record as the catalogue has it; `terms` are those of its key in `TERM_COLUMNS` that it has, as text."""

    key: str
    shard: str
    tenant: str
    num_bytes: int
    feature_length: int
    grid: tuple[int, ...]
    created: datetime
    made_seconds: float
    terms: Mapping[str, str]


def listed_records(store: FeatureStore, chosen: RecordFilter, shard: str | None = None) -> Iterator[Listed]:
    """The records of sealed shards that `chosen` means, shard by shard in the order they were made, a tenant's after
    another's.

    One catalogue file is in memory at a time. Shards that were sealed before catalogues had terms are opened.
    """
    is_pattern = chosen.tenant is not None and bool(set(chosen.tenant) & set("*?["))
    for part in store.parts(None if is_pattern else chosen.tenant):
        for each in part.own_shards():
            if shard is None or each.shard_id == shard:
                yield from filter(chosen.matches, _of_shard(part, each.shard_id))


def _of_shard(store: FeatureStore, shard_id: str) -> Iterator[Listed]:
    with store.entries(shard_id) as file:
        names = set(pq.read_schema(file).names)
        table = pq.read_table(
            file, columns=[*_COLUMNS, *(name for name in (*TERM_COLUMNS, "made_seconds") if name in names)]
        )
    reader = None if "content" in names else store.reader(shard_id)
    for batch in table.to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            if reader is None:
                terms = {name: row[name] for name in TERM_COLUMNS if row.get(name) is not None}
            else:
                data = reader.get(row["key"])
                found: Mapping[str, Any] = {} if data is None else decode_record(data).key_terms
                terms = {name: str(found[name]) for name in TERM_COLUMNS if name in found}
            facts = {name: row[name] for name in _COLUMNS if name != "grid"}
            facts["made_seconds"] = row.get("made_seconds") or 0.0  # files of before it was kept have none
            yield Listed(**facts, shard=shard_id, grid=tuple(row["grid"]), terms=terms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """Of one tier of a store, the records that are meant."""

    name: str
    records: int
    num_bytes: int
    shards: int


def tiers_above(chosen: RecordFilter) -> tuple[str, ...]:
    """The tiers that are built on what `chosen` names: features on all of it, decoded frames not on models."""
    names = {name for name in chosen.__slots__ if getattr(chosen, name) is not None}
    return ("features",) if names & {"weights", "processor"} else ("frames", "features")


def select_tiers(store: FeatureStore, chosen: RecordFilter) -> list[Tier]:
    """What `drop_records` would drop."""
    return [_told(name, _keys(tier, chosen)) for name, tier in _tiers(store, chosen)]


def drop_records(store: FeatureStore, chosen: RecordFilter) -> list[Tier]:
    """Drop the records that `chosen` means from the tiers above it; returns what was dropped.

    Shards that hold others as well are written anew. Cut off, it may be done again; once it has returned nothing that
    was meant is found. Raises `ConfigError` when a process of this machine reads one of the shards.
    """
    told = []
    for name, tier in _tiers(store, chosen):
        tier.recover()
        tier.reload()
        by_shard = _keys(tier, chosen)
        dropped = _told(name, by_shard)
        if by_shard:
            rewrite_shards(tier, list(by_shard), {record.key for each in by_shard.values() for record in each})
        told.append(dropped)
    return told


def _tiers(store: FeatureStore, chosen: RecordFilter) -> list[tuple[str, FeatureStore]]:
    stores = {"frames": store.frames, "features": store}
    return [(name, stores[name]) for name in tiers_above(chosen)]


def _keys(store: FeatureStore, chosen: RecordFilter) -> dict[str, list[Listed]]:
    by_shard: dict[str, list[Listed]] = {}
    for record in listed_records(store, chosen):
        by_shard.setdefault(record.shard, []).append(dataclasses.replace(record, terms={}))
    return by_shard


def _told(name: str, by_shard: Mapping[str, list[Listed]]) -> Tier:
    records = [record for each in by_shard.values() for record in each]
    return Tier(
        name=name,
        records=len({record.key for record in records}),
        num_bytes=sum(record.num_bytes for record in records),
        shards=len(by_shard),
    )
