"""What the sinks have in common: what is asked of one, as calls to its store that are each tried again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import pyarrow as pa

from pipeline.config import LanceDBSection, PgvectorSection, QdrantSection
from pipeline.retry import Result
from pipeline.sinks.contract import (
    Acknowledged,
    Collection,
    DeleteReceipt,
    Filter,
    Hit,
    ItemKey,
    Selector,
    Vector,
)
from pipeline.sinks.points import batches, conform, item_batches
from pipeline.sinks.versions import check_name, delete_everywhere

Section = TypeVar("Section", LanceDBSection, PgvectorSection, QdrantSection)


class StoreSink(ABC, Generic[Section]):
    """A `Sink`, but for what each store does in its own way: the methods that begin with an underscore."""

    def __init__(self, section: Section) -> None:
        self._section: Section = section

    def __reduce__(self) -> tuple[type[Any], tuple[Section]]:
        return type(self), (self._section,)

    def prepare(self, collection: Collection) -> None:
        check_name(collection, self._section.collection)
        self._try(partial(self._prepare, collection))

    def write(self, collection: Collection, points: pa.Table) -> Acknowledged:
        table = conform(collection, points)
        for batch in batches(table, self._section.batch_points):
            self._try(partial(self._upsert, collection.physical, batch))
        return Acknowledged(num_points=len(table))

    def replace_items(self, collection: Collection, points: pa.Table, items: Sequence[ItemKey]) -> Acknowledged:
        table = conform(collection, points)
        for batch, keys in item_batches(table, items, self._section.batch_points):
            self._replace_batch(collection.physical, batch, keys)
        return Acknowledged(num_points=len(table))

    def purge(self) -> None:
        """Nothing to do: Qdrant's optimizer and PostgreSQL's vacuum free what was deleted."""

    def finish(self, collection: Collection) -> None:
        self._try(partial(self._finish, collection))

    def switch(self, collection: Collection) -> None:
        self._try(partial(self._switch, collection))

    def search(self, name: str, vector: Vector, limit: int, *, tenant: str, where: Filter | None = None) -> list[Hit]:
        return self._try(partial(self._search, name, vector, limit, tenant, where or Filter()))

    def delete(self, selector: Selector) -> DeleteReceipt:
        return delete_everywhere(self, selector)

    @abstractmethod
    def versions(self) -> list[str]:
        """The tables of all versions of the configured collection."""

    @abstractmethod
    def item_ids(self, physical: str, tenant: str) -> Iterable[str]:
        """The tenant's items in a table."""

    @abstractmethod
    def count_items(self, physical: str, tenant: str, item_ids: Sequence[str] | None) -> int:
        """Points of these items; None: of all."""

    @abstractmethod
    def delete_items(self, physical: str, tenant: str, item_ids: Sequence[str] | None) -> None:
        """Delete the points of these items; None: of all."""

    @abstractmethod
    def _try(self, call: Callable[[], Result]) -> Result:
        """`call()`, again after what may pass."""

    @abstractmethod
    def _prepare(self, collection: Collection) -> None: ...

    @abstractmethod
    def _upsert(self, physical: str, batch: pa.Table) -> None: ...

    @abstractmethod
    def _replace_batch(self, physical: str, batch: pa.Table, items: Sequence[ItemKey]) -> None:
        """Whole items, tried again as the store has it."""

    @abstractmethod
    def _finish(self, collection: Collection) -> None: ...

    @abstractmethod
    def _switch(self, collection: Collection) -> None: ...

    @abstractmethod
    def _search(self, name: str, vector: Vector, limit: int, tenant: str, where: Filter) -> list[Hit]: ...
