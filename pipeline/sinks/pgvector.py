"""Points in PostgreSQL with the extension pgvector."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa

from pipeline.config import PgvectorSection
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
from pipeline.sinks.points import by_tenant, query_vector, vectors
from pipeline.sinks.store_sink import StoreSink
from pipeline.sinks.versions import described, refuse_other

_log = logging.getLogger(__name__)
_CONNECT_SECONDS = 10
_OLDEST_EXTENSION = (0, 8)  # iterative scans: without them a filtered search by index finds less than there is
_LEAST_CANDIDATES, _MOST_CANDIDATES = 100, 1_000  # that the graph of the index follows: not tuned; pgvector's limit
_MOST_INDEXED_DIMENSIONS = 2_000  # of an HNSW index over `vector` (pgvector 0.8)
_COLUMNS = {
    "id": "uuid",
    "item_id": "text",
    "tenant": "text",
    "kind": "text",
    "uri": "text",
    "page": "integer",
    "start_char": "integer",
    "end_char": "integer",
    "text": "text",
    "source_id": "text",
}
_REQUIRED = ("item_id", "tenant", "kind", "source_id", "vector")
_OPERATORS = {"cosine": "<=>", "dot": "<#>", "l2": "<->"}
_SCORES = {"cosine": "1 - ({})", "dot": "-({})", "l2": "-({})"}  # <#> is the negative dot product
_OPERATOR_CLASSES = {"cosine": "vector_cosine_ops", "dot": "vector_ip_ops", "l2": "vector_l2_ops"}
# By class of SQLSTATE: connection, transaction rollback, resources, operator intervention; lock not available.
_PASSING = ("08", "40", "53", "57", "55P03")
# Authorisation; no such database, schema, extension file; read-only; privileges; not supported; not a table or view.
_REFUSED = ("28", "3D", "3F", "58P01", "25006", "42501", "0A000", "42809")
_REFUSED_CONNECTIONS = (
    "authentication failed",
    "no password supplied",
    "does not exist",
    "pg_hba.conf",
    "not permitted",
)


class PgvectorSink(StoreSink[PgvectorSection]):
    """The `Sink` over PostgreSQL. A batch is a transaction, and so is what is replaced of whole items.

    What `name` means is a view. A connection lives for one batch: its cost is small beside that of the batch, and
    nothing is left open between them.
    """

    def __init__(self, section: PgvectorSection) -> None:
        super().__init__(section)
        _client()

    def _upsert(self, physical: str, batch: pa.Table) -> None:
        self._replace(physical, batch, ())

    def _replace_batch(self, physical: str, batch: pa.Table, items: Sequence[ItemKey]) -> None:
        self._try(partial(self._replace, physical, batch, items))

    def count(self, collection: Collection, tenant: str | None = None) -> int:
        if tenant is not None:
            return self.count_items(collection.physical, tenant, None)
        return int(self._value("SELECT count(*) FROM {table}", {}, collection.physical))

    def versions(self) -> list[str]:
        """The tables of all versions of the configured collection."""
        tables = "SELECT tablename FROM pg_tables WHERE schemaname = %(schema)s ORDER BY tablename"
        rows = self._rows(tables, {"schema": self._section.schema_name})
        return [name for (name,) in rows if is_version_of(name, self._section.collection)]

    def item_ids(self, physical: str, tenant: str) -> Iterable[str]:
        """The tenant's items in a table."""
        distinct = "SELECT DISTINCT item_id FROM {table} WHERE tenant = %(tenant)s"
        return [item_id for (item_id,) in self._rows(distinct, {"tenant": tenant}, physical)]

    def count_items(self, physical: str, tenant: str, item_ids: Sequence[str] | None) -> int:
        """Points of these items; None: of all."""
        values = {"tenant": tenant, "item_ids": item_ids}
        return int(self._value(f"SELECT count(*) FROM {{table}} WHERE {_of_items(item_ids)}", values, physical))

    def delete_items(self, physical: str, tenant: str, item_ids: Sequence[str] | None) -> None:
        """Delete the points of these items; None: of all."""

        def delete() -> None:
            with self._transaction() as connection:
                self._execute(
                    connection,
                    f"DELETE FROM {{table}} WHERE {_of_items(item_ids)}",
                    {"tenant": tenant, "item_ids": item_ids},
                    physical,
                )

        self._try(delete)

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """A connection that commits when the block ends, rolls back when it raises, and is closed in any case."""
        with _client().connect(**self._parameters()) as connection:
            # Whatever the server's default: acknowledged is on disk.
            connection.execute("SET LOCAL synchronous_commit TO on")
            yield connection

    def _parameters(self) -> dict[str, Any]:
        name = self._section.dsn_env
        dsn = os.environ.get(name)
        if not dsn:
            raise ConfigError(f"sinks.pgvector.dsn_env names the environment variable {name}, which is not set here")
        try:
            parsed = _client().conninfo.conninfo_to_dict(dsn)
        except _client().ProgrammingError:  # its message and its cause hold parts of the string
            raise ConfigError(f"the environment variable {name} holds no connection string of PostgreSQL") from None
        return {"connect_timeout": _CONNECT_SECONDS, "application_name": "headrace", **parsed}

    def _execute(
        self, connection: Any, query: str, values: Mapping[str, Any] | None = None, table: str = "", **parts: str
    ) -> Any:
        """Run `query`, in which `{table}` is a table of the configured schema and `parts` are names."""
        sql = _client().sql
        names = {name: sql.Identifier(part) for name, part in parts.items()}
        names["table"] = sql.Identifier(self._section.schema_name, table)
        return connection.execute(sql.SQL(query).format(**names), values)

    def _rows(self, query: str, values: Mapping[str, Any], table: str = "") -> list[tuple[Any, ...]]:
        def fetch() -> list[tuple[Any, ...]]:
            with self._transaction() as connection:
                return list(self._execute(connection, query, values, table).fetchall())

        return self._try(fetch)

    def _value(self, query: str, values: Mapping[str, Any], table: str) -> Any:
        return self._rows(query, values, table)[0][0]

    def _prepare(self, collection: Collection) -> None:
        with self._transaction() as connection:
            self._prepare_server(connection)
            self._refuse_strange_view(connection, collection)
            if self._comment(connection, collection.physical) is None:
                self._create(connection, collection)
            found, expected = self._terms(connection, collection.physical), _expected_terms(collection)
            refuse_other(collection, found, expected, f"${self._section.dsn_env}, schema {self._section.schema_name},")
            self._refuse_foreign(connection, collection)

    def _prepare_server(self, connection: Any) -> None:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        [version] = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_EXTENSION:
            raise ConfigError(f"sinks.pgvector needs pgvector 0.8 or newer, the server has {version}; ALTER EXTENSION")
        # Not "IF NOT EXISTS": that asks for the right to create one also when it is there.
        exists = "SELECT to_regnamespace(quote_ident(%(schema)s)) IS NOT NULL"
        if not connection.execute(exists, {"schema": self._section.schema_name}).fetchone()[0]:
            self._execute(connection, "CREATE SCHEMA {schema}", schema=self._section.schema_name)

    def _refuse_strange_view(self, connection: Any, collection: Collection) -> None:
        kind = "SELECT relkind FROM pg_class WHERE oid = to_regclass(%(table)s)"
        found = connection.execute(kind, {"table": self._qualified(collection.name)}).fetchone()
        if found is not None and (found[0] not in ("v", b"v") or not self._comment(connection, collection.name)):
            raise ConfigError(
                f"schema {self._section.schema_name} has a table or view {collection.name!r} that is not headrace's; "
                "take another sinks.pgvector.collection"
            )

    def _create(self, connection: Any, collection: Collection) -> None:
        columns = [
            f"{name} {kind}" + (" NOT NULL" if name in _REQUIRED else " PRIMARY KEY" if name == "id" else "")
            for name, kind in _column_types(collection).items()
        ]
        self._execute(connection, f"CREATE TABLE {{table}} ({', '.join(columns)})", table=collection.physical)
        self._execute(
            connection,
            "CREATE INDEX {index} ON {table} (tenant, item_id)",
            table=collection.physical,
            index=f"{collection.physical}_item",
        )
        self._set_comment(connection, "TABLE", collection.physical, described(collection))

    def _refuse_foreign(self, connection: Any, collection: Collection) -> None:
        """Only who owns the table may index it, and only who may create in the schema can switch the view."""
        rights = (
            "SELECT has_schema_privilege(relnamespace, 'CREATE') FROM pg_class "
            "WHERE oid = ANY(ARRAY[to_regclass(%(table)s), to_regclass(%(view)s)]) "
            "AND pg_has_role(relowner, 'USAGE') = %(owned)s"
        )
        names = {"table": self._qualified(collection.physical), "view": self._qualified(collection.name)}
        owned = connection.execute(rights, {**names, "owned": True}).fetchall()
        foreign = connection.execute(rights, {**names, "owned": False}).fetchall()
        if foreign or not all(may_create for (may_create,) in owned):
            raise ConfigError(
                f"the role of ${self._section.dsn_env} has to own {collection.physical} and {collection.name}, "
                f"and to have the right to create in schema {self._section.schema_name}"
            )

    def _terms(self, connection: Any, physical: str) -> dict[str, object]:
        query = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%(table)s) AND attnum > 0 AND NOT attisdropped"
        )
        columns = connection.execute(query, {"table": self._qualified(physical)}).fetchall()
        told = self._comment(connection, physical) or {}
        return {**told, **{f"column {name}": kind.rpartition(".")[2] for name, kind in columns}}

    def _comment(self, connection: Any, name: str) -> dict[str, Any] | None:
        """What was written beside a table or view; None when it is not there, {} when that is not ours."""
        query = "SELECT to_regclass(%(table)s)::oid, obj_description(to_regclass(%(table)s), 'pg_class')"
        oid, text = connection.execute(query, {"table": self._qualified(name)}).fetchone()
        if oid is None:
            return None
        try:
            told = json.loads(text or "{}")
        except ValueError:
            return {}
        return told if isinstance(told, dict) else {}

    def _set_comment(self, connection: Any, what: str, name: str, value: Mapping[str, Any]) -> None:
        sql = _client().sql
        where = sql.Identifier(self._section.schema_name, name)
        text = sql.Literal(json.dumps(value))
        connection.execute(sql.SQL(f"COMMENT ON {what} {{}} IS {{}}").format(where, text))

    def _qualified(self, name: str) -> str:
        return ".".join('"' + part.replace('"', '""') + '"' for part in (self._section.schema_name, name))

    def _replace(self, physical: str, batch: pa.Table, items: Sequence[ItemKey]) -> None:
        """Upsert the batch and, of `items`, delete every other point: both or neither."""
        with self._transaction() as connection:
            _register_vector(connection)
            if len(batch):
                self._insert(connection, physical, batch)
            for tenant, item_ids in by_tenant(items).items():
                stale = f"DELETE FROM {{table}} WHERE {_of_items(item_ids)} AND NOT id = ANY(%(ids)s::uuid[])"
                values = {"tenant": tenant, "item_ids": item_ids, "ids": batch["id"].to_pylist()}
                self._execute(connection, stale, values, physical)

    def _insert(self, connection: Any, physical: str, batch: pa.Table) -> None:
        sql = _client().sql
        names = [*_COLUMNS, "vector"]
        others = ", ".join(f"{name} = excluded.{name}" for name in names if name != "id")
        query = (
            f"INSERT INTO {{table}} ({', '.join(names)}) VALUES ({', '.join(['%s'] * len(names))}) "
            f"ON CONFLICT (id) DO UPDATE SET {others}"
        )
        rows = zip(*(_without_nul(batch[name].to_pylist()) for name in _COLUMNS), vectors(batch), strict=True)
        with connection.cursor() as cursor:
            statement = sql.SQL(query).format(table=sql.Identifier(self._section.schema_name, physical))
            cursor.executemany(statement, list(rows))

    def _finish(self, collection: Collection) -> None:
        with self._transaction() as connection:
            [count] = self._execute(connection, "SELECT count(*) FROM {table}", table=collection.physical).fetchone()
            if count >= self._section.index_min_points:
                self._index(connection, collection)
            self._execute(connection, "ANALYZE {table}", table=collection.physical)

    def _index(self, connection: Any, collection: Collection) -> None:
        if collection.dimensions > _MOST_INDEXED_DIMENSIONS:
            _log.warning(
                "%s: pgvector indexes up to %d dimensions, these are %d: searches compare with every point",
                collection.physical,
                _MOST_INDEXED_DIMENSIONS,
                collection.dimensions,
            )
            return
        self._execute(
            connection,
            f"CREATE INDEX IF NOT EXISTS {{index}} ON {{table}} USING hnsw "
            f"(vector {_OPERATOR_CLASSES[collection.metric]})",
            table=collection.physical,
            index=f"{collection.physical}_vector",
        )

    def _switch(self, collection: Collection) -> None:
        psycopg = _client()
        view = f"VIEW {{table}} AS SELECT {', '.join([*_COLUMNS, 'vector'])} FROM {{schema}}.{{physical}}"
        with self._transaction() as connection:
            execute = partial(
                self._execute,
                connection,
                table=collection.name,
                schema=self._section.schema_name,
                physical=collection.physical,
            )
            try:
                with connection.transaction():
                    execute(f"CREATE OR REPLACE {view}")
            except psycopg.errors.InvalidTableDefinition:  # other dimensions are another type of the column
                execute("DROP VIEW {table}")
                execute(f"CREATE {view}")
            told = {**described(collection), "physical": collection.physical}
            self._set_comment(connection, "VIEW", collection.name, told)

    def _search(self, name: str, vector: Vector, limit: int, tenant: str, where: Filter) -> list[Hit]:
        with self._transaction() as connection:
            told = self._comment(connection, name)
            if not told:
                at = f"${self._section.dsn_env}, schema {self._section.schema_name}"
                raise ConfigError(f"{at}: no run has finished the collection {name!r}")
            values: dict[str, Any] = {"tenant": tenant, "limit": limit}
            conditions = [_of_items(None), *(_condition(each, values) for each in where.conditions())]
            distance = f"vector {_OPERATORS[told['metric']]} %(vector)s"
            query = (
                f"SELECT {_SCORES[told['metric']].format(distance)}, {', '.join(HIT_COLUMNS)} FROM {{table}} "
                f"WHERE {' AND '.join(conditions)} ORDER BY {distance} LIMIT %(limit)s"
            )
            _register_vector(connection)
            values["vector"] = query_vector(vector, told["dimensions"])
            connection.execute("SET LOCAL hnsw.iterative_scan TO strict_order")
            connection.execute(
                f"SET LOCAL hnsw.ef_search TO {min(_MOST_CANDIDATES, max(_LEAST_CANDIDATES, 2 * limit))}"
            )
            rows = self._execute(connection, query, values, told["physical"]).fetchall()
        return [
            Hit(score=float(score), id=str(id_), **dict(zip(HIT_COLUMNS[1:], rest, strict=True)))
            for score, id_, *rest in rows
        ]

    def _try(self, call: Callable[[], Result]) -> Result:
        return retry(call, scheme="postgresql", meaning=self._meaning)

    def _meaning(self, error: Exception) -> Exception:
        code = getattr(error, "sqlstate", None) or ""
        said = f"${self._section.dsn_env}: {str(error).strip()}"
        if code.startswith(_PASSING):
            return TransientError(said)
        if code.startswith(_REFUSED):
            return ConfigError(f"PostgreSQL refuses what sinks.pgvector needs; {said}")
        if code or not isinstance(error, _client().OperationalError):
            return error
        if any(words in said for words in _REFUSED_CONNECTIONS):
            return ConfigError(f"PostgreSQL does not let sinks.pgvector in; {said}")
        return TransientError(said)


def _client() -> Any:
    try:
        import pgvector.psycopg  # noqa: F401  asked for here, where it is said what to install
        import psycopg
        import psycopg.conninfo
        import psycopg.sql
    except ImportError as error:
        raise ConfigError(f"sinks.pgvector needs its client ({error}): pip install 'headrace[pgvector]'") from error
    return psycopg


def _register_vector(connection: Any) -> None:
    from pgvector.psycopg import register_vector

    register_vector(connection)


def _column_types(collection: Collection) -> dict[str, str]:
    return {**_COLUMNS, "vector": f"vector({collection.dimensions})"}


def _expected_terms(collection: Collection) -> dict[str, object]:
    return {**described(collection), **{f"column {name}": kind for name, kind in _column_types(collection).items()}}


def _of_items(item_ids: Sequence[str] | None) -> str:
    return "tenant = %(tenant)s" + ("" if item_ids is None else " AND item_id = ANY(%(item_ids)s)")


def _condition(condition: OneOf | Between, values: dict[str, Any]) -> str:
    """SQL whose parameters are put into `values`."""
    match condition:
        case OneOf(column=column, values=listed):
            values[column] = list(listed)
            return f"{column} = ANY(%({column})s)"
        case Between(column=column, first=first, last=last):
            values |= {f"{column}_first": first, f"{column}_last": last}
            return f"{column} BETWEEN %({column}_first)s AND %({column}_last)s"


def _without_nul(column: list[Any]) -> list[Any]:
    """PostgreSQL stores no NUL in text, and PDFs do have some in theirs."""
    return [value.replace("\x00", "") if isinstance(value, str) else value for value in column]
