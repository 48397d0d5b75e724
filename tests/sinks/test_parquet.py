"""Same rows, same bytes; every item once, in order."""

import random
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.sinks.parquet import (
    PART_SCHEMA,
    QUARANTINE_SCHEMA,
    restore_window,
    write_part,
    write_quarantine,
    write_timings,
)
from pipeline.storage import Folder


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def rows(start: int, stop: int) -> list[dict[str, object]]:
    return [
        {
            "item_index": n,
            "id": f"i{n}",
            "status": "ok",
            "text": f"text {n % 7}",
            "prompt_tokens": n,
            "generated_tokens": 2,
        }
        for n in range(start, stop)
    ]


def read(folder: Folder, name: str) -> pa.Table:
    with folder.open(name) as file:
        return pq.read_table(file)


def test_rows_in_any_order_are_restored() -> None:
    shuffled = rows(100, 200)
    random.Random(3).shuffle(shuffled)
    table = restore_window(shuffled, 100, 200)
    assert table.schema == PART_SCHEMA
    assert table["item_index"].to_pylist() == list(range(100, 200))
    assert table["id"].to_pylist() == [f"i{n}" for n in range(100, 200)]
    pieces = [pa.Table.from_pylist(shuffled[n : n + 30], PART_SCHEMA) for n in range(0, 100, 30)]
    assert restore_window(pieces, 100, 200) == table
    assert restore_window([], 5, 5).num_rows == 0


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([10, 12, 14], r"window \[10, 15\) has 3 rows for 5 items: item_index 11 is missing \(2 such\)"),
        (
            [10, 11, 12, 13, 13],
            r"item_index 14 is missing \(1 such\); item_index 13 is there more than once \(1 such\)",
        ),
        ([10, 11, 12, 13, 14, 12, 11], r"7 rows for 5 items: item_index 11 is there more than once \(2 such\)"),
        ([10, 11, 12, 13, 15], r"item_index 14 is missing .*item_index 15 is of another window"),
        ([9, 10, 11, 12, 13, 14], r"item_index 9 is of another window"),
        ([], r"item_index 10 is missing \(5 such\)"),
    ],
)
def test_lost_repeated_and_foreign_items_raise(indices: list[int], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        restore_window([rows(n, n + 1)[0] for n in indices], 10, 15)


def test_rows_with_unknown_columns_raise() -> None:
    with pytest.raises(ValueError, match=r"item 0 has columns a part does not: \['txt'\]"):
        restore_window([{"item_index": 0, "id": "a", "status": "ok", "txt": "x"}], 0, 1)
    with pytest.raises(ValueError, match="expected the columns"):
        restore_window([pa.table({"item_index": [0]})], 0, 1)


def test_the_same_rows_are_the_same_bytes(folder: Folder) -> None:
    # Long texts, so that a column fills several pages: a chunk boundary would move where they end.
    table = restore_window([row | {"text": f"{row['id']} " * 100} for row in rows(0, 10_000)], 0, 10_000)
    name = write_part(folder, 0, table)
    assert name == "part-000000.parquet"
    original = folder.read_bytes(name)
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1, 4999), table.slice(5000)])
    wide = table.set_column(1, "id", table["id"].cast(pa.large_string()))
    coded = table.set_column(2, "status", table["status"].dictionary_encode())
    for other in (
        chunked,
        wide,
        coded,
        table.replace_schema_metadata({"when": "now"}),
        table.select(table.column_names[::-1]),
    ):
        assert folder.read_bytes(write_part(folder, 1, other)) == original
    assert read(folder, name) == table


def test_a_part_holds_its_schema_only(folder: Folder) -> None:
    table = restore_window(rows(0, 3), 0, 3)
    with pytest.raises(ValueError, match=r"expected the columns .* got .*'extra'"):
        write_part(folder, 0, table.append_column("extra", [[1, 2, 3]]))
    big = table.set_column(7, "prompt_tokens", pa.array([1, 2, 2**40]))
    with pytest.raises(pa.ArrowInvalid, match="1099511627776"):
        write_part(folder, 0, big)
    assert folder.list() == []


def test_timings_and_quarantine_lie_beside_the_parts(folder: Folder) -> None:
    timings = pa.table({"item_index": [1, 2], "decode_seconds": [0.5, 0.25], "host": ["a", "b"]})
    letters = pa.Table.from_pylist(
        [{"item_index": 1, "id": "a", "stage": "probe", "code": "c", "message": "m", "attempts": 1}], QUARANTINE_SCHEMA
    )
    assert write_timings(folder, 12, timings) == "timings/part-000012.parquet"
    assert write_quarantine(folder, 12, letters) == "quarantine/part-000012.parquet"
    assert read(folder, "timings/part-000012.parquet") == timings
    assert read(folder, "quarantine/part-000012.parquet").to_pylist() == [
        {"item_index": 1, "id": "a", "media_index": None, "stage": "probe", "code": "c", "message": "m", "attempts": 1}
    ]
    with pytest.raises(ValueError, match=r"joined by item_index, which is not among \['host'\]"):
        write_timings(folder, 0, pa.table({"host": ["a"]}))
