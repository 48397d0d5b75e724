"""Requests as rows of the frozen listing, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from pipeline.runs.request_rows import TEXT_COLUMNS
from pipeline.schema import MediaItem, Request

MEDIA = pa.struct(
    [
        ("uri", pa.string()),
        ("data", pa.large_binary()),
        ("modality", pa.string()),
        ("version", pa.string()),
        ("sha256", pa.string()),
        ("page", pa.int32()),
        ("start_seconds", pa.float64()),
        ("stop_seconds", pa.float64()),
    ]
)
_PARTS = ("page", "start_seconds", "stop_seconds")
FROZEN_SCHEMA = pa.schema(
    [
        ("item_index", pa.int64()),
        ("id", pa.string()),
        ("media", pa.list_(MEDIA)),
        ("prompt", pa.string()),
        ("messages", pa.string()),
        ("tenant", pa.string()),
        ("text", pa.string()),
        ("query", pa.string()),
        ("documents", pa.list_(pa.string())),
    ]
)


def frozen_row(request: Request) -> dict[str, Any]:
    """A request as a row of `FROZEN_SCHEMA`."""
    return {
        "item_index": request.item_index,
        "id": request.id,
        "media": [{name: getattr(item, name) for name in MEDIA.names} for item in request.media],
        "prompt": request.prompt,
        "messages": None if request.messages is None else json.dumps(request.messages, sort_keys=True),
        "tenant": request.tenant,
        "text": request.text,
        "query": request.query,
        "documents": None if request.documents is None else list(request.documents),
    }


def canonical(row: Mapping[str, Any]) -> bytes:
    """What the digest covers: the same for every format and file layout a row can come in."""
    media = [
        {**item, "data": None if item["data"] is None else hashlib.sha256(item["data"]).hexdigest()}
        for item in row["media"]
    ]
    for item in media:
        for name in _PARTS:
            if item[name] is None:  # as texts: listings without them keep the digests that they had
                del item[name]
    given = {name: value for name, value in row.items() if name not in TEXT_COLUMNS or value is not None}
    return json.dumps({**given, "media": media}, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def frozen_request(row: Mapping[str, Any]) -> Request:
    """The inverse of `frozen_row`."""
    messages = row["messages"]
    return Request(
        item_index=row["item_index"],
        id=row["id"],
        media=tuple(MediaItem(**item) for item in row["media"]),
        prompt=row["prompt"],
        messages=None if messages is None else tuple(json.loads(messages)),
        tenant=row["tenant"],
        text=row.get("text"),
        query=row.get("query"),
        documents=None if row.get("documents") is None else tuple(row["documents"]),
    )
