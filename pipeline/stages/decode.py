"""Planned batches → the same batches with resized `uint8` frames."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.errors import ItemError
from pipeline.media.decode import decode_media
from pipeline.media.resize import crop_frames
from pipeline.media.shared_source import SharedSources
from pipeline.media.source import FetchCounter, open_source, stat_source
from pipeline.schema import Frames, ItemFailure
from pipeline.stages.context import StageContext
from pipeline.stages.identity import (
    check_content,
    check_source,
    is_read_by_range,
    media_content,
    media_source,
    sha256_content,
)
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
        counter, sources = FetchCounter(), SharedSources(self.context.config.source_policy())
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
        return batch_table([batch], pixels[:filled])

    def _decode_one(
        self, item: PlannedMedia, counter: FetchCounter, sources: SharedSources
    ) -> tuple[DecodedMedia, Frames | None]:
        try:
            if item.media.data is None and is_read_by_range(item.probe, self.context.config.decode.max_whole_bytes):
                return self._decode_by_range(item, counter)
            return self._decode_whole(item, counter, sources)
        except ItemError as error:
            failure = ItemFailure(stage=error.stage, code=error.code, message=error.message)
            return DecodedMedia(planned=item, failure=failure), None

    def _decode_whole(
        self, item: PlannedMedia, counter: FetchCounter, sources: SharedSources
    ) -> tuple[DecodedMedia, Frames | None]:
        started = time.perf_counter()
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
        frames = self._frames(item, io.BytesIO(data))
        decode_ms = 1e3 * (time.perf_counter() - fetched)
        return DecodedMedia(planned=joined, shown=frames.pts_seconds, fetch_ms=fetch_ms, decode_ms=decode_ms), frames

    def _decode_by_range(self, item: PlannedMedia, counter: FetchCounter) -> tuple[DecodedMedia, Frames]:
        """Fetching and decoding take turns: all of it counts as decoding."""
        started = time.perf_counter()
        self._check_source(item)
        with open_source(item.media, counter, self.context.config.source_policy()) as file:
            frames = self._frames(item, file, by_range=True)
        self._check_source(item)
        decode_ms = 1e3 * (time.perf_counter() - started)
        return DecodedMedia(planned=item, shown=frames.pts_seconds, decode_ms=decode_ms), frames

    def _check_source(self, item: PlannedMedia) -> None:
        facts = stat_source(item.media, self.context.config.source_policy())
        found = media_source(item.media, facts.source_id, self.context.config.document.dpi)
        check_source(item.media, item.source_id, found)

    def _frames(self, item: PlannedMedia, file: BinaryIO, *, by_range: bool = False) -> Frames:
        """As the encoder gets them."""
        identity = self.context.identity
        frames = decode_media(
            file,
            item.probe,
            item.requested,
            item.geometry.resized_size,
            identity.resample,
            page=item.media.page,
            dct_scaled=identity.dct_scaled,
            by_range=by_range,
            at_keyframes=identity.at_keyframes,
            rules=identity.image,
        )
        if item.geometry.cropped_size is None:
            return frames
        pixels = crop_frames(frames.pixels, item.geometry.cropped_size)
        return Frames(pixels=pixels, pts_seconds=frames.pts_seconds)

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
