"""What a vector store has to do for headrace: the seam that LanceDB, PostgreSQL and Qdrant stand behind."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Metric = Literal["cosine", "dot", "l2"]
Kind = Literal["image", "video", "page", "chunk", "text"]
Vector = Sequence[float] | npt.NDArray[np.float32]

# Ours for good: another namespace would make other ids, and every point of every collection would be there twice.
_NAMESPACE = uuid.UUID("5b0e1c52-6f5e-4a0b-9d51-3c1f6f0f8a27")
_NAME = re.compile(r"[a-z](_?[a-z0-9])*")
_NAME_LENGTH = 41  # PostgreSQL cuts names at 63 characters: this, ten of the version, and twelve of an index
_VERSION = re.compile(r"[0-9a-f]{8,128}")
_REQUIRED = ("id", "item_id", "tenant", "kind", "source_id", "vector")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """What users search by `name`, filled by one `version`: the digest (hex) of model and pooling contract.

    Each version has a table of its own, `physical`. A changed model fills a new one while the old one serves, and
    `Sink.switch` makes `name` mean the new one.
    """

    name: str
    dimensions: int
    metric: Metric
    version: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > _NAME_LENGTH:
            raise ValueError(
                f"a collection is named by a lower-case letter and up to 40 more, digits and single underscores, "
                f"got {self.name!r}"
            )
        if not _VERSION.fullmatch(self.version):
            raise ValueError(f"a version is a digest of 8 or more hex digits, got {self.version!r}")
        if self.dimensions < 1 or self.metric not in get_args(Metric):
            raise ValueError(f"expected dimensions >= 1 and a metric of {get_args(Metric)}, got {self}")

    @property
    def physical(self) -> str:
        """The table (Qdrant: collection) that holds the points of this version."""
        return f"{self.name}__{self.version[:8]}"


def is_version_of(physical: str, name: str) -> bool:
    """True when `physical` is the table of some version of the collection `name`."""
    return re.fullmatch(rf"{re.escape(name)}__[0-9a-f]{{8}}", physical) is not None


def points_schema(dimensions: int) -> pa.Schema:
    """The columns of points. `start_char` and `end_char` are where a chunk lies in its item's text, end exclusive."""
    columns = [
        ("id", pa.string()),
        ("item_id", pa.string()),
        ("tenant", pa.string()),
        ("kind", pa.string()),
        ("uri", pa.string()),
        ("page", pa.int32()),
        ("start_char", pa.int32()),
        ("end_char", pa.int32()),
        ("text", pa.string()),
        ("source_id", pa.string()),
        ("vector", pa.list_(pa.field("item", pa.float32(), nullable=True), dimensions)),
    ]
    return pa.schema([pa.field(name, kind, nullable=name not in _REQUIRED) for name, kind in columns])


def point_id(tenant: str, item_id: str, kind: Kind, part: int) -> str:
    """The id (UUID) of an item's `part`-th vector: the same for the same terms, always and everywhere."""
    return str(uuid.uuid5(_NAMESPACE, json.dumps([tenant, item_id, kind, part])))


class ItemKey(NamedTuple):
    """An item, which may have several points. Two tenants' items of one id are different items."""

    tenant: str
    item_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledged:
    """The store has committed that many points."""

    num_points: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OneOf:
    """The column's value is one of these."""

    column: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Between:
    """The column's value is `first`, `last` or between them."""

    column: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Which points a search may find: those that meet every condition given. `pages` is (first, last), inclusive."""

    kinds: tuple[Kind, ...] | None = None
    item_ids: tuple[str, ...] | None = None
    source_ids: tuple[str, ...] | None = None
    uris: tuple[str, ...] | None = None
    pages: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for condition in self.conditions():
            if isinstance(condition, OneOf) and not condition.values:
                raise ValueError(f"the filter lists no value for {condition.column}; leave it out to have any")

    def conditions(self) -> Iterator[OneOf | Between]:
        """The same as conditions on columns, all of which have to be met."""
        lists = {"kind": self.kinds, "item_id": self.item_ids, "source_id": self.source_ids, "uri": self.uris}
        yield from (
            OneOf(column=column, values=tuple(values)) for column, values in lists.items() if values is not None
        )
        if self.pages is not None:
            yield Between(column="page", first=self.pages[0], last=self.pages[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """A point that was found. `score`: cosine, dot product, or the negative Euclidean distance; higher is nearer."""

    id: str
    score: float
    item_id: str
    tenant: str
    kind: str
    uri: str | None
    page: int | None
    start_char: int | None
    end_char: int | None
    text: str | None
    source_id: str


HIT_COLUMNS = tuple(name for name in Hit.__dataclass_fields__ if name != "score")


@dataclass(frozen=True, kw_only=True, slots=True)
class Selector:
    """What of a tenant is to be deleted: everything, or `item_ids`, or every item that is not in `all_but`.

    `all_but` is for items that vanished from the source: it lists the ones that are still there.
    """

    tenant: str
    item_ids: tuple[str, ...] | None = None
    all_but: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.item_ids is not None and self.all_but is not None:
            raise ValueError("a selector has item_ids or all_but, not both")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteReceipt:
    """Points deleted, by physical table: of every version of the collection, also where there were none.

    A receipt is given only when each table, asked again, had nothing left that was selected.
    """

    num_deleted: dict[str, int] = field(default_factory=dict)


class Deletable(Protocol):
    """Something that holds derived data and can be told to forget."""

    def delete(self, selector: Selector) -> DeleteReceipt:
        """Delete what is selected. Raises `TransientError` when something is left, as when it is still written to."""


class Sink(Deletable, Protocol):
    """A vector store. Raises `ConfigError` for what configuration or store refuse, `TransientError` for what keeps
    failing after retries, `ValueError` for points that are none (`points.conform`).

    Pickles to its configuration; each process makes connections of its own, when it first needs one.
    """

    def prepare(self, collection: Collection) -> None:
        """Before any work starts: reach the store, show that it may be written to, create the table if it is missing.

        Raises `ConfigError` naming what differs when the table is there with other dimensions, metric or columns.
        """

    def write(self, collection: Collection, points: pa.Table) -> Acknowledged:
        """Insert points, or replace those of the same id, in batches; returns when the store has committed them all.

        Idempotent: after a crash in the middle, write the same again.
        """

    def replace_items(self, collection: Collection, points: pa.Table, items: Sequence[ItemKey]) -> Acknowledged:
        """Make `points` all that there is of `items`: what these had before and have no more is deleted.

        Every point is of one of `items`; items without points lose all they had. No item is without its points in
        between, also when this process is killed.
        """

    def purge(self) -> None:
        """Have no file of the configured collection hold anything of what was deleted; servers see to that themselves,
        in their own time."""

    def finish(self, collection: Collection) -> None:
        """At the end of a run: build or refresh the indexes. Idempotent."""

    def switch(self, collection: Collection) -> None:
        """Make `collection.name` mean this version, at once for all who search."""

    def count(self, collection: Collection, tenant: str | None = None) -> int:
        """Points of this version, of one tenant or of all."""

    def search(self, name: str, vector: Vector, limit: int, *, tenant: str, where: Filter | None = None) -> list[Hit]:
        """The nearest points of a tenant in the version that `name` means, best first. Raises `ConfigError` when
        `name` has not been switched to any."""
