"""What only LanceDB has: indexes at the end of a run, commits that meet, and errors that are told by their words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lancedb
import pytest
from sample_points import documents, keys, make_collection, nearest, vector

from pipeline.config import LanceDBSection
from pipeline.errors import ConfigError, TransientError
from pipeline.sinks.lancedb import LanceDBSink


def test_small_tables_have_no_vector_index_and_large_ones_do(make_section: Callable[..., Any]) -> None:
    section = make_section("lancedb", index_min_points=400)
    sink, collection = LanceDBSink(section), make_collection()
    sink.prepare(collection)
    sink.write(collection, documents(100, 3))
    sink.finish(collection)
    assert indexed(section, collection.physical) == {"tenant", "item_id"}
    sink.write(collection, documents(200, 3))
    for _ in range(2):
        sink.finish(collection)
        assert indexed(section, collection.physical) == {"tenant", "item_id", "vector"}
    sink.switch(collection)
    for seed in range(3):
        [expected] = nearest(documents(200, 3), vector(seed), "cosine", 1)
        [hit, *_] = sink.search("documents", vector(seed), 5, tenant="")
        assert (hit.id, hit.score) == (expected[0], pytest.approx(expected[1], abs=1e-6))


def test_an_index_hides_nothing_that_was_written_after_it(make_section: Callable[..., Any]) -> None:
    sink, collection = LanceDBSink(make_section("lancedb", index_min_points=256)), make_collection()
    sink.prepare(collection)
    sink.write(collection, documents(100, 3))
    sink.finish(collection)
    sink.switch(collection)
    sink.replace_items(collection, documents(110, 2), keys(documents(110, 2)))
    assert sink.count(collection) == 220
    hits = sink.search("documents", vector(5), 1_000, tenant="")
    assert {hit.id for hit in hits} <= set(documents(110, 2)["id"].to_pylist())
    new = documents(10, 2, first=100)
    [hit, *_] = sink.search("documents", new["vector"][7].as_py(), 1, tenant="")
    assert hit.id == new["id"][7].as_py()


def indexed(section: LanceDBSection, physical: str) -> set[str]:
    table = lancedb.connect(section.uri).open_table(physical)
    return {column for index in table.list_indices() for column in index.columns}


def test_finishing_brings_the_files_of_many_commits_together(make_section: Callable[..., Any]) -> None:
    section = make_section("lancedb", batch_points=10)
    sink, collection = LanceDBSink(section), make_collection()
    sink.prepare(collection)
    sink.write(collection, documents(100, 1))
    table = lancedb.connect(section.uri).open_table(collection.physical)
    assert table.stats()["fragment_stats"]["num_fragments"] == 10
    sink.finish(collection)
    table.checkout_latest()
    assert table.stats()["fragment_stats"]["num_fragments"] == 1
    assert table.count_rows() == 100


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sink = LanceDBSink(LanceDBSection(uri=str(tmp_path / "file" / "db"), collection="documents"))
    with pytest.raises(ConfigError, match=r"sinks\.lancedb cannot be used"):
        sink.prepare(make_collection())


@pytest.mark.parametrize(
    ("error", "meant"),
    [
        (RuntimeError("lance error: Retryable commit conflict for version 7: ..."), TransientError),
        (RuntimeError("lance error: Too many concurrent writers. Attempted 10 times"), TransientError),
        (RuntimeError("Generic S3 error: response status 503 Service Unavailable"), TransientError),
        (RuntimeError("Generic S3 error: ... SlowDown ..."), TransientError),
        (OSError("LanceError(IO): Generic S3 error: operation timed out"), TransientError),
        (OSError("Generic S3 error: AccessDenied"), ConfigError),
        (RuntimeError("lance error: Invalid user input: no such column"), RuntimeError),
    ],
    ids=str,
)
def test_errors_mean_what_they_say(error: Exception, meant: type[Exception], make_section: Callable[..., Any]) -> None:
    assert type(LanceDBSink(make_section("lancedb"))._meaning(error)) is meant


def test_without_its_client_the_sink_says_what_to_install(
    make_section: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    section = make_section("lancedb")
    monkeypatch.setitem(sys.modules, "lancedb", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[lancedb\]'"):
        LanceDBSink(section)
