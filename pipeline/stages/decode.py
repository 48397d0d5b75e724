"""Planned batches → the same batches with resized `uint8` frames."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.errors import ItemError
from pipeline.logs import log_ids
from pipeline.media.in_process import InProcess
from pipeline.media.resize import crop_frames
from pipeline.media.sandbox import OFF
from pipeline.media.shared_source import SharedSources
from pipeline.media.source import FetchCounter, open_source, stat_source
from pipeline.media.undecoded import Outcome, Undecoded
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
from pipeline.stages.kept_frames import KeptFrames
from pipeline.stages.rows import DecodedMedia, PlannedMedia, batch_table
from pipeline.stages.spending import CpuClock, shares

# Decoded together: in the sandbox, JPEGs of a megapixel took 17 % more processor time one by one.
_GROUP_ITEMS = 8
_GROUP_BYTES = 8 * 2**20
# What is said of an item, and its frames, cropped, if there are any.
_Done = tuple[DecodedMedia, npt.NDArray[np.uint8] | None]


@dataclass(frozen=True)
class DecodeBatches:
    """Stage: rows of `BATCH_SCHEMA` without pixels → with pixels, one row at a time; receipt rows pass."""

    context: StageContext

    def __call__(self, batches: pa.Table) -> Iterator[pa.Table]:
        """One table of one row for each row; a row's items keep their order, failed ones stay with their reason."""
        for index in range(batches.num_rows):
            row = batches.slice(index, 1)
            yield row if row["receipt"][0].is_valid else self._decoded(row)

    def _decoded(self, row: pa.Table) -> pa.Table:
        with self.context.logging(window=row["window"][0].as_py(), batch=row["batch"][0].as_py()):
            return self._decode(row)

    def _decode(self, row: pa.Table) -> pa.Table:
        started_at, clock = time.time(), CpuClock(self._children)
        [batch] = row.drop_columns("pixels").to_pylist()
        planned = [PlannedMedia.from_row(item) for item in batch["items"]]
        counter, kept = FetchCounter(), KeptFrames(self.context)
        pixels = np.empty(sum(math.prod(item.frames_shape) for item in planned), np.uint8)
        decoded: list[DecodedMedia] = []
        filled = 0
        for group in _groups(self._fetch_each(planned, counter, kept)):
            before = counter.bytes_fetched
            outcomes = iter(self._outcomes([each for each in group if isinstance(each, _Fetched)], counter))
            read = counter.bytes_fetched - before  # of the one that is read by range: nothing is decoded with it
            for each in group:
                if isinstance(each, _Fetched):
                    each = dataclasses.replace(each, bytes_fetched=each.bytes_fetched + read)
                    done, frames = _done(each, next(outcomes))
                else:
                    done, frames = each
                decoded.append(done)
                if frames is not None:
                    stop = filled + math.prod(done.planned.frames_shape)
                    pixels[filled:stop].reshape(done.planned.frames_shape)[:] = frames
                    filled = stop
        kept.close()
        cpu = shares(clock.take(), [each.fetch_ms + each.decode_ms for each in decoded])
        batch["items"] = [
            dataclasses.replace(each, cpu_seconds=own).to_row() for each, own in zip(decoded, cpu, strict=True)
        ]
        batch.update(fetches=counter.fetches, bytes_fetched=counter.bytes_fetched, fetch_retries=counter.retries)
        batch.update(decode_started_at=started_at, decoded_at=time.time())
        batch.update(frames_bytes_read=kept.bytes_read, frames_fallbacks=kept.fallbacks)
        batch["sandbox"] = OFF if self.context.sandbox is None else self.context.sandbox.level
        return batch_table([batch], pixels[:filled])

    def _fetch_each(
        self, planned: list[PlannedMedia], counter: FetchCounter, kept: KeptFrames
    ) -> Iterator[_Fetched | _Done]:
        sources = SharedSources(self.context.config.source_policy())
        for item in planned:
            before = counter.bytes_fetched
            with log_ids(item_index=item.item_index):
                fetched = self._fetch_one(item, counter, sources, kept)
            read = counter.bytes_fetched - before
            if isinstance(fetched, _Fetched):
                yield dataclasses.replace(fetched, bytes_fetched=read)
            else:
                done, frames = fetched
                yield dataclasses.replace(done, bytes_fetched=read), frames

    def _fetch_one(
        self, item: PlannedMedia, counter: FetchCounter, sources: SharedSources, kept: KeptFrames
    ) -> _Fetched | _Done:
        try:
            return self._kept(item, kept, time.perf_counter()) or self._fetch(item, counter, sources, kept)
        except ItemError as error:
            return DecodedMedia(planned=item, failure=_failure(error)), None

    def _children(self) -> list[int]:
        return [] if self.context.sandbox is None else self.context.sandbox.children

    def _kept(self, item: PlannedMedia, kept: KeptFrames, started: float) -> _Done | None:
        """The frames that the store has of `item`, where it is said to have them."""
        found = kept.read(item)
        if found is None:
            return None
        frames, made_seconds = found
        fetch_ms = _ms_since(started)
        saved_ms = 1e3 * made_seconds - fetch_ms
        done = DecodedMedia(planned=item, shown=frames.pts_seconds, fetch_ms=fetch_ms, saved_ms=saved_ms)
        return done, frames.pixels

    def _fetch(
        self, item: PlannedMedia, counter: FetchCounter, sources: SharedSources, kept: KeptFrames
    ) -> _Fetched | _Done:
        """Its bytes, or what the store has of it already; of what is read by range nothing yet."""
        item = dataclasses.replace(item, frames_shard=None)
        if item.media.data is None and is_read_by_range(item.probe, self.context.config.decode.max_whole_bytes):
            return _Fetched(planned=item, data=None, fetch_ms=0.0)
        started = time.perf_counter()
        data = sources.read(item.media, counter)
        # What the probe read travels along; what is read again may have changed since, or not be what was claimed.
        known = item.content if item.media.data is not None else None
        content = known or media_content(item.media, sha256_content(data))
        check_content(item.media, item.content, content)
        fetch_ms = _ms_since(started)
        joined = item if content == item.content else dataclasses.replace(item, content=content)
        if item.content is None:
            stored = self._known_shard(joined)
            if stored is not None:
                shard, made_seconds = stored
                saved_ms = 1e3 * made_seconds - _ms_since(started)
                return DecodedMedia(planned=joined, shard=shard, fetch_ms=fetch_ms, saved_ms=saved_ms), None
            done = self._kept(kept.find(joined), kept, started)
            if done is not None:
                return done
        return _Fetched(planned=joined, data=data, fetch_ms=fetch_ms)

    def _outcomes(self, fetched: list[_Fetched], counter: FetchCounter) -> Iterable[Outcome]:
        if len(fetched) == 1 and fetched[0].data is None:
            return [self._decode_by_range(fetched[0].planned, counter)]
        return self._decode_all([self._undecoded(each.planned, data=each.data or b"") for each in fetched])

    def _decode_by_range(self, item: PlannedMedia, counter: FetchCounter) -> Outcome:
        """Fetching and decoding take turns: all of it counts as decoding."""
        started = time.perf_counter()
        result: Frames | ItemError
        try:
            self._check_source(item, counter)
            with open_source(item.media, counter, self.context.config.source_policy()) as file:
                [outcome] = self._decode_all([self._undecoded(item, file=file)])
            self._check_source(item, counter)
            result = outcome.result
        except ItemError as error:
            result = error
        return Outcome(result=result, seconds=time.perf_counter() - started)

    def _check_source(self, item: PlannedMedia, counter: FetchCounter) -> None:
        facts = stat_source(item.media, self.context.config.source_policy(), counter)
        found = media_source(item.media, facts.source_id, self.context.config.document.dpi)
        check_source(item.media, item.source_id, found)

    def _decode_all(self, items: list[Undecoded]) -> Iterable[Outcome]:
        return (self.context.sandbox or InProcess()).decode(items)

    def _undecoded(self, planned: PlannedMedia, *, data: bytes = b"", file: BinaryIO | None = None) -> Undecoded:
        identity = self.context.identity
        return Undecoded(
            data=data,
            file=file,
            probe=planned.probe,
            plan=planned.requested,
            size=planned.geometry.resized_size,
            resample=identity.resample,
            page=planned.media.page,
            dct_scaled=identity.dct_scaled,
            at_keyframes=identity.at_keyframes,
            rules=identity.image,
        )

    def _known_shard(self, item: PlannedMedia) -> tuple[str, float] | None:
        """The shard that has the features of bytes that were not known by their source id, and the seconds that they
        took once."""
        if not self.context.config.store.reuse:
            return None
        assert item.content is not None
        terms = self.context.identity.key_terms(item, item.content)
        key = terms.digest()
        shard = self.context.store.of_tenant(item.tenant).find([key]).get(key)
        if shard is None:
            return None
        [record] = self.context.store.fetch([(shard, key)], [terms.as_dict()])
        # This process outlives its pass: a shard that it kept mapped would keep its disk space when it is deleted.
        self.context.store.close()
        return None if record is None else (shard, record.made_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fetched:
    """An item and its bytes, None where they are read by range."""

    planned: PlannedMedia
    data: bytes | None
    fetch_ms: float
    bytes_fetched: int = 0


def _groups(items: Iterable[_Fetched | _Done]) -> Iterator[list[_Fetched | _Done]]:
    """Those that are decoded together: in order, and no more bytes at a time than a few images have; what is read by
    range alone."""
    group: list[_Fetched | _Done] = []
    num_bytes = 0
    for item in items:
        size = 0
        if isinstance(item, _Fetched):
            size = _GROUP_BYTES if item.data is None else len(item.data)
        if group and (len(group) == _GROUP_ITEMS or num_bytes + size > _GROUP_BYTES):
            yield group
            group, num_bytes = [], 0
        group.append(item)
        num_bytes += size
    yield group


def _done(fetched: _Fetched, outcome: Outcome) -> _Done:
    result, cropped_size = outcome.result, fetched.planned.geometry.cropped_size
    done = DecodedMedia(
        planned=fetched.planned,
        fetch_ms=fetched.fetch_ms,
        decode_ms=1e3 * outcome.seconds,
        bytes_fetched=fetched.bytes_fetched,
    )
    if isinstance(result, ItemError):
        return dataclasses.replace(done, failure=_failure(result)), None
    frames = result.pixels if cropped_size is None else crop_frames(result.pixels, cropped_size)
    return dataclasses.replace(done, shown=result.pts_seconds), frames


def _ms_since(started: float) -> float:
    return 1e3 * (time.perf_counter() - started)


def _failure(error: ItemError) -> ItemFailure:
    return ItemFailure(stage=error.stage, code=error.code, message=error.message)
