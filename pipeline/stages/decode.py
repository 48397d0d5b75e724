"""Planned batches → the same batches with resized `uint8` frames."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.errors import ItemError
from pipeline.media.decode import decode_media
from pipeline.media.resize import crop_frames
from pipeline.media.sandbox import OFF
from pipeline.media.shared_source import SharedSources
from pipeline.media.source import FetchCounter
from pipeline.schema import Frames, ItemFailure
from pipeline.stages.context import StageContext
from pipeline.stages.identity import check_content, media_content, sha256_content
from pipeline.stages.rows import DecodedMedia, PlannedMedia, batch_table


@dataclass(frozen=True)
class DecodeBatches:
    """Stage: rows of `BATCH_SCHEMA` without pixels → with pixels, one row at a time; receipt rows pass."""

    context: StageContext

    def __call__(self, batches: pa.Table) -> Iterator[pa.Table]:
        """One table of one row for each row; a row's items keep their order, failed ones stay with their reason."""
        for index in range(batches.num_rows):
            row = batches.slice(index, 1)
            yield row if row["receipt"][0].is_valid else self._decode(row)

    def _decode(self, row: pa.Table) -> pa.Table:
        [batch] = row.drop_columns("pixels").to_pylist()
        planned = [PlannedMedia.from_row(item) for item in batch["items"]]
        counter, sources = FetchCounter(), SharedSources()
        height, width = planned[0].geometry.shown_size
        shape = (len(planned), len(planned[0].requested), height, width, 3)
        pixels: npt.NDArray[np.uint8] = np.empty(shape, np.uint8)
        decoded: list[DecodedMedia] = []
        filled = 0
        for item in planned:
            done, frames = self._decode_one(item, counter, sources)
            if frames is not None:
                pixels[filled] = frames.pixels
                filled += 1
            decoded.append(done)
        batch["items"] = [each.to_row() for each in decoded]
        batch.update(fetches=counter.fetches, bytes_fetched=counter.bytes_fetched, decoded_at=time.time())
        batch["sandbox"] = OFF if self.context.sandbox is None else self.context.sandbox.level
        return batch_table([batch], pixels[:filled])

    def _decode_one(
        self, item: PlannedMedia, counter: FetchCounter, sources: SharedSources
    ) -> tuple[DecodedMedia, Frames | None]:
        started = time.perf_counter()
        try:
            data = sources.read(item.media, counter)
            # What the probe read travels along; what is read again may have changed since, or not be what was claimed.
            known = item.content if item.media.data is not None else None
            content = known or media_content(item.media, sha256_content(data))
            check_content(item.media, item.content, content)
            fetched = time.perf_counter()
            fetch_ms = 1e3 * (fetched - started)
            joined = item if content == item.content else dataclasses.replace(item, content=content)
            shard = self._known_shard(joined) if item.content is None else None
            if shard is not None:
                return DecodedMedia(planned=joined, shard=shard, fetch_ms=fetch_ms), None
            frames = self._frames(data, item)
            if item.geometry.cropped_size is not None:
                pixels = crop_frames(frames.pixels, item.geometry.cropped_size)
                frames = Frames(pixels=pixels, pts_seconds=frames.pts_seconds)
        except ItemError as error:
            failure = ItemFailure(stage=error.stage, code=error.code, message=error.message)
            return DecodedMedia(planned=item, failure=failure), None
        decode_ms = 1e3 * (time.perf_counter() - fetched)
        done = DecodedMedia(planned=joined, shown=frames.pts_seconds, fetch_ms=fetch_ms, decode_ms=decode_ms)
        return done, frames

    def _frames(self, data: bytes, item: PlannedMedia) -> Frames:
        identity, sandbox = self.context.identity, self.context.sandbox
        how: dict[str, Any] = {"page": item.media.page, "dct_scaled": identity.dct_scaled}
        planned = (item.probe, item.requested, item.geometry.resized_size, identity.resample)
        if sandbox is None:
            return decode_media(io.BytesIO(data), *planned, **how)
        return sandbox.decode(data, *planned, **how)

    def _known_shard(self, item: PlannedMedia) -> str | None:
        """The shard that has the features of bytes that were not known by their source id."""
        if not self.context.config.store.reuse:
            return None
        assert item.content is not None
        terms = self.context.identity.key_terms(item, item.content)
        key = terms.digest()
        shard = self.context.store.find([key]).get(key)
        if shard is None:
            return None
        records = self.context.store.fetch([(shard, key)], [terms.as_dict()])
        # This process outlives its pass: a shard that it kept mapped would keep its disk space when it is deleted.
        self.context.store.close()
        return shard if records != [None] else None
