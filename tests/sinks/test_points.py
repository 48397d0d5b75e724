"""Points are checked before they leave, have ids that stay, and are cut into batches of whole items."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sample_points import documents, keys, make_collection, make_points, make_row

from pipeline.errors import TransientError
from pipeline.sinks.contract import (
    Between,
    Collection,
    Filter,
    ItemKey,
    Metric,
    OneOf,
    Selector,
    is_version_of,
    point_id,
    points_schema,
)
from pipeline.sinks.points import batches, by_tenant, conform, item_batches, vectors
from pipeline.sinks.versions import delete_everywhere


def test_a_point_id_is_the_name_based_uuid_of_its_terms() -> None:
    namespace = uuid.UUID("5b0e1c52-6f5e-4a0b-9d51-3c1f6f0f8a27")
    named = hashlib.sha1(namespace.bytes + b'["acme", "d\\u00f6c", "chunk", 3]').digest()[:16]
    assert point_id("acme", "döc", "chunk", 3) == str(uuid.UUID(bytes=named, version=5))


def test_point_ids_of_different_terms_differ() -> None:
    terms: list[Any] = [("", "a", "text", 1), ("a", "", "text", 1), ("", "a", "chunk", 1), ("", "a", "text", 11)]
    terms += [("", 'a", "text', "text", 1), ("", "a1", "text", 1), ('","', "a", "text", 1)]
    assert len({point_id(*each) for each in terms}) == len(terms)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Documents"},
        {"name": ""},
        {"name": "1st"},
        {"name": "a__b"},
        {"name": "a_"},
        {"name": "a" * 42},
        {"name": 'a"; DROP'},
        {"name": "a\n"},
        {"dimensions": 0},
        {"metric": "euclid"},
        {"version": "0123456"},
        {"version": "version-one"},
    ],
)
def test_a_collection_that_no_store_could_hold_is_refused(changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {"name": "a", "dimensions": 3, "metric": "dot", "version": "0" * 8, **changes}
    with pytest.raises(ValueError, match=r"expected|named|digest"):
        Collection(**values)


def test_versions_of_a_name_are_told_from_other_tables() -> None:
    collection = make_collection()
    assert collection.physical == "documents__01234567"
    assert is_version_of(collection.physical, "documents")
    for other in (
        "documents",
        "documents__0123456",
        "documents__012345678",
        "my_documents__01234567",
        "documents__0123456x",
    ):
        assert not is_version_of(other, "documents")


def test_points_of_other_layouts_are_brought_to_the_schema() -> None:
    points = documents(3)
    loose = points.select(points.column_names[::-1]).cast(
        pa.schema(
            [pa.field(f.name, pa.list_(pa.float64()) if f.name == "vector" else f.type) for f in points.schema][::-1]
        )
    )
    table = conform(make_collection(), loose)
    assert table.schema == points_schema(8)
    assert table["id"].to_pylist() == sorted(points["id"].to_pylist())
    by_id = dict(zip(points["id"].to_pylist(), points["vector"].to_pylist(), strict=True))
    assert vectors(table).tolist() == [by_id[id_] for id_ in table["id"].to_pylist()]
    assert np.array_equal(vectors(table.slice(2, 3)), vectors(table)[2:5])


@pytest.mark.parametrize(
    ("changes", "metric", "said"),
    [
        ({"item_id": None}, "l2", "item_id"),
        ({"vector": None}, "l2", "vector"),
        ({"kind": "audio"}, "l2", r"got \['audio'\]"),
        ({"vector": [1.0] * 7 + [float("nan")]}, "l2", r"\(item 'odd'\) is not finite; 1 such"),
        ({"vector": [1.0] * 7 + [float("inf")]}, "l2", r"\(item 'odd'\) is not finite; 1 such"),
        ({"vector": [0.0] * 8}, "cosine", r"\(item 'odd'\) is zero"),
        ({"id": point_id("", "doc 0", "chunk", 0)}, "l2", "got 1 ids more often"),
    ],
)
def test_points_that_are_none_are_named(changes: dict[str, Any], metric: Metric, said: str) -> None:
    columns = points_schema(8)
    nullable = pa.schema([field.with_nullable(True) for field in columns])
    rows = [*documents(2).to_pylist(), make_row("odd", **changes)]
    with pytest.raises(ValueError, match=said):
        conform(make_collection(metric), pa.Table.from_pylist(rows, nullable))


def test_other_columns_and_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="points have the columns"):
        conform(make_collection(), documents(1).drop_columns(["text"]))
    with pytest.raises(ValueError, match="points do not have the types"):
        conform(make_collection(), documents(1, dimensions=4))


def test_a_zero_vector_has_a_dot_product() -> None:
    assert len(conform(make_collection("dot"), make_points([make_row("zero", vector=[0.0] * 8)]))) == 1


def test_batches_have_every_row_once() -> None:
    points = documents(5, parts=2)
    assert [len(batch) for batch in batches(points, 4)] == [4, 4, 2]
    assert pa.concat_tables(batches(points, 4)) == points
    assert list(batches(points.slice(0, 0), 4)) == []


@pytest.mark.parametrize(
    ("parts", "at_most", "expected"),
    [
        ([2, 2, 2], 4, [["a", "b"], ["c"]]),
        ([2, 3, 1], 4, [["a"], ["b", "c"]]),
        ([9, 1, 1], 4, [["a"], ["b", "c"]]),
        ([1, 9, 1], 4, [["a"], ["b"], ["c"]]),
        ([0, 0, 0], 2, [["a", "b"], ["c"]]),
        ([0, 2, 0], 9, [["a", "b", "c"]]),
    ],
)
def test_batches_of_items_are_whole(parts: list[int], at_most: int, expected: list[list[str]]) -> None:
    names = ["a", "b", "c"]
    rows = [make_row(name, part) for name, num in zip(names, parts, strict=True) for part in range(num)]
    found = list(item_batches(make_points(rows), [ItemKey("", name) for name in names], at_most))
    assert [[item.item_id for item in items] for _, items in found] == expected
    for table, items in found:
        assert set(table["item_id"].to_pylist()) <= {item.item_id for item in items}
    ids = [id_ for table, _ in found for id_ in table["id"].to_pylist()]
    assert sorted(ids) == sorted(row["id"] for row in rows)


def test_items_are_grouped_by_tenant() -> None:
    points = pa.concat_tables([documents(2, tenant="b"), documents(1), documents(1, tenant="a")])
    assert by_tenant(keys(points)) == {"": ["doc 0"], "a": ["doc 0"], "b": ["doc 0", "doc 1"]}


def test_a_filter_lists_its_conditions() -> None:
    where = Filter(kinds=("chunk",), uris=("u", "v"), pages=(2, 3))
    assert list(where.conditions()) == [
        OneOf(column="kind", values=("chunk",)),
        OneOf(column="uri", values=("u", "v")),
        Between(column="page", first=2, last=3),
    ]
    with pytest.raises(ValueError, match="lists no value for item_id"):
        Filter(item_ids=())


def test_a_selector_says_one_thing() -> None:
    with pytest.raises(ValueError, match="not both"):
        Selector(tenant="", item_ids=("a",), all_but=frozenset({"b"}))


class Forgetful:
    """A store whose deletion leaves something, as when a run writes on."""

    def versions(self) -> list[str]:
        return ["documents__01234567"]

    def item_ids(self, physical: str, tenant: str) -> list[str]:
        return ["there"]

    def count_items(self, physical: str, tenant: str, item_ids: Any) -> int:
        return 2

    def delete_items(self, physical: str, tenant: str, item_ids: Any) -> None:
        pass


@pytest.mark.parametrize("selector", [Selector(tenant="a"), Selector(tenant="a", all_but=frozenset())])
def test_a_deletion_that_left_something_has_no_receipt(selector: Selector) -> None:
    with pytest.raises(TransientError, match="2 points that were deleted from documents__01234567 are there"):
        delete_everywhere(Forgetful(), selector)
