"""What every vector store has to do, asked of LanceDB, PostgreSQL and Qdrant alike."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, get_args

import pyarrow as pa
import pytest
from sample_points import (
    DIMENSIONS,
    OTHER_VERSION,
    VERSION,
    documents,
    keys,
    make_collection,
    make_points,
    make_row,
    nearest,
    vector,
)

from pipeline.errors import ConfigError
from pipeline.sinks.contract import HIT_COLUMNS, Filter, Hit, ItemKey, Metric, Selector, Sink
from pipeline.sinks.registry import open_sink


def filled(sink: Sink, points: pa.Table, metric: Metric = "cosine") -> Any:
    """The collection with these points, serving."""
    collection = make_collection(metric)
    sink.prepare(collection)
    sink.write(collection, points)
    sink.finish(collection)
    sink.switch(collection)
    return collection


def stored(sink: Sink, tenant: str = "") -> list[Hit]:
    return sink.search("documents", vector(1), 1_000, tenant=tenant)


@pytest.mark.parametrize("metric", get_args(Metric))
def test_a_search_answers_as_numpy_does(sink: Sink, metric: Metric) -> None:
    points = documents(30)
    filled(sink, points, metric)
    for seed in range(5):
        query = vector(seed)
        expected = nearest(points, query, metric, 10)
        hits = sink.search("documents", query, 10, tenant="")
        assert [hit.id for hit in hits] == [id_ for id_, _ in expected]
        assert [hit.score for hit in hits] == pytest.approx([score for _, score in expected], abs=2e-6, rel=2e-6)


def test_a_hit_has_all_that_was_written(sink: Sink) -> None:
    full = make_row('it\'s "quoted"', 3)
    bare = make_row("bare", kind="text", uri=None, page=None, start_char=None, end_char=None, text=None)
    filled(sink, make_points([full, bare]))
    found = {hit.item_id: hit for hit in stored(sink)}
    for row in (full, bare):
        assert {name: getattr(found[row["item_id"]], name) for name in HIT_COLUMNS} == {
            name: row[name] for name in HIT_COLUMNS
        }


@pytest.mark.parametrize(
    "where",
    [
        Filter(kinds=("image", "video")),
        Filter(item_ids=("doc 3", "doc 4", "it's")),
        Filter(source_ids=("etag-doc 5",)),
        Filter(uris=("file:///doc 6.pdf",)),
        Filter(pages=(2, 3)),
        Filter(item_ids=("doc 3", "doc 4"), pages=(4, 4)),
        Filter(kinds=("page",)),
    ],
    ids=str,
)
def test_a_filter_is_the_stores_own(sink: Sink, where: Filter) -> None:
    """The three nearest of those that match, though all others are nearer."""
    rows = [make_row(f"doc {n}", part) for n in range(20) for part in range(4)]
    rows += [make_row("a picture", kind="image"), make_row("a clip", kind="video"), make_row("it's")]
    query = vector(3)
    matching = [row for row in rows if matches(row, where)]
    for row in matching:
        row["vector"] = (vector(len(row["item_id"]) + row["page"]) * 0.1 - query).astype("float32")
    assert len(matching) != len(rows)
    filled(sink, make_points(rows))
    hits = sink.search("documents", query, 3, tenant="", where=where)
    expected = nearest(make_points(matching), query, "cosine", 3) if matching else []
    assert [hit.score for hit in hits] == pytest.approx([score for _, score in expected], abs=2e-6)
    assert {hit.id for hit in hits} <= {row["id"] for row in matching}


def matches(row: dict[str, Any], where: Filter) -> bool:
    lists = {"kind": where.kinds, "item_id": where.item_ids, "source_id": where.source_ids, "uri": where.uris}
    inside = where.pages is None or where.pages[0] <= row["page"] <= where.pages[1]
    return inside and all(values is None or row[name] in values for name, values in lists.items())


def test_tenants_do_not_see_each_other(sink: Sink) -> None:
    parts = [documents(5), documents(4, tenant="o'brien"), documents(3, tenant="b")]
    collection = filled(sink, pa.concat_tables(parts))
    assert sink.count(collection) == 24
    for points, tenant in zip(parts, ("", "o'brien", "b"), strict=True):
        assert sink.count(collection, tenant) == len(points)
        assert {hit.id for hit in stored(sink, tenant)} == set(points["id"].to_pylist())
    assert stored(sink, "c") == []


def test_what_is_written_twice_is_there_once(sink: Sink) -> None:
    collection = filled(sink, documents(10))
    assert sink.write(collection, documents(12)).num_points == 24
    assert sink.count(collection) == 24
    changed = make_row("doc 3", 1, text="anew", page=None, seed=77)
    sink.write(collection, make_points([changed]))
    assert sink.count(collection) == 24
    [best, *_] = sink.search("documents", vector(77), 1, tenant="")
    assert (best.item_id, best.text, best.page) == ("doc 3", "anew", None)
    assert best.score == pytest.approx(1, abs=1e-6)


def test_nothing_to_write_is_written(sink: Sink) -> None:
    collection = filled(sink, documents(0))
    assert sink.write(collection, documents(0)).num_points == 0
    assert sink.replace_items(collection, documents(0), []).num_points == 0
    assert stored(sink) == []


def test_an_item_that_has_fewer_chunks_keeps_none_of_the_others(sink: Sink) -> None:
    collection = filled(sink, pa.concat_tables([documents(6, parts=5), documents(2, parts=5, tenant="b")]))
    shorter = pa.concat_tables([documents(2, parts=3), documents(1, parts=9, first=2), documents(1, 1, tenant="b")])
    gone = [ItemKey("", "doc 3"), ItemKey("", "never there"), ItemKey("it's", "doc 0")]
    assert sink.replace_items(collection, shorter, [*keys(shorter), *gone]).num_points == 16
    expected = pa.concat_tables([shorter, documents(2, parts=5, first=4), documents(1, 5, tenant="b", first=1)])
    found = {hit.id for tenant in ("", "b") for hit in stored(sink, tenant)}
    assert found == set(expected["id"].to_pylist())
    assert sink.count(collection) == len(expected)


def test_points_of_an_item_that_is_not_replaced_are_refused(sink: Sink) -> None:
    collection = filled(sink, documents(2))
    with pytest.raises(ValueError, match=r"of the item 'doc 1' of tenant '', which is not to be replaced"):
        sink.replace_items(collection, documents(2, parts=1), [ItemKey("", "doc 0")])
    assert sink.count(collection) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dimensions": 16}, "dimensions is 8, expected 16"),
        ({"metric": "dot"}, "metric is 'cosine', expected 'dot'"),
    ],
)
def test_a_table_made_for_something_else_is_refused(sink: Sink, changes: dict[str, Any], said: str) -> None:
    sink.prepare(make_collection())
    sink.prepare(make_collection())
    with pytest.raises(ConfigError) as caught:
        sink.prepare(make_collection(**changes))
    assert said in str(caught.value)
    assert "documents__01234567" in str(caught.value)


def test_a_collection_that_deletions_would_not_reach_is_refused(sink: Sink) -> None:
    other = dataclasses.replace(make_collection(), name="other")
    with pytest.raises(ValueError, match="this sink holds the collection 'documents', got 'other'"):
        sink.prepare(other)


@pytest.mark.parametrize("store", ["lancedb", "pgvector"])
def test_digests_that_begin_alike_are_told_apart(sink: Sink) -> None:
    sink.prepare(make_collection())
    with pytest.raises(ConfigError, match="version is '0123456789abcdef"):
        sink.prepare(make_collection(version=VERSION[:8] + "0" * 56))


def test_a_name_means_what_it_was_switched_to(sink: Sink) -> None:
    with pytest.raises(ConfigError, match="no run has finished the collection 'documents'"):
        stored(sink)
    old = filled(sink, documents(3))
    new = make_collection("l2", OTHER_VERSION, dimensions=4)
    sink.prepare(new)
    with pytest.raises(ConfigError, match="no run has finished the collection 'other'"):
        sink.search("other", vector(1), 5, tenant="")
    sink.write(new, documents(5, parts=1, dimensions=4))
    assert len(stored(sink)) == 6
    sink.finish(new)
    for _ in range(2):
        sink.switch(new)
        hits = sink.search("documents", vector(2, 4), 10, tenant="")
        expected = nearest(documents(5, parts=1, dimensions=4), vector(2, 4), "l2", 10)
        assert [hit.id for hit in hits] == [id_ for id_, _ in expected]
    assert (sink.count(old), sink.count(new)) == (6, 5)
    sink.switch(old)
    assert len(stored(sink)) == 6


def test_a_query_of_another_length_is_refused(sink: Sink) -> None:
    filled(sink, documents(1))
    for query in (vector(1, 4), [float("nan")] * DIMENSIONS):
        with pytest.raises(ValueError, match="the collection is searched by 8 finite numbers"):
            sink.search("documents", query, 1, tenant="")


def two_versions(sink: Sink) -> tuple[Any, Any]:
    """Two versions with the same items of two tenants, two and three points each."""
    both = make_collection(), make_collection(version=OTHER_VERSION)
    for parts, collection in zip((2, 3), both, strict=True):
        sink.prepare(collection)
        sink.write(collection, pa.concat_tables([documents(5, parts), documents(5, parts, tenant="b")]))
    sink.switch(both[0])
    return both


@pytest.mark.parametrize(
    ("selector", "gone"),
    [
        (Selector(tenant="b"), 5),
        (Selector(tenant="b", item_ids=("doc 1", "doc 3", "never there")), 2),
        (Selector(tenant="b", item_ids=()), 0),
        (Selector(tenant="b", all_but=frozenset({"doc 0", "doc 1", "doc 9"})), 3),
        (Selector(tenant="b", all_but=frozenset()), 5),
        (Selector(tenant="o'brien"), 0),
    ],
    ids=["tenant", "some", "none", "all but some", "all", "another tenant"],  # a set's own has another order each time
)
def test_a_deletion_reaches_every_version(sink: Sink, selector: Selector, gone: int) -> None:
    old, new = two_versions(sink)
    receipt = sink.delete(selector)
    assert receipt.num_deleted == {old.physical: 2 * gone, new.physical: 3 * gone}
    for parts, collection in ((2, old), (3, new)):
        assert sink.count(collection, "b") == parts * (5 - gone)
        assert sink.count(collection, "") == parts * 5
    assert len(stored(sink, "b")) == 2 * (5 - gone)
    assert sink.delete(selector).num_deleted == {old.physical: 0, new.physical: 0}


def test_other_collections_of_a_store_keep_their_points(store: str, make_section: Callable[..., Any]) -> None:
    section = make_section(store)
    sink = open_sink(section)
    other = make_collection()
    filled(sink, documents(2))
    neighbour = open_sink(section.model_copy(update={"collection": "doc"}))
    assert neighbour.delete(Selector(tenant="")).num_deleted == {}
    assert sink.count(other) == 4


def test_a_sink_goes_through_pickle(sink: Sink) -> None:
    collection = filled(sink, documents(1))
    copy: Sink = pickle.loads(pickle.dumps(sink))
    copy.write(collection, documents(3))
    assert sink.count(collection) == copy.count(collection) == 6
