"""Everything that was derived from an item, a content or a tenant's items, deleted, with a receipt of what went.

Features and decoded frames, what is known of sources, the runs below the output folder, and the vector stores of the
configuration. The source media are not ours, and stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow.parquet as pq

from pipeline.config import Config
from pipeline.errors import ConfigError, TransientError
from pipeline.features.select import RecordFilter, drop_records, listed_records, select_tiers
from pipeline.features.store import FeatureStore
from pipeline.runs.forget import (
    DELETED,
    ended_runs,
    forget_items,
    items_of_keys,
    keys_of_items,
    listed_items,
    listed_rows,
)
from pipeline.sinks.contract import Selector
from pipeline.sinks.registry import open_sink, sections
from pipeline.storage import Folder

_MANIFESTS = "_manifests"  # of an output folder: rows that were given as tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What is to go: `item_ids` of the tenant, a `content` (of the tenant, where one is given), or all of the tenant's.

    Raises `ConfigError` when it says nothing, or both items and content.
    """

    tenant: str | None = None
    item_ids: tuple[str, ...] = ()
    content: str | None = None

    def __post_init__(self) -> None:
        if self.item_ids and self.content:
            raise ConfigError("either items or a content are deleted; run it twice for both")
        if self.tenant is None and not self.item_ids and self.content is None:
            raise ConfigError("say what is to be deleted: a tenant, items or a content")

    @property
    def is_tenant(self) -> bool:
        """True when all of a tenant's is meant."""
        return self.tenant is not None and not self.item_ids and self.content is None

    def to_json(self) -> dict[str, Any]:
        """As the receipt has it."""
        return {"tenant": self.tenant, "item_ids": list(self.item_ids), "content": self.content}


@dataclass(kw_only=True, slots=True)
class Deletion:
    """What `delete` found, and what went: records by tier, source entries, rows by run, points by table."""

    selection: Selection
    records: dict[str, int] = field(default_factory=dict)
    record_bytes: dict[str, int] = field(default_factory=dict)
    sources: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The receipt."""
        told = {name: getattr(self, name) for name in self.__slots__ if name != "selection"}
        return {"deleted_at": datetime.now(UTC).isoformat(), "selection": self.selection.to_json(), **told}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Meant:
    """A selection, resolved: whose (None: all tenants'), the records, the items by run, and the items by tenant."""

    tenant: str | None
    records: RecordFilter
    contents: frozenset[str]
    items: dict[str, list[int]]
    ids: dict[str, set[str]]


def find_derived(config: Config, store: FeatureStore, selection: Selection) -> Deletion:
    """What `delete` would delete, but for points, which only vector stores can count. Changes nothing."""
    output = Folder(config.output)
    meant = _resolve(output, store, selection)
    tiers = select_tiers(store, meant.records)
    return Deletion(
        selection=selection,
        records={tier.name: tier.records for tier in tiers},
        record_bytes={tier.name: tier.num_bytes for tier in tiers},
        rows={url: len(items) for url, items in meant.items.items() if items},
    )


def delete(config: Config, store: FeatureStore, selection: Selection) -> Deletion:
    """Delete what is selected everywhere, then look again; returns the receipt.

    Runs come last, for they say which features and points are an item's: cut off, it is done again, and ends the same.
    Raises `ConfigError` when a run has not ended or a process of this machine reads the store, `TransientError` when
    something that was selected is left.
    """
    output = Folder(config.output)
    meant = _resolve(output, store, selection)
    done = Deletion(selection=selection)
    for tier in drop_records(store, meant.records):
        done.records[tier.name], done.record_bytes[tier.name] = tier.records, tier.num_bytes
    done.sources = sum(part.sources.forget(meant.contents) for part in store.parts(meant.tenant))
    if selection.is_tenant and selection.tenant:
        store.remove_tenant(selection.tenant)
    for section in sections(config.sinks):
        sink = open_sink(section)
        for selector in _selectors(selection, meant):
            for table, count in sink.delete(selector).num_deleted.items():
                done.points[table] = done.points.get(table, 0) + count
        sink.purge()
    for url, items in meant.items.items():
        if items:
            done.rows[url] = forget_items(Folder(url), items)
    for name in output.list(_MANIFESTS, suffix=".parquet"):  # written anew from the caller's table, when it comes again
        output.remove(f"{_MANIFESTS}/{name}")
    _check_gone(output, store, meant)
    return done


def _selectors(selection: Selection, meant: _Meant) -> list[Selector]:
    if selection.is_tenant:
        return [Selector(tenant=selection.tenant or "")]
    return [Selector(tenant=tenant, item_ids=tuple(sorted(ids))) for tenant, ids in meant.ids.items()]


def _resolve(output: Folder, store: FeatureStore, selection: Selection) -> _Meant:
    runs = ended_runs(output)
    tenant = "" if selection.item_ids and selection.tenant is None else selection.tenant
    if selection.content is not None:
        records = RecordFilter(tenant=_literal(tenant), contents=frozenset([selection.content]))
        keys = {record.key for record in listed_records(store, records)}
        items = {run.url: items_of_keys(run, keys) for run in runs}
    else:
        wanted = frozenset(selection.item_ids)
        items = {run.url: listed_items(run, _is_meant(tenant, wanted)) for run in runs}
        if wanted:
            keys = set().union(*(keys_of_items(run, set(items[run.url])) for run in runs))
            found = listed_records(store, RecordFilter(tenant=_literal(tenant)))
            own = frozenset(record.terms["content"] for record in found if record.key in keys)
            records = RecordFilter(tenant=_literal(tenant), contents=own)
        else:
            records = RecordFilter(tenant=_literal(tenant))
    ids: dict[str, set[str]] = defaultdict(set)
    if selection.item_ids:
        ids[tenant or ""].update(selection.item_ids)
    for url, indices in items.items():
        for owner, item_id in _ids(Folder(url), set(indices)):
            ids[owner].add(item_id)
    gone = frozenset(
        record.terms["content"] for each in (store, store.frames) for record in listed_records(each, records)
    )
    contents = gone | (records.contents or frozenset())
    return _Meant(tenant=tenant, records=records, contents=contents, items=items, ids=dict(ids))


def _literal(text: str | None) -> str | None:
    """As a pattern that nothing else matches."""
    return None if text is None else "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _is_meant(tenant: str | None, wanted: frozenset[str]) -> Callable[[dict[str, Any]], bool]:
    return lambda row: row["tenant"] == tenant and (not wanted or row["id"] in wanted)


def _ids(run: Folder, items: set[int]) -> list[tuple[str, str]]:
    rows = (row for row in listed_rows(run) if row["item_index"] in items)
    return [(row["tenant"], row["id"]) for row in rows if not row["id"].startswith(f"{DELETED}-")]


def _check_gone(output: Folder, store: FeatureStore, meant: _Meant) -> None:
    """Look again. Raises `TransientError` naming what is left."""
    fresh = FeatureStore(store.folder.url)
    for name, tier in (("features", fresh), ("frames", fresh.frames)):
        if left := next(listed_records(tier, meant.records), None):
            raise TransientError(f"{name} {left.key} that were deleted are there again: is a run writing them?")
    for url, items in meant.items.items():
        run, chosen = Folder(url), set(items)
        for name in run.list(suffix=".parquet"):
            with run.open(name) as file:
                rows = pq.read_table(file, columns=["item_index", "code"]).to_pylist()
            if any(row["item_index"] in chosen and row["code"] != DELETED for row in rows):
                raise TransientError(f"{url}/{name}: items that were deleted are there again: is a run writing them?")
