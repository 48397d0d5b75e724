"""Points before they leave for a store: checked, and cut into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.sinks.contract import Collection, ItemKey, Kind, Vector, points_schema


def conform(collection: Collection, points: pa.Table) -> pa.Table:
    """`points` with the columns of `points_schema`, in its order and sorted by id.

    Sorted, because two writers that lock the same rows in two orders wait for each other. Raises `ValueError` for
    other columns, nulls where there may be none, an id twice, an unknown kind, and vectors of another length, that are
    not finite or, under cosine, have no direction.
    """
    schema = points_schema(collection.dimensions)
    if set(points.column_names) != set(schema.names):
        raise ValueError(f"points have the columns {schema.names}, got {points.column_names}")
    try:
        table = points.select(schema.names).cast(schema).sort_by("id").combine_chunks()
    except pa.ArrowException as error:
        raise ValueError(f"points do not have the types of {schema}: {error}") from error
    _check_columns(table)
    _check_vectors(collection, table)
    return table


def query_vector(vector: Vector, dimensions: int) -> npt.NDArray[np.float32]:
    """`vector` as the stores take it. Raises `ValueError` when it is not finite or of another length."""
    values = np.asarray(vector, dtype=np.float32)  # (D,)
    if values.shape != (dimensions,) or not np.isfinite(values).all():
        raise ValueError(f"the collection is searched by {dimensions} finite numbers, got {values.shape = }")
    return values


def vectors(table: pa.Table) -> npt.NDArray[np.float32]:
    """The vectors of conforming points, (N, D)."""
    column = table["vector"].combine_chunks()
    flat: npt.NDArray[np.float32] = column.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(table), column.type.list_size)


def batches(table: pa.Table, num_points: int) -> Iterator[pa.Table]:
    """`table` in pieces of at most `num_points` rows."""
    yield from (table.slice(start, num_points) for start in range(0, len(table), num_points))


def item_batches(
    table: pa.Table, items: Sequence[ItemKey], num_points: int
) -> Iterator[tuple[pa.Table, list[ItemKey]]]:
    """Whole items, as many as make at most `num_points` points and items (a larger one by itself), with their points.

    Raises `ValueError` for points of an item that is not listed.
    """
    rows = _rows_by_item(table, items)
    weight, start = 0, 0
    ordered = sorted(rows)
    for stop, item in enumerate(ordered):
        if weight and weight + max(1, len(rows[item])) > num_points:
            yield _of_items(table, rows, ordered[start:stop])
            weight, start = 0, stop
        weight += max(1, len(rows[item]))
    if ordered:
        yield _of_items(table, rows, ordered[start:])


def by_tenant(items: Sequence[ItemKey]) -> dict[str, list[str]]:
    """The ids of items, by tenant."""
    grouped = groupby(sorted(items), key=lambda item: item.tenant)
    return {tenant: [item.item_id for item in group] for tenant, group in grouped}


def _rows_by_item(table: pa.Table, items: Sequence[ItemKey]) -> dict[ItemKey, list[int]]:
    rows: dict[ItemKey, list[int]] = {ItemKey(*item): [] for item in items}
    for row, item in enumerate(zip(table["tenant"].to_pylist(), table["item_id"].to_pylist(), strict=True)):
        if item not in rows:
            raise ValueError(f"a point is of the item {item[1]!r} of tenant {item[0]!r}, which is not to be replaced")
        rows[ItemKey(*item)].append(row)
    return rows


def _of_items(table: pa.Table, rows: dict[ItemKey, list[int]], items: list[ItemKey]) -> tuple[pa.Table, list[ItemKey]]:
    wanted = sorted(row for item in items for row in rows[item])
    return table.take(pa.array(wanted, pa.int64())), items


def _check_columns(table: pa.Table) -> None:
    if len(pc.unique(table["id"])) != len(table):
        counts = pc.value_counts(table["id"])
        twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        raise ValueError(f"a point is there once, got {len(twice)} ids more often, such as {twice[0]}")
    strange = set(pc.unique(table["kind"]).to_pylist()) - set(get_args(Kind))
    if strange:
        raise ValueError(f"points are of the kinds {get_args(Kind)}, got {sorted(strange)}")


def _check_vectors(collection: Collection, table: pa.Table) -> None:
    values = vectors(table)
    wrong = ~np.isfinite(values).all(axis=1)
    what = "is not finite"
    if collection.metric == "cosine" and not wrong.any():
        wrong, what = ~values.any(axis=1), "is zero, which has no direction to compare by cosine"
    if wrong.any():
        where = int(np.flatnonzero(wrong)[0])
        row: dict[str, Any] = table.slice(where, 1).select(["id", "item_id"]).to_pylist()[0]
        raise ValueError(f"the vector of point {row['id']} (item {row['item_id']!r}) {what}; {int(wrong.sum())} such")
