"""What a job that embeds writes: a row an item with its vector, and of a document's page its chunks with theirs."""

from __future__ import annotations

import json
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

_DESCRIBED = "headrace.vectors"


def read_described(file: IO[bytes]) -> dict[str, Any] | None:
    """What `vector_schema` was given, of a part; None of one without vectors."""
    described = (pq.read_schema(file).metadata or {}).get(_DESCRIBED.encode())
    return None if described is None else dict(json.loads(described))


def vector_schema(described: dict[str, Any]) -> pa.Schema:
    """The columns of a part. `described` (spaces, their contracts) travels as the file's metadata `headrace.vectors`.

    `vector` is of the media's space where an item is media, else of the texts'; a page's chunks are of the texts'.
    """
    # Not of fixed size: pyarrow before 26 cannot read back a Parquet file in which such a list is null.
    vector = pa.list_(pa.float32())
    chunk = pa.struct([("part", pa.int32()), ("start_char", pa.int32()), ("end_char", pa.int32()), ("vector", vector)])
    return pa.schema(
        [
            ("item_index", pa.int64()),
            ("id", pa.string()),
            ("status", pa.string()),
            ("code", pa.string()),
            ("message", pa.string()),
            ("modality", pa.string()),  # image, video, page or text
            ("uri", pa.string()),
            ("page", pa.int32()),  # 0-based
            ("tenant", pa.string()),
            ("source_id", pa.string()),
            ("text", pa.string()),
            ("vector", vector),
            ("chunks", pa.list_(chunk)),
        ],
        metadata={_DESCRIBED: json.dumps(described, sort_keys=True)},
    )
