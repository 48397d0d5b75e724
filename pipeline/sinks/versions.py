"""The tables of a collection's versions: what each was made for, and deletion from all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

from pipeline.errors import ConfigError, TransientError
from pipeline.sinks.contract import Collection, DeleteReceipt, Selector

_IDS_AT_ONCE = 1_000  # in one condition


def described(collection: Collection) -> dict[str, str | int]:
    """What a table was made for, as stores keep it beside the table."""
    return {"dimensions": collection.dimensions, "metric": collection.metric, "version": collection.version}


def check_name(collection: Collection, configured: str) -> None:
    """Raises `ValueError` for a collection of another name than the configured one: deletions would not reach it."""
    if collection.name != configured:
        raise ValueError(f"this sink holds the collection {configured!r}, got {collection.name!r}")


def refuse_other(collection: Collection, found: Mapping[str, object], expected: Mapping[str, object], at: str) -> None:
    """Raises `ConfigError` naming every difference between the table that is there and the one that is wanted."""
    differences = [
        f"{term} is {found.get(term)!r}, expected {expected.get(term)!r}"
        for term in [*expected, *(found.keys() - expected.keys())]
        if found.get(term) != expected.get(term)
    ]
    if differences:
        raise ConfigError(
            f"{at} has a table {collection.physical!r} that is not what this run fills: {'; '.join(differences)}. "
            f"Take another collection than {collection.name!r}, or drop that table"
        )


class Versions(Protocol):
    """What deletion asks of a store. `item_ids` None stands for all items of the tenant."""

    def versions(self) -> list[str]:
        """The tables of all versions of the configured collection."""

    def item_ids(self, physical: str, tenant: str) -> Iterable[str]:
        """The tenant's items in a table, each at least once."""

    def count_items(self, physical: str, tenant: str, item_ids: Sequence[str] | None) -> int:
        """Points of these items."""

    def delete_items(self, physical: str, tenant: str, item_ids: Sequence[str] | None) -> None:
        """Delete the points of these items."""


def delete_everywhere(store: Versions, selector: Selector) -> DeleteReceipt:
    """What `Deletable.delete` promises, in every table of the collection."""
    return DeleteReceipt(num_deleted={physical: _delete(store, physical, selector) for physical in store.versions()})


def _delete(store: Versions, physical: str, selector: Selector) -> int:
    num_deleted = 0
    for item_ids in _selected(store, physical, selector):
        num_deleted += store.count_items(physical, selector.tenant, item_ids)
        store.delete_items(physical, selector.tenant, item_ids)
    left = sum(
        store.count_items(physical, selector.tenant, item_ids) for item_ids in _selected(store, physical, selector)
    )
    if left:
        raise TransientError(f"{left} points that were deleted from {physical} are there: is a run still writing them?")
    return num_deleted


def _selected(store: Versions, physical: str, selector: Selector) -> Iterator[list[str] | None]:
    if selector.item_ids is None and selector.all_but is None:
        yield None
        return
    item_ids = selector.item_ids
    if item_ids is None:
        assert selector.all_but is not None
        item_ids = tuple(set(store.item_ids(physical, selector.tenant)) - selector.all_but)
    remaining = iter(sorted(set(item_ids)))
    while some := list(islice(remaining, _IDS_AT_ONCE)):
        yield some
