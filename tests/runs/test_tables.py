"""A caller's rows become a manifest that freezes to the same listing as a file of the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.errors import ManifestError
from pipeline.runs.listing import read_manifest
from pipeline.runs.manifest import stage_manifest
from pipeline.runs.tables import write_manifest
from pipeline.schema import MediaItem, Request
from pipeline.storage import Folder

ROWS: list[dict[str, Any]] = [
    {"id": "a", "media": [{"uri": "/pictures/a.jpg", "version": "3"}], "prompt": "What is it?"},
    {"id": "b", "media": [{"uri": "s3://films/b.mp4"}, {"uri": "c.png"}], "tenant": "north"},
    {"id": "c", "messages": [{"role": "user", "content": "Hello"}]},
]


def listing_digest(input: str) -> str:
    """The digest of the frozen listing."""
    with stage_manifest(input, limit=None) as staged:
        return staged.digest


def test_the_listing_is_that_of_a_file_with_these_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "manifest.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)  # relative uris start at the file's folder, and at the working directory
    columns = ("id", "media", "prompt", "messages", "tenant")
    table = pa.table({name: [row.get(name) for row in ROWS] for name in columns})
    url = write_manifest([table], Folder(str(tmp_path / "output")))
    assert Path(url).parent == tmp_path / "output" / "_manifests"
    assert listing_digest(url) == listing_digest(str(file))


def test_inline_bytes_and_columns_of_one_medium(tmp_path: Path) -> None:
    table = pa.table({"id": [7], "data": [b"\x89PNG"], "modality": ["image"], "price": [9.5]})
    [request] = read_manifest(write_manifest([table], Folder(str(tmp_path))), limit=None)
    assert request == Request(item_index=0, id="7", media=(MediaItem(data=b"\x89PNG", modality="image"),))


def test_the_name_is_the_rows_whatever_tables_they_come_in(tmp_path: Path) -> None:
    output = Folder(str(tmp_path))
    rows = [{"id": str(i), "uri": f"/{i}.jpg", "prompt": None if i < 300 else "Which?"} for i in range(600)]
    whole = write_manifest([pa.Table.from_pylist(rows)], output)
    # Of a null column in one table and a string column in the next, files of one schema are not made by themselves.
    apart = write_manifest([pa.Table.from_pylist(rows[:299]), pa.Table.from_pylist(rows[299:])], output)
    turned = write_manifest([pa.Table.from_pylist(rows[::-1])], output)
    changed = write_manifest([pa.Table.from_pylist([*rows[:-1], {**rows[-1], "prompt": "What?"}])], output)
    assert whole == apart
    assert len({whole, turned, changed}) == 3
    assert [request.item_index for request in read_manifest(turned, limit=None)] == list(range(600))
    assert next(iter(read_manifest(turned, limit=None))).id == "599"


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([{"uri": ["/a.jpg"]}], "row 1, column 'id': missing"),
        ([{"id": ["a"], "image_url": ["/a.jpg"]}], "column 'image_url': unknown.*did you mean 'image'"),
        ([{"id": ["a", None], "uri": ["/a.jpg", "/b.jpg"]}], "the table: row 2, column 'id': null"),
        ([{"id": ["a"], "uri": ["/a.jpg"]}, {"id": ["b"], "uri": [3]}], "row 2, column 'uri': expected a uri"),
    ],
)
def test_a_wrong_row_is_named_and_nothing_is_written(tmp_path: Path, tables: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        write_manifest(map(pa.table, tables), Folder(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
