"""Batches with frames → feature records in the store, an outcome file and a receipt."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipeline.planning.buckets import BatchBudget, computed_tokens
from pipeline.runs.metrics import STAGE_SECONDS
from pipeline.runs.summary import SANDBOX_COUNT
from pipeline.schema import Frames, Geometry, ItemFailure, Receipt
from pipeline.stages.computing import (
    Room,
    compute_alone,
    in_halves,
    one_ahead,
    tell_memory,
    tell_stages,
    tell_taken,
)
from pipeline.stages.context import StageContext
from pipeline.stages.kept_frames import FrameKeeper
from pipeline.stages.outcomes import ENCODE_OUTCOME, count_codes, write_outcome
from pipeline.stages.rows import DecodedMedia, PlannedMedia, flat_frames, receipt_table
from pipeline.stages.spending import CpuClock, batch_spent, on_accelerator

if TYPE_CHECKING:
    from pipeline.models.embedder import FrameEncoder, FrameVectors, VectorBatch
    from pipeline.models.vision_encoder import EncodedBatch, EncodedItem, StagedMedia, VisionEncoder

_COUNTED_BY_DECODE = ("fetches", "bytes_fetched", "fetch_retries", "frames_bytes_read", "frames_fallbacks")


@dataclass(kw_only=True, slots=True)
class _Staged:
    """A batch on its way to the device, in as many runs as there is room for at a time."""

    batch: dict[str, Any]
    items: list[DecodedMedia]
    shown: list[DecodedMedia]
    frames: list[Frames]
    runs: list[StagedMedia]
    started: float


class EncodeBatches:
    """Stage, one an accelerator: batches (`BATCH_SCHEMA`) with pixels → rows of `RECEIPT_SCHEMA`.

    A receipt leaves after its batch is committed; the next batch is encoded while the last one commits, and on an
    accelerator the one after it is prepared and sent there meanwhile.
    """

    def __init__(self, context: StageContext, device: str) -> None:
        compute_alone(device)
        self.context = context
        self.device = device
        self.encoder = _load_encoder(context, device)
        self.writer = context.store_writer()
        store = context.frame_store
        self.keeper = None if store is None else FrameKeeper(store, context.identity)
        self.room = Room()
        self.clock = CpuClock()
        self.committer = ThreadPoolExecutor(1, thread_name_prefix="commit")
        # A CPU worker has one core, and nothing to wait for.
        self.stager = None if device == "cpu" else ThreadPoolExecutor(1, thread_name_prefix="stage")

    def __call__(self, batches: pa.Table) -> Iterator[pa.Table]:
        """One table of one receipt for each row, in order."""
        # Read when a batch is committed, so that it has what is already done for the next, which has as much for it.
        self.clock.take()
        waiting: Future[Receipt] | None = None
        rows = [batches.slice(index, 1) for index in range(batches.num_rows)]
        for staged in one_ahead(self._stage, rows, self.stager):
            splits = {"oom_splits": max(0, len(staged.runs) - 1)}
            encoded = [part for run in staged.runs for part in encode_splitting(self.encoder, run, self.room, splits)]
            if waiting is not None:
                yield receipt_table(waiting.result())
            waiting = self.committer.submit(self._committed, staged, encoded, splits)
        if waiting is not None:
            yield receipt_table(waiting.result())

    def _stage(self, row: pa.Table) -> _Staged:
        started = time.time()
        [batch] = row.drop_columns("pixels").to_pylist()
        tell_taken(self.context, "encode", batch["decoded_at"])
        items = [_decoded(item) for item in batch["items"]]
        shown = [item for item in items if item.has_pixels]
        frames = _frames(row["pixels"][0].as_buffer(), shown)
        geometries = [item.planned.geometry for item in shown]
        runs = [
            self.encoder.stage(shown[0].planned.probe.modality, frames[run], geometries[run])
            for run in self.room.runs([patches(geometry) for geometry in geometries])
            if shown
        ]
        return _Staged(batch=batch, items=items, shown=shown, frames=frames, runs=runs, started=started)

    def _receipt(self, staged: _Staged, seconds: dict[str, float], oom_splits: int) -> Receipt:
        batch, items = staged.batch, staged.items
        counts = _counts(staged, self.context.batch_budget, oom_splits)
        counts |= {name: batch[name] for name in _COUNTED_BY_DECODE}
        tried = sum(item.was_decoded for item in staged.shown)
        tried += sum(item.failure is not None and item.failure.stage == "decode" for item in items)
        if tried:
            counts[SANDBOX_COUNT + batch["sandbox"]] = tried
        seconds["media_fetch"] = sum(item.fetch_ms for item in items) / 1e3
        seconds["media_decode"] = sum(item.decode_ms for item in items) / 1e3
        return Receipt(
            stage="encode",
            window=batch["window"],
            batch=batch["batch"],
            digest=batch["digest"],
            counts=counts,
            seconds=seconds,
            quarantine=count_codes(item.failure.code for item in items if item.failure),
        )

    def _keep(self, receipt: Receipt, staged: _Staged) -> Receipt:
        """Commit the frames, where they are kept, and count them."""
        if self.keeper is None:
            return receipt
        shown = list(zip(staged.shown, staged.frames, strict=True))
        missed = sum(item.was_decoded for item in staged.shown)
        kept = {"frames_missed": missed, "frames_bytes_written": self.keeper.keep(shown, receipt.window)}
        return replace(receipt, counts=receipt.counts | kept)

    def _committed(
        self, staged: _Staged, encoded: Sequence[EncodedBatch | VectorBatch], splits: dict[str, int]
    ) -> Receipt:
        with self.context.logging(window=staged.batch["window"], batch=staged.batch["batch"]):
            return self._commit(staged, encoded, splits)

    def _commit(
        self, staged: _Staged, encoded: Sequence[EncodedBatch | VectorBatch], splits: dict[str, int]
    ) -> Receipt:
        seconds: dict[str, float] = {}
        features = _as_planned(staged, [item for part in encoded for item in part.wait(seconds)])
        receipt = self._keep(self._receipt(staged, seconds, splits["oom_splits"]), staged)
        started = time.perf_counter()
        terms = {
            i.planned.position: self.context.identity.key_terms(i.planned, i.planned.content or "")
            for i in staged.items
            if i.failure is None
        }
        keys = {position: each.digest() for position, each in terms.items()}
        took = _made_seconds(staged.shown, seconds)
        records = [
            (keys[position], found.record(terms[position].as_dict(), took[position]))
            for position, found in zip(
                (i.planned.position for i in staged.items if i.has_pixels), features, strict=True
            )
        ]
        before = self.writer.put_bytes
        kept = (item.planned.position for item in staged.items if item.has_pixels)
        located = dict(zip(kept, self.writer.put(records, receipt.window), strict=True))
        keys |= {position: key for position, (_, key) in located.items()}
        shards = {position: shard for position, (shard, _) in located.items()}
        times = {
            "encoder_queue_ms": 1e3 * (staged.started - staged.batch["decoded_at"]),
            "mm_processor_ms": 1e3 * seconds.get("mm_processor", 0.0),
            "vision_encode_ms": 1e3 * seconds.get("vision_encode", 0.0),
        }
        cpu = self.clock.take()
        used = on_accelerator(self.device, *(seconds.get(name, 0.0) for name in ("mm_processor", "vision_encode")))
        tokens = [item.planned.shaped.tokens if item.has_pixels else 0 for item in staged.items]
        spent = batch_spent(staged.started, cpu, used, tokens)
        rows = [
            {
                **_outcome(item, keys.get(item.planned.position), shards.get(item.planned.position), times),
                **_decode_spent(item, staged.batch),
                **own,
            }
            for item, own in zip(staged.items, spent, strict=True)
        ]
        receipt = replace(
            receipt,
            shards=tuple(sorted(set(shards.values()))),
            counts={**receipt.counts, "store_bytes": self.writer.put_bytes - before},
            seconds={**receipt.seconds, "commit": time.perf_counter() - started},
            cpu_seconds={"decode": sum(item.cpu_seconds for item in staged.items), "encode": cpu},
            accelerator_seconds={"encode": used} if used else {},
        )
        write_outcome(self.context.folder, receipt, rows, ENCODE_OUTCOME)
        self._tell(staged, receipt)
        return receipt

    def _tell(self, staged: _Staged, receipt: Receipt) -> None:
        """The meter: of media each, of what a batch shares once."""
        for item in staged.items:
            modality = item.planned.probe.modality
            for stage, ms in (("media_fetch", item.fetch_ms), ("media_decode", item.decode_ms)):
                if ms:
                    self.context.meter.record(STAGE_SECONDS, ms / 1e3, stage=stage, modality=modality)
        batch = {name: each for name, each in receipt.seconds.items() if not name.startswith("media_")}
        if staged.shown:  # a batch has one modality
            tell_stages(self.context, batch, staged.shown[0].planned.probe.modality)
        tell_memory(self.context, "encode")


def _load_encoder(context: StageContext, device: str) -> VisionEncoder | FrameEncoder:
    # Imported when it is known which: each takes seconds to import.
    options: dict[str, Any] = context.config.encode.model_dump(include={"dtype", "attention"})
    if context.checked.kind == "vision_language":
        from pipeline.models.pair_check import check_pairs
        from pipeline.models.vision_encoder import VisionEncoder

        encoder = VisionEncoder(context.facts, device=device, **options)
        check_pairs(encoder)
        return encoder
    from pipeline.models.embedder import FrameEncoder

    if context.checked.kind == "image_classifier":
        from pipeline.models.image_classifier import ImageClassifier

        return FrameEncoder(ImageClassifier(context.image_classifier, device=device, **options))
    from pipeline.models.dual_encoder import ImageTower

    return FrameEncoder(ImageTower(context.dual_encoder, device=device, **options))


def encode_splitting(
    encoder: VisionEncoder | FrameEncoder, staged: StagedMedia, room: Room, splits: dict[str, int]
) -> list[EncodedBatch | VectorBatch]:
    """Encode a batch, or its halves when the device has no room for it whole; `room` learns from it."""

    def work(run: Sequence[int]) -> list[EncodedBatch | VectorBatch]:
        part = staged
        if len(run) < len(staged.items):
            which = slice(run[0], run[-1] + 1)
            part = encoder.stage(staged.modality, staged.items[which], staged.geometries[which])
        with room.trying(sum(map(patches, part.geometries))):
            return [encoder.compute(part)]

    return in_halves(work, range(len(staged.items)), splits)


def patches(geometry: Geometry) -> int:
    """What the tower computes for an item."""
    return math.prod(geometry.grid)


def _as_planned(staged: _Staged, features: Sequence[EncodedItem | FrameVectors]) -> list[EncodedItem | FrameVectors]:
    """Without those that came out otherwise than they were planned: their items have failed then.

    Prompts and batches of the next pass are planned by these lengths; the rest of the batch is as good as ever.
    """
    kept, failures = [], {}
    for item, found in zip(staged.shown, features, strict=True):
        mismatch = found.mismatch(item.planned.geometry)
        if mismatch:
            failure = ItemFailure(stage="encode", code="feature_length_mismatch", message=mismatch)
            failures[item.planned.position] = replace(item, failure=failure)
        else:
            kept.append(found)
    staged.items = [failures.get(item.planned.position, item) for item in staged.items]
    return kept


def _decoded(row: dict[str, Any]) -> DecodedMedia:
    # The object's bytes stayed in the decode stage; its name is kept for messages.
    row["media"]["uri"] = row["media"]["uri"] or "<inline>"
    return DecodedMedia(
        planned=PlannedMedia.from_row(row),
        shown=tuple(row["shown"]),
        shard=row["shard"],
        failure=ItemFailure(**row["failure"]) if row["failure"] else None,
        fetch_ms=row["fetch_ms"],
        decode_ms=row["decode_ms"],
        bytes_fetched=row["bytes_fetched"],
        cpu_seconds=row["cpu_seconds"],
        saved_ms=row["saved_ms"],
    )


def _frames(buffer: pa.Buffer, items: Sequence[DecodedMedia]) -> list[Frames]:
    if not items:
        return []
    pixels = flat_frames([item.planned for item in items], np.frombuffer(buffer, np.uint8))  # read-only
    return [Frames(pixels=each, pts_seconds=item.shown) for each, item in zip(pixels, items, strict=True)]


def _counts(staged: _Staged, budget: BatchBudget, oom_splits: int) -> dict[str, int]:
    shown = staged.shown
    decoded = [item for item in shown if item.was_decoded]
    computed = padded = 0
    if shown:
        layout = budget.layouts[shown[0].planned.probe.modality]
        computed = computed_tokens(layout, [item.planned.geometry for item in shown])
        padded = computed - sum(item.planned.shaped.tokens for item in shown)
    return {
        "images_decoded": sum(item.planned.probe.modality == "image" for item in decoded),
        "pages_decoded": sum(item.planned.probe.modality == "page" for item in decoded),
        "frames_decoded": sum(len(item.shown) for item in decoded if item.planned.probe.modality == "video"),
        "frames_reused": len(shown) - len(decoded),
        "encodes": len(shown),
        "features_reused": sum(item.shard is not None for item in staged.items),
        "features_saved_ms": round(sum(item.saved_ms for item in staged.items if item.shard is not None)),
        "frames_saved_ms": round(sum(item.saved_ms for item in shown)),
        "feature_tokens": sum(item.planned.geometry.feature_length for item in shown),
        "computed_tokens": computed,
        "padded_tokens": padded,
        "oom_splits": oom_splits,
    }


def _decode_spent(item: DecodedMedia, batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "decode_started_at": batch["decode_started_at"],
        "decode_seconds": batch["decoded_at"] - batch["decode_started_at"],
        "decode_cpu_seconds": item.cpu_seconds,
        "bytes_fetched": item.bytes_fetched,
    }


def _made_seconds(shown: Sequence[DecodedMedia], seconds: Mapping[str, float]) -> dict[int, float]:
    """By position, what an item's features took of workers: to fetch, to decode, and its share of a batch's time."""
    encode_seconds = seconds.get("mm_processor", 0.0) + seconds.get("vision_encode", 0.0)
    share = encode_seconds / max(1, sum(patches(item.planned.geometry) for item in shown))
    return {
        item.planned.position: (item.fetch_ms + item.decode_ms) / 1e3 + share * patches(item.planned.geometry)
        for item in shown
    }


def _outcome(item: DecodedMedia, key: str | None, shard: str | None, times: dict[str, float]) -> dict[str, Any]:
    failure = item.failure
    return {
        "position": item.planned.position,
        "key": key,
        "shard": item.shard or shard,
        "content": item.planned.content,
        "stage": failure.stage if failure else None,
        "code": failure.code if failure else None,
        "message": failure.message if failure else None,
        "media_fetch_ms": item.fetch_ms,
        "media_decode_ms": item.decode_ms,
        **(times if item.has_pixels else {}),
    }
