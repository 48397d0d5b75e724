"""Points in LanceDB: tables in a folder or on object storage, without a server."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from pipeline.config import LanceDBSection
from pipeline.errors import ConfigError, TransientError
from pipeline.retry import Result, retry
from pipeline.sinks.contract import (
    HIT_COLUMNS,
    Between,
    Collection,
    Filter,
    Hit,
    ItemKey,
    Metric,
    OneOf,
    Vector,
    is_version_of,
    points_schema,
)
from pipeline.sinks.points import by_tenant, query_vector
from pipeline.sinks.store_sink import StoreSink
from pipeline.sinks.versions import described, refuse_other

_POINTERS = "headrace_collections"
_POINTERS_SCHEMA = pa.schema([("name", pa.string()), ("physical", pa.string()), ("described", pa.string())])
_DESCRIBED = b"headrace"
# Without it two writers that insert the same new id at once would both commit.
_KEY = {"lance-schema:unenforced-primary-key": "true"}
_CONFLICTS = ("conflict", "concurrent", "retry_timeout")
_CUT_OFF = ("timed out", "timeout", "connection", "throttl", "slowdown", "too many requests", "503 ", "internal server")
_DENIED = (
    *("permission denied", "permissiondenied", "access denied", "accessdenied", "unauthenticated", "credential"),
    *("signaturedoesnotmatch", "invalidaccesskeyid", "status: 403"),
)
_REFINE_FACTOR = 4  # candidates of the quantised index for each hit, compared exactly
_LEAST_CANDIDATES = 100  # that the graph of the index follows; not tuned


class LanceDBSink(StoreSink[LanceDBSection]):
    """The `Sink` over LanceDB. Writers in any number of processes: a commit that lost against another is repeated.

    What `name` means is a row of the table `headrace_collections`.
    """

    def __init__(self, section: LanceDBSection) -> None:
        super().__init__(section)
        _client()

    def _replace_batch(self, physical: str, batch: pa.Table, items: Sequence[ItemKey]) -> None:
        self._try(partial(self._replace, physical, batch, items))

    def count(self, collection: Collection, tenant: str | None = None) -> int:
        condition = None if tenant is None else _items_condition(tenant, None)
        return self._try(lambda: int(self._open(collection.physical).count_rows(condition)))

    def versions(self) -> list[str]:
        """The tables of all versions of the configured collection."""
        return self._try(lambda: [name for name in self._names() if is_version_of(name, self._section.collection)])

    def item_ids(self, physical: str, tenant: str) -> Iterable[str]:
        """The tenant's items in a table."""

        def scan() -> set[str]:
            rows = self._open(physical).search().where(_items_condition(tenant, None)).select(["item_id"])
            return {item for batch in rows.to_batches() for item in batch["item_id"].to_pylist()}

        return self._try(scan)

    def count_items(self, physical: str, tenant: str, item_ids: Sequence[str] | None) -> int:
        """Points of these items; None: of all."""
        return self._try(lambda: int(self._open(physical).count_rows(_items_condition(tenant, item_ids))))

    def delete_items(self, physical: str, tenant: str, item_ids: Sequence[str] | None) -> None:
        """Delete the points of these items; None: of all."""
        self._try(lambda: self._open(physical).delete(_items_condition(tenant, item_ids)))

    def purge(self) -> None:
        """Write every table of the collection anew, with its indexes, and remove older versions.

        Lance notes which rows of a file are deleted; their bytes stay in it, in indexes and in older versions.
        """
        for physical in self.versions():
            self._try(partial(self._write_anew, physical))

    def _write_anew(self, physical: str) -> None:
        table, index = self._open(physical), _client().index
        table.update(values_sql={"id": "id"})
        for each in table.list_indices():
            [column] = each.columns
            if column == "vector":
                config = index.HnswSq(distance_type=table.index_stats(each.name).distance_type)
            else:
                config = index.Bitmap() if column == "tenant" else index.BTree()
            table.create_index(column, config=config, replace=True)
        # A search at this very moment may have to be asked again, which LanceDB warns of.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "optimize.cleanup_older_than=0. removes every version", UserWarning)
            table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)

    @cached_property
    def _db(self) -> Any:
        return _client().connect(self._section.uri, storage_options=_storage_options(self._section.uri))

    def _names(self) -> list[str]:
        page = self._db.list_tables()
        names = list(page.tables)
        while page.page_token:
            page = self._db.list_tables(page_token=page.page_token)
            names += page.tables
        return names

    def _open(self, name: str) -> Any:
        return self._db.open_table(name)  # anew each time: an open table may not see what others committed since

    def _prepare(self, collection: Collection) -> None:
        schema = _table_schema(collection)
        if collection.physical not in self._names():
            self._db.create_table(collection.physical, schema=schema, exist_ok=True)
        found = self._open(collection.physical).schema
        refuse_other(collection, _terms(found), _terms(schema), self._section.uri)
        probe = f"headrace_check_{uuid.uuid4().hex}"  # shows the right to write, also where the table is there
        self._db.create_table(probe, schema=_POINTERS_SCHEMA)
        self._db.drop_table(probe)

    def _upsert(self, physical: str, batch: pa.Table) -> None:
        # By the full scan of the ids: with an index on them, Lance does not notice another's insert of the same id.
        merge = self._open(physical).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.use_index(False).execute(batch)

    def _replace(self, physical: str, batch: pa.Table, items: Sequence[ItemKey]) -> None:
        if len(batch):
            self._upsert(physical, batch)
        stale = _any_of(_items_condition(tenant, ids) for tenant, ids in by_tenant(items).items())
        if len(batch):
            stale = f"{stale} AND id NOT IN ({_quoted(batch['id'].to_pylist())})"
        table = self._open(physical)
        if table.count_rows(stale):
            table.delete(stale)

    def _finish(self, collection: Collection) -> None:
        table = self._open(collection.physical)
        table.optimize()  # each commit left files of its own; rows that are not in an index yet are added to it
        indexed = {column for index in table.list_indices() for column in index.columns}
        for column, config in self._indexes(collection, table.count_rows()).items():
            if column not in indexed:
                table.create_index(column, config=config)

    def _indexes(self, collection: Collection, num_points: int) -> dict[str, Any]:
        index = _client().index
        scalar = {"tenant": index.Bitmap(), "item_id": index.BTree()}
        if num_points < self._section.index_min_points:
            return scalar
        return {**scalar, "vector": index.HnswSq(distance_type=collection.metric)}

    def _switch(self, collection: Collection) -> None:
        row = {"name": collection.name, "physical": collection.physical, "described": _description(collection)}
        pointers = self._db.create_table(_POINTERS, schema=_POINTERS_SCHEMA, exist_ok=True)
        merge = pointers.merge_insert("name").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(pa.Table.from_pylist([row], _POINTERS_SCHEMA))

    def _search(self, name: str, vector: Vector, limit: int, tenant: str, where: Filter) -> list[Hit]:
        physical, terms = self._pointer(name)
        conditions = " AND ".join([_items_condition(tenant, None), *map(_condition, where.conditions())])
        query = self._open(physical).search(query_vector(vector, terms["dimensions"]), vector_column_name="vector")
        query = query.distance_type(terms["metric"]).where(conditions, prefilter=True).limit(limit)
        query = query.refine_factor(_REFINE_FACTOR).ef(max(_LEAST_CANDIDATES, 2 * _REFINE_FACTOR * limit))
        rows = query.select([*HIT_COLUMNS, "_distance"]).to_arrow().to_pylist()
        return [Hit(score=_score(terms["metric"], row.pop("_distance")), **row) for row in rows]

    def _pointer(self, name: str) -> tuple[str, dict[str, Any]]:
        rows = []
        if _POINTERS in self._names():
            rows = self._open(_POINTERS).search().where(f"name = {_quoted([name])}").to_list()
        if not rows:
            raise ConfigError(f"{self._section.uri}: no run has finished the collection {name!r}")
        return rows[0]["physical"], json.loads(rows[0]["described"])

    def _try(self, call: Callable[[], Result]) -> Result:
        return retry(call, scheme="lancedb", meaning=self._meaning)

    def _meaning(self, error: Exception) -> Exception:
        text = str(error).lower()
        said = f"{self._section.uri}: {error}"
        # First, for what object storage refuses names its retry_timeout too.
        if any(word in text for word in _DENIED) or isinstance(error, PermissionError | NotADirectoryError):
            return ConfigError(f"the storage of sinks.lancedb cannot be used; {said}")
        return TransientError(said) if any(word in text for word in (*_CONFLICTS, *_CUT_OFF)) else error


def _client() -> Any:
    try:
        import lancedb
    except ImportError as error:
        raise ConfigError(f"sinks.lancedb needs its client ({error}): pip install 'headrace[lancedb]'") from error
    return lancedb


def _storage_options(uri: str) -> dict[str, str] | None:
    """Lance takes credentials and region from AWS's variables, but does not know the one for an endpoint."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not uri.startswith("s3://") or not endpoint:
        return None
    return {"aws_endpoint": endpoint, "allow_http": str(endpoint.startswith("http://")).lower()}


def _table_schema(collection: Collection) -> pa.Schema:
    schema = points_schema(collection.dimensions)
    return schema.set(0, schema.field("id").with_metadata(_KEY)).with_metadata({_DESCRIBED: _description(collection)})


def _description(collection: Collection) -> str:
    return json.dumps(described(collection))


def _terms(schema: pa.Schema) -> dict[str, object]:
    """What has to agree between a table that is there and the one that is wanted."""
    told = json.loads((schema.metadata or {}).get(_DESCRIBED, b"{}"))
    return {**told, **{f"column {column.name}": str(column.type) for column in schema}}


def _score(metric: Metric, distance: float) -> float:
    """Lance's distances are 1 - cosine, 1 - dot product, and the squared Euclidean distance."""
    return -(float(distance) ** 0.5) if metric == "l2" else 1.0 - distance


def _items_condition(tenant: str, item_ids: Sequence[str] | None) -> str:
    of_tenant = f"tenant = {_quoted([tenant])}"
    return of_tenant if item_ids is None else f"({of_tenant} AND item_id IN ({_quoted(item_ids)}))"


def _condition(condition: OneOf | Between) -> str:
    match condition:
        case OneOf(column=column, values=values):
            return f"{column} IN ({_quoted(values)})"
        case Between(column=column, first=first, last=last):
            return f"{column} BETWEEN {int(first)} AND {int(last)}"


def _any_of(conditions: Iterable[str]) -> str:
    return f"({' OR '.join(conditions)})"


def _quoted(values: Iterable[str]) -> str:
    return ", ".join("'" + value.replace("'", "''") + "'" for value in values)
