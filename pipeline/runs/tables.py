"""A caller's own rows as a manifest: checked as those of a file are, and put into one Parquet file."""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.runs.frozen_rows import FROZEN_SCHEMA, canonical, frozen_row
from pipeline.runs.request_rows import COLUMNS, Place, check_columns, request_from_row
from pipeline.storage import Folder

_FOLDER = "_manifests"  # no run has such a name
_ROWS = 256  # at a time: rows with inline bytes are megabytes each


def write_manifest(tables: Iterable[pa.Table], output: Folder, texts: Sequence[str] = ()) -> str:
    """Write the rows of `tables`, streamed, to `_manifests/<digest>.parquet` under `output`; returns its URL.

    Columns are those of a manifest, with `texts` as `read_manifest` has them; relative URIs start at the working
    directory. Equal rows in the same order have the same name, so that a run finds its manifest again. Raises
    `ManifestError` naming row and column.
    """
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(prefix="headrace-manifest-") as file:
        with pq.ParquetWriter(file, FROZEN_SCHEMA, compression="zstd") as writer:
            for rows in _checked(tables, texts):
                for row in rows:
                    digest.update(canonical(row))
                writer.write_table(pa.Table.from_pylist(rows, FROZEN_SCHEMA))
        name = f"{_FOLDER}/{digest.hexdigest()[:16]}.parquet"
        if not output.exists(name):
            file.seek(0)
            with output.writing(name) as target:
                shutil.copyfileobj(file, target)
    return posixpath.join(output.url, name)


def _checked(tables: Iterable[pa.Table], texts: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Rows of `FROZEN_SCHEMA`, some at a time."""
    start = 0
    for table in tables:
        check_columns(tuple(table.column_names), _place(start))
        known = table.select([name for name in table.column_names if name in COLUMNS])
        for batch in known.to_batches(max_chunksize=_ROWS):
            requests = (request_from_row(row, i, _place(i), texts) for i, row in enumerate(batch.to_pylist(), start))
            yield [frozen_row(request) for request in requests]
            start += batch.num_rows


def _place(item_index: int) -> Place:
    return Place(file="the table", row=item_index + 1, base=os.getcwd())
