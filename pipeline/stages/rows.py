"""The rows of the encode pass: a planned media item, the batch that holds it, and what became of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.planning.buckets import ShapedMedia
from pipeline.runs.frozen_rows import MEDIA
from pipeline.runs.receipts import receipt_to_json
from pipeline.schema import Geometry, ItemFailure, MediaItem, Probe, Receipt, SamplePlan, fields_of

_PROBE = pa.struct(
    [
        ("modality", pa.string()),
        ("container", pa.string()),
        ("codec", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("num_bytes", pa.int64()),
        ("duration_seconds", pa.float64()),
        ("rate_fps", pa.float64()),
        ("num_frames", pa.int64()),
        ("sample_rate_hz", pa.int32()),
        ("num_channels", pa.int32()),
        ("coded_frames", pa.int64()),
        ("coded_bytes", pa.int64()),
        ("keyframes", pa.int64()),
        ("keyframe_bytes", pa.int64()),
        ("keyframe_spacing", pa.int64()),
        ("group_frames", pa.float64()),
        ("reorder_depth", pa.int32()),
    ]
)
_GEOMETRY = pa.struct(
    [
        ("grid", pa.list_(pa.int32())),
        ("merge_size", pa.int32()),
        ("feature_length", pa.int32()),
        ("original_size", pa.list_(pa.int32())),
        ("resized_size", pa.list_(pa.int32())),
        ("timestamps", pa.list_(pa.float64())),
        ("duration_seconds", pa.float64()),
        ("cropped_size", pa.list_(pa.int32())),
    ]
)
_PLANNED = [
    ("position", pa.int32()),
    ("item_index", pa.int64()),
    ("media_index", pa.int32()),
    ("tenant", pa.string()),
    ("media", MEDIA),
    ("source_id", pa.string()),
    ("content", pa.string()),
    ("probe", _PROBE),
    ("requested", pa.list_(pa.float64())),
    ("geometry", _GEOMETRY),
    ("decode_seconds", pa.float64()),
    ("frames_shard", pa.string()),
]
_DECODED = [
    ("shown", pa.list_(pa.float64())),
    ("shard", pa.string()),
    ("failure", pa.struct([("stage", pa.string()), ("code", pa.string()), ("message", pa.string())])),
    ("fetch_ms", pa.float64()),
    ("decode_ms", pa.float64()),
    ("bytes_fetched", pa.int64()),
    ("cpu_seconds", pa.float64()),
    ("saved_ms", pa.float64()),
]
# One schema before and after decode: a receipt row has no items, an undecoded batch no pixels.
BATCH_SCHEMA = pa.schema(
    [
        ("window", pa.int32()),
        ("batch", pa.int32()),
        ("digest", pa.string()),
        ("receipt", pa.string()),
        ("items", pa.list_(pa.struct([*_PLANNED, *_DECODED]))),
        ("pixels", pa.large_binary()),  # uint8, (T, H, W, 3) of each item without failure or shard, in order
        ("fetches", pa.int64()),
        ("bytes_fetched", pa.int64()),
        ("fetch_retries", pa.int64()),
        ("decode_started_at", pa.float64()),  # seconds since the epoch
        ("decoded_at", pa.float64()),
        ("frames_bytes_read", pa.int64()),  # of frames that the store kept, as they are there
        ("frames_fallbacks", pa.int64()),  # items whose frames it was said to keep, and that were decoded
        ("sandbox", pa.string()),  # what kept the decoder in; null when nothing was decoded
    ]
)
RECEIPT_SCHEMA = pa.schema([("receipt", pa.string())])


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMedia:
    """One media item that is to be decoded and encoded. `position` numbers the media of a window.

    `content` is None until the bytes have been hashed. `media.data` holds small objects that the probe read whole.
    `decode_seconds` is the estimate of `pipeline.planning.decode_cost`; 0 in plans that were written without one.
    `frames_shard` is the shard that keeps its frames: of a planned item what the store said, of a decoded one where its
    frames were taken from.
    """

    position: int
    item_index: int
    media_index: int
    tenant: str
    media: MediaItem
    source_id: str
    content: str | None
    probe: Probe
    requested: SamplePlan
    geometry: Geometry
    decode_seconds: float = 0.0
    frames_shard: str | None = None

    @property
    def frames_shape(self) -> tuple[int, int, int, int]:
        """(T, H, W, 3) of what decode makes of it."""
        return (len(self.requested), *self.geometry.shown_size, 3)

    @property
    def shaped(self) -> ShapedMedia:
        """The planner's view."""
        return ShapedMedia(
            position=self.position,
            modality=self.probe.modality,
            num_frames=len(self.requested),
            geometry=self.geometry,
            identity=self.source_id,
        )

    def to_row(self) -> dict[str, Any]:
        """Plain values, as `BATCH_SCHEMA` and JSON take them."""
        row = fields_of(self)
        row.update(media=fields_of(self.media), probe=fields_of(self.probe), geometry=fields_of(self.geometry))
        row["requested"] = list(self.requested.pts_seconds)
        return row

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> PlannedMedia:
        """The inverse of `to_row`; other keys are ignored."""
        geometry: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row["geometry"].items()}
        return cls(
            position=row["position"],
            item_index=row["item_index"],
            media_index=row["media_index"],
            tenant=row["tenant"],
            media=MediaItem(**row["media"]),
            source_id=row["source_id"],
            content=row["content"],
            probe=Probe(**row["probe"]),
            requested=SamplePlan(pts_seconds=tuple(row["requested"])),
            geometry=Geometry(**geometry),
            decode_seconds=row.get("decode_seconds", 0.0),
            frames_shard=row.get("frames_shard"),  # plans that an earlier version wrote have none
        )


def flat_frames(items: Sequence[PlannedMedia], buffer: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    """Where the frames of each item lie in a batch's flat `buffer`: uint8 (T, H, W, 3), views, one after another."""
    start = 0
    for item in items:
        stop = start + math.prod(item.frames_shape)
        yield buffer[start:stop].reshape(item.frames_shape)
        start = stop


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedMedia:
    """What decode made of a planned item: times shown, or the shard that has its features already, or a failure.

    `cpu_seconds` are its share of its batch's. `saved_ms` is what making its frames, or its features, took once, less
    what finding them took now.
    """

    planned: PlannedMedia
    shown: tuple[float, ...] = ()
    shard: str | None = None
    failure: ItemFailure | None = None
    fetch_ms: float = 0.0
    decode_ms: float = 0.0
    bytes_fetched: int = 0
    cpu_seconds: float = 0.0
    saved_ms: float = 0.0

    @property
    def has_pixels(self) -> bool:
        """True when the batch's pixels hold this item."""
        return self.failure is None and self.shard is None

    @property
    def was_decoded(self) -> bool:
        """True when it has pixels that were not taken from the store."""
        return self.has_pixels and self.planned.frames_shard is None

    def to_row(self) -> dict[str, Any]:
        """Plain values, as `BATCH_SCHEMA` takes them; the bytes of the object are left behind."""
        row = self.planned.to_row()
        row["media"]["data"] = None
        return {
            **row,
            "shown": list(self.shown),
            "shard": self.shard,
            "failure": dataclasses.asdict(self.failure) if self.failure else None,
            "fetch_ms": self.fetch_ms,
            "decode_ms": self.decode_ms,
            "bytes_fetched": self.bytes_fetched,
            "cpu_seconds": self.cpu_seconds,
            "saved_ms": self.saved_ms,
        }


def batch_table(rows: list[dict[str, Any]], pixels: npt.NDArray[np.uint8] | None = None) -> pa.Table:
    """Rows as a table; `pixels` (flat) become the single row's buffer without a copy."""
    table = pa.Table.from_pylist(rows, BATCH_SCHEMA)
    if pixels is None:
        return table
    # from_buffers: building this column from Python bytes cost six times the resident memory (FACTS: 6 GB against 1).
    offsets = np.array([0, pixels.nbytes], dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(pixels)]
    column = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, buffers)
    return table.set_column(BATCH_SCHEMA.get_field_index("pixels"), BATCH_SCHEMA.field("pixels"), column)


def receipts_apart(blocks: pa.Table) -> tuple[pa.Table, pa.Table]:
    """(receipts as `RECEIPT_SCHEMA`, batches that are still to be done), each in order."""
    known = pc.is_valid(blocks["receipt"])
    return blocks.filter(known).select(RECEIPT_SCHEMA.names), blocks.filter(pc.invert(known))


def receipt_table(receipt: Receipt) -> pa.Table:
    """One receipt as `RECEIPT_SCHEMA`."""
    return pa.table({"receipt": [receipt_to_json(receipt)]}, RECEIPT_SCHEMA)


def receipt_row(receipt: Receipt, text: str) -> dict[str, Any]:
    """A row that passes the later stages untouched."""
    return {"window": receipt.window, "batch": receipt.batch, "digest": receipt.digest, "receipt": text, "items": []}
