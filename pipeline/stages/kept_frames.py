"""Decoded frames that outlive their run: found when a window is planned, read by decode, put away by encode."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from pipeline.errors import TransientError
from pipeline.features.frames import frame_bytes, frame_record, record_frames
from pipeline.features.identity import FrameKeyTerms
from pipeline.features.store import FeatureStore
from pipeline.schema import Frames
from pipeline.stages.context import StageContext
from pipeline.stages.identity import EncoderIdentity
from pipeline.stages.rows import DecodedMedia, PlannedMedia


def with_known_frames(context: StageContext, media: Sequence[PlannedMedia]) -> list[PlannedMedia]:
    """`media`, of which those whose frames the store lists now name the shard: a claim, until `KeptFrames.read`."""
    return _with_listed_frames(context, media, anew=True)


class KeptFrames:
    """The store's frames of a batch's items. Counts what was read of it, and the claims that did not hold."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self.bytes_read = 0
        self.fallbacks = 0

    def find(self, item: PlannedMedia) -> PlannedMedia:
        """As `with_known_frames`, of one whose content was not known when it was planned."""
        return _with_listed_frames(self._context, [item], anew=False)[0]

    def read(self, item: PlannedMedia) -> tuple[Frames, float] | None:
        """The frames of `item` in the shard that it names, and the seconds that they took once; None when it names
        none, or they are not to be had."""
        if item.frames_shard is None:
            return None
        terms = _terms(self._context.identity, item)
        try:
            # Also without `store.keep_frames`: a resumed run follows its plan.
            [record] = self._context.store.frames.fetch([(item.frames_shard, terms.digest())], [terms.as_dict()])
            frames = None if record is None else record_frames(record)
        except (TransientError, ValueError):  # out of reach, or of a version that codes them otherwise
            record = frames = None
        if record is None or frames is None:
            self.fallbacks += 1
            return None
        self.bytes_read += frame_bytes(record)
        return frames, record.made_seconds

    def close(self) -> None:
        """Let go of shards: this process outlives its pass, and one that it kept mapped would keep its disk space when
        it is deleted."""
        if self.bytes_read or self.fallbacks:
            self._context.store.frames.close()


class FrameKeeper:
    """Puts decoded frames into the store; one a worker, for its shards have one writer."""

    def __init__(self, store: FeatureStore, identity: EncoderIdentity) -> None:
        self.writer = store.writers()
        self._identity = identity

    def keep(self, items: Iterable[tuple[DecodedMedia, Frames]], window: int) -> int:
        """Commit the frames of those that were decoded; returns the bytes that their pixels take."""
        records = []
        for item, frames in items:
            if item.was_decoded:
                planned = item.planned
                terms = _terms(self._identity, planned)
                made_seconds = (item.fetch_ms + item.decode_ms) / 1e3
                size = planned.geometry.original_size
                record = frame_record(frames, terms, planned.probe.modality, size, made_seconds)
                records.append((terms.digest(), record))
        self.writer.put(records, window)
        return sum(frame_bytes(record) for _, record in records)


def _with_listed_frames(context: StageContext, media: Sequence[PlannedMedia], *, anew: bool) -> list[PlannedMedia]:
    store = context.frame_store
    if store is None or not context.config.store.reuse:
        return list(media)
    keys = {m.position: _terms(context.identity, m).digest() for m in media if m.content is not None}
    wanted: dict[str, set[str]] = {m.tenant: set() for m in media}
    for m in media:
        if m.position in keys:
            wanted[m.tenant].add(keys[m.position])
    found = store.find_of_tenants(wanted, anew=anew)
    return [dataclasses.replace(m, frames_shard=found.get(keys.get(m.position, ""))) for m in media]


def _terms(identity: EncoderIdentity, item: PlannedMedia) -> FrameKeyTerms:
    return identity.frame_key_terms(item, item.content or "")
