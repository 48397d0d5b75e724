"""What the encode pass made of each media item, as callers read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.planning.windows import Window
from pipeline.runs.manifest import read_range
from pipeline.stages.context import StageContext
from pipeline.stages.encode_finish import read_encoded
from pipeline.stages.window_plan import load_plan

FEATURES_SCHEMA = pa.schema(
    [
        ("item_index", pa.int64()),
        ("id", pa.string()),
        ("media_index", pa.int32()),
        ("status", pa.string()),
        ("code", pa.string()),
        ("message", pa.string()),
        ("modality", pa.string()),
        ("feature_key", pa.string()),
        ("shard", pa.string()),
        ("grid", pa.list_(pa.int32())),  # (t, h, w) in patches before merging
        ("feature_length", pa.int32()),
    ]
)


@dataclass(frozen=True)
class DescribeEncoded:
    """Stage: rows of finished windows (`index, start, stop`) → a row a media item, in the order of the listing.

    A failure is a row with its code (`media_index` null when the whole item is at fault); media that share an item
    with one that was not admitted have none.
    """

    context: StageContext

    def __call__(self, windows: pa.Table) -> Iterator[pa.Table]:
        """One table (`FEATURES_SCHEMA`) a window."""
        for row in windows.to_pylist():
            yield pa.Table.from_pylist(self._rows(Window(**row)), FEATURES_SCHEMA)

    def _rows(self, window: Window) -> list[dict[str, Any]]:
        plan = load_plan(self.context, window)
        assert plan is not None
        geometries = {(media.item_index, media.media_index): media.geometry for media in plan.media}
        ids = {request.item_index: request.id for request in read_range(self.context.folder, window.start, window.stop)}
        rows = []
        for encoded in read_encoded(self.context, window).to_pylist():
            geometry = geometries.get((encoded["item_index"], encoded["media_index"]))
            row = {name: encoded.get(name) for name in FEATURES_SCHEMA.names}
            row.update(id=ids[encoded["item_index"]], feature_key=encoded["key"])
            row["status"] = "quarantined" if encoded["code"] else "ok"
            if geometry is not None:
                row.update(grid=list(geometry.grid), feature_length=geometry.feature_length)
            rows.append(row)
        return sorted(rows, key=lambda row: (row["item_index"], row["media_index"] or 0))
