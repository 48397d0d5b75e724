"""Results as Parquet: one file a window, in item order, the same bytes for the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.storage import Folder

PART_SCHEMA = pa.schema(
    [
        ("item_index", pa.int64()),
        ("id", pa.string()),
        ("status", pa.string()),
        ("code", pa.string()),
        ("message", pa.string()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("generated_tokens", pa.int32()),
    ]
)
QUARANTINE_SCHEMA = pa.schema(
    [
        ("item_index", pa.int64()),
        ("id", pa.string()),
        ("media_index", pa.int32()),
        ("stage", pa.string()),
        ("code", pa.string()),
        ("message", pa.string()),
        ("attempts", pa.int32()),
    ]
)
_ROW_GROUP_ROWS = 4096


def write_part(folder: Folder, window: int, table: pa.Table, schema: pa.Schema = PART_SCHEMA) -> str:
    """Publish a window's results (`schema`) as `part-<window>.parquet`; returns that name."""
    return _write(folder, part_name(window), _conform(table, schema))


def write_timings(folder: Folder, window: int, table: pa.Table) -> str:
    """Publish a window's times, retries, hosts and costs: any columns besides `item_index`, which joins them."""
    if "item_index" not in table.column_names:
        raise ValueError(f"timings are joined by item_index, which is not among {table.column_names}")
    return _write(folder, f"timings/{part_name(window)}", table.replace_schema_metadata(None))


def write_quarantine(folder: Folder, window: int, table: pa.Table) -> str:
    """Publish a window's dead letters (`QUARANTINE_SCHEMA`); `media_index` is null when the whole item is at fault."""
    return _write(folder, f"quarantine/{part_name(window)}", _conform(table, QUARANTINE_SCHEMA))


def quarantine_row(id: str, failure: Mapping[str, Any]) -> dict[str, Any]:
    """The dead letter (`QUARANTINE_SCHEMA`) of the item `id`; `failure` has `item_index, stage, code, message`."""
    return {
        "item_index": failure["item_index"],
        "id": id,
        "media_index": failure.get("media_index"),
        "stage": failure["stage"],
        "code": failure["code"],
        "message": failure["message"],
        "attempts": 1,
    }


def part_name(window: int) -> str:
    """The file that holds a window."""
    return f"part-{window:06d}.parquet"


def restore_window(
    rows: Sequence[Mapping[str, Any]] | Sequence[pa.Table], start: int, stop: int, schema: pa.Schema = PART_SCHEMA
) -> pa.Table:
    """Items [start, stop) in order, from rows or tables (`schema`) in any order.

    Raises `RuntimeError` naming the first index that is missing, repeated or foreign: results go out once each.
    """
    tables = [row for row in rows if isinstance(row, pa.Table)]
    tables.append(_from_rows([row for row in rows if not isinstance(row, pa.Table)], schema))
    table = pa.concat_tables([_conform(each, schema) for each in tables]).sort_by("item_index")
    _assert_permutation(table["item_index"].to_numpy(), start, stop)
    return table


def _from_rows(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    known = set(schema.names)
    for row in rows:
        if not row.keys() <= known:
            raise ValueError(f"item {row.get('item_index')} has columns a part does not: {sorted(row.keys() - known)}")
    return pa.Table.from_pylist(rows, schema)


def _assert_permutation(indices: np.ndarray[Any, np.dtype[np.int64]], start: int, stop: int) -> None:
    expected = np.arange(start, stop, dtype=np.int64)
    if np.array_equal(indices, expected):
        return
    unique, counts = np.unique(indices, return_counts=True)
    problems = {
        "missing": np.setdiff1d(expected, unique),
        "there more than once": unique[counts > 1],
        "of another window": np.setdiff1d(unique, expected),
    }
    said = "; ".join(
        f"item_index {where[0]} is {what} ({where.size} such)" for what, where in problems.items() if where.size
    )
    raise RuntimeError(f"window [{start}, {stop}) has {len(indices)} rows for {stop - start} items: {said}")


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of `schema`, in its order. Raises `ValueError` for others, `ArrowInvalid` for lossy casts."""
    if set(table.column_names) != set(schema.names):
        raise ValueError(f"expected the columns {schema.names}, got {table.column_names}")
    return table.select(schema.names).cast(schema)


def _write(folder: Folder, name: str, table: pa.Table) -> str:
    # Chunk boundaries move page boundaries, and are no part of the rows.
    with folder.writing(name) as file:
        pq.write_table(
            table.combine_chunks(),
            file,
            row_group_size=_ROW_GROUP_ROWS,
            compression="zstd",
            compression_level=3,
            version="2.6",
        )
    return name
