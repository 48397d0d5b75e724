"""What only PostgreSQL has: transactions, privileges, views, and connections that are cut."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sample_points import OTHER_VERSION, documents, keys, make_collection, make_points, make_row, nearest, vector

from pipeline.config import PgvectorSection
from pipeline.errors import ConfigError, TransientError
from pipeline.sinks.pgvector import PgvectorSink


@pytest.fixture
def section(make_section: Callable[..., Any]) -> PgvectorSection:
    made = make_section("pgvector", index_min_points=500)
    assert isinstance(made, PgvectorSection)
    return made


@pytest.fixture
def connection(postgres: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres, autocommit=True) as connection:
        yield connection


def test_small_tables_have_no_vector_index_and_large_ones_do(section: PgvectorSection, connection: Any) -> None:
    sink, collection = PgvectorSink(section), make_collection()
    sink.prepare(collection)
    indexes = "SELECT indexname FROM pg_indexes WHERE schemaname = %s ORDER BY 1"
    own = [f"{collection.physical}_item", f"{collection.physical}_pkey"]
    sink.write(collection, documents(100, 4))
    sink.finish(collection)
    assert [name for (name,) in connection.execute(indexes, [section.schema_name])] == own
    sink.write(collection, documents(500, 4))
    for _ in range(2):
        sink.finish(collection)
        found = [name for (name,) in connection.execute(indexes, [section.schema_name])]
        assert found == [*own, f"{collection.physical}_vector"]
    sink.switch(collection)
    for limit in (1, 5, 200):
        hits = sink.search("documents", vector(3), limit, tenant="")
        expected = nearest(documents(500, 4), vector(3), "cosine", 1)
        assert len(hits) == limit
        assert (hits[0].id, hits[0].score) == (expected[0][0], pytest.approx(expected[0][1], abs=1e-6))


def test_vectors_too_long_for_an_index_are_searched_without(
    make_section: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    sink = PgvectorSink(make_section("pgvector", index_min_points=1))
    collection = make_collection(dimensions=2_001)
    sink.prepare(collection)
    sink.write(collection, documents(1, dimensions=2_001))
    sink.finish(collection)
    sink.switch(collection)
    assert "pgvector indexes up to 2000 dimensions, these are 2001" in caplog.text
    assert len(sink.search("documents", vector(1, 2_001), 5, tenant="")) == 2


def test_the_view_is_for_everybody(section: PgvectorSection, connection: Any) -> None:
    sink = PgvectorSink(section)
    view = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(section.schema_name, "documents"))
    for version, dimensions, num in (("0" * 8, 8, 2), (OTHER_VERSION, 4, 3), ("1" * 8, 4, 5)):
        collection = make_collection(version=version, dimensions=dimensions)
        sink.prepare(collection)
        sink.write(collection, documents(num, 1, dimensions=dimensions))
        sink.switch(collection)
        assert connection.execute(view).fetchone() == (num,)


def test_a_connection_that_is_cut_is_made_again(section: PgvectorSection, connection: Any) -> None:
    sink, collection = PgvectorSink(section), make_collection()
    sink.prepare(collection)
    table = sql.Identifier(section.schema_name, collection.physical)
    with connection.transaction():
        connection.execute(sql.SQL("LOCK TABLE {}").format(table))
        writer = threading.Thread(target=sink.write, args=(collection, documents(3)))
        writer.start()
        waiting = "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE NOT granted"
        until = time.monotonic() + 20
        while not connection.execute(waiting).fetchall():
            assert time.monotonic() < until
            time.sleep(0.01)
    writer.join(timeout=20)
    assert sink.count(collection) == 6


def test_what_is_replaced_is_replaced_whole_or_not_at_all(section: PgvectorSection, connection: Any) -> None:
    sink, collection = PgvectorSink(section), make_collection()
    sink.prepare(collection)
    sink.write(collection, documents(3, 4))
    forbid = "CREATE RULE forbidden AS ON DELETE TO {} DO INSTEAD SELECT 1 / (length(old.text) - length(old.text))"
    connection.execute(sql.SQL(forbid).format(sql.Identifier(section.schema_name, collection.physical)))
    points = documents(4, 2)
    with pytest.raises(psycopg.errors.DivisionByZero):
        sink.replace_items(collection, points, keys(points))
    assert sink.count(collection) == 12


def test_text_with_nul_is_stored_without(section: PgvectorSection) -> None:
    sink, collection = PgvectorSink(section), make_collection()
    sink.prepare(collection)
    sink.write(collection, make_points([make_row("doc", text="a\x00b")]))
    sink.switch(collection)
    assert [hit.text for hit in sink.search("documents", vector(1), 5, tenant="")] == ["ab"]


def test_somebody_elses_table_is_left_alone(section: PgvectorSection, connection: Any) -> None:
    connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(section.schema_name)))
    theirs = sql.Identifier(section.schema_name, "documents")
    connection.execute(sql.SQL("CREATE TABLE {} (id integer)").format(theirs))
    with pytest.raises(ConfigError, match=r"a table or view 'documents' that is not headrace's"):
        PgvectorSink(section).prepare(make_collection())


def test_a_column_more_is_refused(section: PgvectorSection, connection: Any) -> None:
    sink, collection = PgvectorSink(section), make_collection()
    sink.prepare(collection)
    table = sql.Identifier(section.schema_name, collection.physical)
    connection.execute(sql.SQL("ALTER TABLE {} ADD COLUMN mine integer").format(table))
    with pytest.raises(ConfigError, match="column mine is 'integer', expected None"):
        sink.prepare(collection)


@pytest.mark.parametrize("foreign", ["documents", "documents__01234567", "the schema"])
def test_a_role_that_could_not_finish_the_run_is_refused(
    foreign: str, section: PgvectorSection, connection: Any, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, collection = PgvectorSink(section), make_collection()
    sink.prepare(collection)
    sink.switch(collection)
    names = {
        "role": sql.Identifier(section.schema_name.lower()),
        "schema": sql.Identifier(section.schema_name),
        "view": sql.Identifier(section.schema_name, "documents"),
        "table": sql.Identifier(section.schema_name, collection.physical),
    }
    allowed = {
        "documents": "ALTER VIEW {view} OWNER TO {role}",
        "documents__01234567": "ALTER TABLE {table} OWNER TO {role}",
        "the schema": "GRANT CREATE ON SCHEMA {schema} TO {role}",
    }
    statements = ["CREATE ROLE {role} LOGIN", "GRANT USAGE ON SCHEMA {schema} TO {role}", *allowed.values()]
    for statement in statements:
        if statement != allowed[foreign]:
            connection.execute(sql.SQL(statement).format(**names))
    connection.execute(sql.SQL("GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}").format(**names))
    monkeypatch.setenv(section.dsn_env, make_conninfo(postgres, user=section.schema_name.lower()))
    with pytest.raises(
        ConfigError, match="has to own documents__01234567 and documents, and to have the right to create"
    ):
        sink.prepare(collection)
    connection.execute(sql.SQL(allowed[foreign]).format(**names))
    sink.prepare(collection)
    sink.switch(collection)


def test_a_server_that_only_reads_is_refused(
    section: PgvectorSection, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collection = make_collection()
    PgvectorSink(section).prepare(collection)
    monkeypatch.setenv(section.dsn_env, make_conninfo(postgres, options="-c default_transaction_read_only=on"))
    with pytest.raises(ConfigError, match="read-only transaction"):
        PgvectorSink(section).prepare(collection)


@pytest.mark.parametrize(
    ("dsn", "raised", "said"),
    [
        ("host=127.0.0.1 port=1 password=hunter2", TransientError, "refused"),
        ("password=hunter2 broken", ConfigError, "holds no connection string of PostgreSQL"),
        (None, ConfigError, "HEADRACE_TEST_DSN, which is not set here"),
        ({"dbname": "absent", "password": "hunter2"}, ConfigError, "absent"),
        ({"user": "nobody_there", "password": "hunter2"}, ConfigError, "nobody_there"),
    ],
)
def test_a_server_that_is_out_of_reach_is_named_without_secrets(
    section: PgvectorSection,
    dsn: str | dict[str, str] | None,
    raised: type[Exception],
    said: str,
    postgres: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if dsn is None:
        monkeypatch.delenv(section.dsn_env)
    else:
        monkeypatch.setenv(section.dsn_env, dsn if isinstance(dsn, str) else make_conninfo(postgres, **dsn))
    with pytest.raises(raised) as caught:
        PgvectorSink(section).prepare(make_collection())
    assert said in str(caught.value)
    assert section.dsn_env in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "meant"),
    [
        (psycopg.errors.DeadlockDetected(), TransientError),
        (psycopg.errors.AdminShutdown(), TransientError),
        (psycopg.errors.TooManyConnections(), TransientError),
        (psycopg.OperationalError("server closed the connection unexpectedly"), TransientError),
        (psycopg.OperationalError('FATAL: password authentication failed for user "x"'), ConfigError),
        (psycopg.errors.InsufficientPrivilege(), ConfigError),
        (psycopg.errors.UndefinedColumn(), psycopg.errors.UndefinedColumn),
    ],
)
def test_errors_mean_what_they_say(error: Exception, meant: type[Exception], section: PgvectorSection) -> None:
    assert type(PgvectorSink(section)._meaning(error)) is meant


@pytest.mark.parametrize("module", ["psycopg", "pgvector.psycopg"])
def test_without_its_client_the_sink_says_what_to_install(
    module: str, section: PgvectorSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[pgvector\]'"):
        PgvectorSink(section)
