"""Points in Qdrant: a server, or a folder that one process at a time opens (small: each opening reads it whole)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from pipeline.config import QdrantSection
from pipeline.errors import ConfigError, TransientError
from pipeline.retry import Result, retry
from pipeline.sinks.contract import (
    HIT_COLUMNS,
    Between,
    Collection,
    Filter,
    Hit,
    ItemKey,
    OneOf,
    Vector,
    is_version_of,
)
from pipeline.sinks.points import batches, by_tenant, query_vector, vectors
from pipeline.sinks.store_sink import StoreSink
from pipeline.sinks.versions import refuse_other

_log = logging.getLogger(__name__)
_DISTANCES = {"cosine": "Cosine", "dot": "Dot", "l2": "Euclid"}
_INDEXED = {"item_id": "keyword", "kind": "keyword", "source_id": "keyword", "uri": "keyword", "page": "integer"}
_NOBODY = "00000000-0000-0000-0000-000000000000"  # no point has this id
_SCROLLED_POINTS = 1_000
_POLL_SECONDS = 1.0


class QdrantSink(StoreSink[QdrantSection]):
    """The `Sink` over Qdrant. What `name` means is an alias.

    Qdrant has no transactions: what is replaced is upserted first and the stale deleted then.
    """

    def __init__(self, section: QdrantSection) -> None:
        super().__init__(section)
        _client()

    def _finish(self, collection: Collection) -> None:
        """Wait until the server's optimizer has built its indexes, for `finish_seconds` at most."""
        if self._section.path is not None:
            return
        until = time.monotonic() + self._section.finish_seconds
        while not self._try(partial(self._is_indexed, collection.physical)):
            if time.monotonic() > until:
                _log.warning("%s: still being indexed, searches are slower until then", collection.physical)
                return
            time.sleep(_POLL_SECONDS)

    def finish(self, collection: Collection) -> None:
        self._finish(collection)  # whose every look is tried again by itself

    def _replace_batch(self, physical: str, batch: pa.Table, items: Sequence[ItemKey]) -> None:
        for part in batches(batch, self._section.batch_points):
            self._try(partial(self._upsert, physical, part))
        self._try(partial(self._delete_stale, physical, batch, items))

    def count(self, collection: Collection, tenant: str | None = None) -> int:
        conditions = [] if tenant is None else _items(tenant, None)
        return self._try(partial(self._count, collection.physical, conditions))

    def versions(self) -> list[str]:
        """The Qdrant collections of all versions of the configured collection."""

        def names() -> list[str]:
            with self._open() as client:
                return [each.name for each in client.get_collections().collections]

        return sorted(name for name in self._try(names) if is_version_of(name, self._section.collection))

    def item_ids(self, physical: str, tenant: str) -> Iterable[str]:
        """The tenant's items in a collection."""
        return self._try(lambda: {str(payload["item_id"]) for payload in self._scroll(physical, tenant)})

    def count_items(self, physical: str, tenant: str, item_ids: Sequence[str] | None) -> int:
        """Points of these items; None: of all."""
        return self._try(partial(self._count, physical, _items(tenant, item_ids)))

    def delete_items(self, physical: str, tenant: str, item_ids: Sequence[str] | None) -> None:
        """Delete the points of these items; None: of all."""
        models = _client().models
        self._try(partial(self._delete, physical, models.Filter(must=_items(tenant, item_ids))))

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """The server's client, kept; or the folder, open only within the block, for it is locked while it is open."""
        if self._section.path is None:
            yield self._server
            return
        client = _client().QdrantClient(path=self._section.path)
        try:
            yield client
        finally:
            client.close()

    @cached_property
    def _server(self) -> Any:
        name = self._section.api_key_env
        key = None if name is None else os.environ.get(name)
        if name is not None and not key:
            raise ConfigError(f"sinks.qdrant.api_key_env names the environment variable {name}, which is not set here")
        seconds = self._section.timeout_seconds
        return _client().QdrantClient(url=self._section.url, api_key=key, timeout=seconds, check_compatibility=False)

    def _prepare(self, collection: Collection) -> None:
        models = _client().models
        with self._open() as client:
            names = {each.name for each in client.get_collections().collections}
            if collection.name in names:
                raise ConfigError(
                    f"{self._where}: there is a Qdrant collection {collection.name!r}, which is not headrace's; "
                    "take another sinks.qdrant.collection"
                )
            if collection.physical not in names:
                params = models.VectorParams(size=collection.dimensions, distance=_DISTANCES[collection.metric])
                client.create_collection(collection.physical, vectors_config=params)
            found = _terms(client.get_collection(collection.physical).config.params.vectors)
            expected = {"dimensions": collection.dimensions, "metric": collection.metric}
            refuse_other(collection, found, expected, self._where)
            # Shows the right to write; and deletes nothing.
            client.delete(collection.physical, points_selector=models.PointIdsList(points=[_NOBODY]), wait=True)
            if self._section.path is None:
                self._index_payload(client, collection.physical)

    def _index_payload(self, client: Any, physical: str) -> None:
        # Before the points: Qdrant links its graph along these when it is built.
        models = _client().models
        of_tenants = models.KeywordIndexParams(type="keyword", is_tenant=True)
        for field, schema in {"tenant": of_tenants, **_INDEXED}.items():
            client.create_payload_index(physical, field_name=field, field_schema=schema, wait=True)

    def _upsert(self, physical: str, batch: pa.Table) -> None:
        models = _client().models
        rows = batch.drop_columns(["id", "vector"]).to_pylist()
        payloads = [{name: value for name, value in row.items() if value is not None} for row in rows]
        points = models.Batch(ids=batch["id"].to_pylist(), vectors=vectors(batch).tolist(), payloads=payloads)
        with self._open() as client:
            client.upsert(physical, points=points, wait=True)

    def _delete_stale(self, physical: str, batch: pa.Table, items: Sequence[ItemKey]) -> None:
        models = _client().models
        new = [models.HasIdCondition(has_id=batch["id"].to_pylist())] if len(batch) else []
        for tenant, item_ids in by_tenant(items).items():
            self._delete(physical, models.Filter(must=_items(tenant, item_ids), must_not=new))

    def _delete(self, physical: str, condition: Any) -> None:
        with self._open() as client:
            client.delete(physical, points_selector=_client().models.FilterSelector(filter=condition), wait=True)

    def _count(self, physical: str, conditions: list[Any]) -> int:
        with self._open() as client:
            condition = _client().models.Filter(must=conditions)
            return int(client.count(physical, count_filter=condition, exact=True).count)

    def _scroll(self, physical: str, tenant: str) -> Iterator[dict[str, Any]]:
        condition = _client().models.Filter(must=_items(tenant, None))
        offset = None
        with self._open() as client:
            while True:
                records, offset = client.scroll(
                    physical,
                    scroll_filter=condition,
                    limit=_SCROLLED_POINTS,
                    offset=offset,
                    with_payload=["item_id"],
                    with_vectors=False,
                )
                yield from (record.payload for record in records)
                if offset is None:
                    return

    def _is_indexed(self, physical: str) -> bool:
        with self._open() as client:
            return str(client.get_collection(physical).status.value) == "green"

    def _switch(self, collection: Collection) -> None:
        models = _client().models
        create = models.CreateAlias(collection_name=collection.physical, alias_name=collection.name)
        operations: list[Any] = [models.CreateAliasOperation(create_alias=create)]
        with self._open() as client:
            if collection.name in _aliases(client):
                delete = models.DeleteAlias(alias_name=collection.name)
                operations.insert(0, models.DeleteAliasOperation(delete_alias=delete))
            client.update_collection_aliases(change_aliases_operations=operations)

    def _search(self, name: str, vector: Vector, limit: int, tenant: str, where: Filter) -> list[Hit]:
        conditions = [*_items(tenant, None), *map(_condition, where.conditions())]
        with self._open() as client:
            physical = _aliases(client).get(name)
            if physical is None:
                raise ConfigError(f"{self._where}: no run has finished the collection {name!r}")
            terms = _terms(client.get_collection(physical).config.params.vectors)
            found = client.query_points(
                physical,
                query=query_vector(vector, int(str(terms["dimensions"]))).tolist(),
                query_filter=_client().models.Filter(must=conditions),
                limit=limit,
                with_payload=True,
            )
        sign = -1 if terms["metric"] == "l2" else 1
        return [_hit(point, sign) for point in found.points]

    @property
    def _where(self) -> str:
        return str(self._section.url or self._section.path)

    def _try(self, call: Callable[[], Result]) -> Result:
        return retry(call, scheme="qdrant", meaning=self._meaning)

    def _meaning(self, error: Exception) -> Exception:
        said = f"{self._where}: {error}"
        status = getattr(error, "status_code", None)
        if status in (401, 403):
            return ConfigError(f"Qdrant refuses the API key of sinks.qdrant; {said}")
        if status is not None:
            return TransientError(said) if status in (408, 425, 429) or status >= 500 else error
        if isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
            return ConfigError(f"the folder of sinks.qdrant cannot be used; {said}")
        passing = type(error).__name__ in ("ResponseHandlingException", "ResourceExhaustedResponse")
        return TransientError(said) if passing or "already accessed" in str(error) else error


def _client() -> Any:
    try:
        import qdrant_client
        import qdrant_client.models
    except ImportError as error:
        raise ConfigError(f"sinks.qdrant needs its client ({error}): pip install 'headrace[qdrant]'") from error
    return qdrant_client


def _aliases(client: Any) -> dict[str, str]:
    return {each.alias_name: each.collection_name for each in client.get_aliases().aliases}


def _terms(params: Any) -> dict[str, object]:
    """What a Qdrant collection was made for; nothing when it has several vectors a point, and so is not ours."""
    metrics = {distance: metric for metric, distance in _DISTANCES.items()}
    if not hasattr(params, "distance"):
        return {"dimensions": None, "metric": None}
    return {"dimensions": params.size, "metric": metrics.get(params.distance.value, params.distance.value)}


def _items(tenant: str, item_ids: Sequence[str] | None) -> list[Any]:
    of_tenant = _condition(OneOf(column="tenant", values=(tenant,)))
    if item_ids is None:
        return [of_tenant]
    return [of_tenant, _condition(OneOf(column="item_id", values=tuple(item_ids)))]


def _condition(condition: OneOf | Between) -> Any:
    models = _client().models
    match condition:
        case OneOf(column=column, values=values):
            return models.FieldCondition(key=column, match=models.MatchAny(any=list(values)))
        case Between(column=column, first=first, last=last):
            return models.FieldCondition(key=column, range=models.Range(gte=first, lte=last))


def _hit(point: Any, sign: int) -> Hit:
    payload = {name: point.payload.get(name) for name in HIT_COLUMNS if name != "id"}
    return Hit(id=str(point.id), score=sign * float(point.score), **payload)
