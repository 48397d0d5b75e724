"""Batches with frames → feature records in the store, an outcome file and a receipt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipeline.runs.summary import SANDBOX_COUNT
from pipeline.schema import Frames, ItemFailure, Receipt
from pipeline.stages.computing import compute_alone, in_halves
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import ENCODE_OUTCOME, count_codes, write_outcome
from pipeline.stages.rows import DecodedMedia, PlannedMedia, receipt_table

if TYPE_CHECKING:
    from pipeline.models.embedder import FrameEncoder, FrameVectors
    from pipeline.models.vision_encoder import EncodedItem, VisionEncoder


class EncodeBatches:
    """Stage, one an accelerator: batches (`BATCH_SCHEMA`) with pixels → rows of `RECEIPT_SCHEMA`.

    A receipt leaves after its batch is committed; the next batch is encoded while the last one commits.
    """

    def __init__(self, context: StageContext, device: str) -> None:
        compute_alone(device)
        self.context = context
        self.encoder = _load_encoder(context, device)
        self.writer = context.store_writer()
        self.committer = ThreadPoolExecutor(1, thread_name_prefix="commit")

    def __call__(self, batches: pa.Table) -> Iterator[pa.Table]:
        """One table of one receipt for each row, in order."""
        waiting: Future[Receipt] | None = None
        for index in range(batches.num_rows):
            commit = self._encode(batches.slice(index, 1))
            if waiting is not None:
                yield receipt_table(waiting.result())
            waiting = self.committer.submit(commit)
        if waiting is not None:
            yield receipt_table(waiting.result())

    def _encode(self, row: pa.Table) -> Callable[[], Receipt]:
        started = time.time()
        [batch] = row.drop_columns("pixels").to_pylist()
        items = [_decoded(item) for item in batch["items"]]
        shown = [item for item in items if item.has_pixels]
        frames = _frames(row["pixels"][0].as_buffer(), shown)
        seconds: dict[str, float] = {}
        splits = {"oom_splits": 0}
        encoded = encode_splitting(self.encoder, shown, frames, seconds, splits) if shown else []
        times = {
            "encoder_queue_ms": 1e3 * (started - batch["decoded_at"]),
            "mm_processor_ms": 1e3 * seconds.get("mm_processor", 0.0),
            "vision_encode_ms": 1e3 * seconds.get("vision_encode", 0.0),
        }
        counts = _counts(items, splits["oom_splits"], fetches=batch["fetches"], bytes_fetched=batch["bytes_fetched"])
        tried = sum(item.has_pixels or (item.failure is not None and item.failure.stage == "decode") for item in items)
        if tried:
            counts[SANDBOX_COUNT + batch["sandbox"]] = tried
        seconds["media_fetch"] = sum(item.fetch_ms for item in items) / 1e3
        seconds["media_decode"] = sum(item.decode_ms for item in items) / 1e3
        receipt = Receipt(
            stage="encode",
            window=batch["window"],
            batch=batch["batch"],
            digest=batch["digest"],
            counts=counts,
            seconds=seconds,
            quarantine=count_codes(item.failure.code for item in items if item.failure),
        )
        return lambda: self._commit(receipt, items, shown, encoded, times)

    def _commit(
        self,
        receipt: Receipt,
        items: Sequence[DecodedMedia],
        shown: Sequence[DecodedMedia],
        encoded: Sequence[EncodedItem | FrameVectors],
        times: dict[str, float],
    ) -> Receipt:
        started = time.perf_counter()
        terms = {
            i.planned.position: self.context.identity.key_terms(i.planned, i.planned.content or "")
            for i in items
            if i.failure is None
        }
        keys = {position: each.digest() for position, each in terms.items()}
        records = [
            (keys[item.planned.position], features.record(terms[item.planned.position].as_dict()))
            for item, features in zip(shown, encoded, strict=True)
        ]
        before = self.writer.put_bytes
        shard = self.writer.put(records, receipt.window) if records else ""
        rows = [_outcome(item, keys.get(item.planned.position), shard, times) for item in items]
        receipt = replace(
            receipt,
            shard=shard,
            counts={**receipt.counts, "store_bytes": self.writer.put_bytes - before},
            seconds={**receipt.seconds, "commit": time.perf_counter() - started},
        )
        write_outcome(self.context.folder, receipt, rows, ENCODE_OUTCOME)
        return receipt


def _load_encoder(context: StageContext, device: str) -> VisionEncoder | FrameEncoder:
    # Imported when it is known which: each takes seconds to import.
    options: dict[str, Any] = context.config.encode.model_dump(include={"dtype", "attention"})
    if context.checked.kind == "vision_language":
        from pipeline.models.vision_encoder import VisionEncoder

        return VisionEncoder(context.facts, device=device, **options)
    from pipeline.models.embedder import FrameEncoder

    if context.checked.kind == "image_classifier":
        from pipeline.models.image_classifier import ImageClassifier

        return FrameEncoder(ImageClassifier(context.image_classifier, device=device, **options))
    from pipeline.models.dual_encoder import ImageTower

    return FrameEncoder(ImageTower(context.dual_encoder, device=device, **options))


def encode_splitting(
    encoder: VisionEncoder | FrameEncoder,
    items: Sequence[DecodedMedia],
    frames: Sequence[Frames],
    seconds: dict[str, float],
    splits: dict[str, int],
) -> Sequence[EncodedItem | FrameVectors]:
    """Encode a batch, or its halves when the device has no room for it whole."""

    def work(pairs: Sequence[tuple[DecodedMedia, Frames]]) -> Sequence[EncodedItem | FrameVectors]:
        geometries = [item.planned.geometry for item, _ in pairs]
        return encoder.encode(pairs[0][0].planned.probe.modality, [shown for _, shown in pairs], geometries, seconds)

    return in_halves(work, list(zip(items, frames, strict=True)), splits)


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
    )


def _frames(buffer: pa.Buffer, items: Sequence[DecodedMedia]) -> list[Frames]:
    if not items:
        return []
    height, width = items[0].planned.geometry.shown_size
    # A copy: the row lies read-only in the object store, and torch refuses to say that it will not write.
    pixels = np.frombuffer(buffer, np.uint8).reshape(len(items), -1, height, width, 3).copy()  # (N, T, H, W, 3)
    return [Frames(pixels=each, pts_seconds=item.shown) for each, item in zip(pixels, items, strict=True)]


def _counts(items: Sequence[DecodedMedia], oom_splits: int, *, fetches: int, bytes_fetched: int) -> dict[str, int]:
    shown = [item for item in items if item.has_pixels]
    images = [item for item in shown if item.planned.probe.modality == "image"]
    patches = [np.prod(item.planned.geometry.grid) for item in shown]
    return {
        "fetches": fetches,
        "bytes_fetched": bytes_fetched,
        "images_decoded": len(images),
        "pages_decoded": sum(item.planned.probe.modality == "page" for item in shown),
        "frames_decoded": sum(len(item.shown) for item in shown if item.planned.probe.modality == "video"),
        "encodes": len(shown),
        "features_reused": sum(item.shard is not None for item in items),
        "feature_tokens": sum(item.planned.geometry.feature_length for item in shown),
        "computed_tokens": int(sum(patches)),
        "padded_tokens": 0,
        "oom_splits": oom_splits,
    }


def _outcome(item: DecodedMedia, key: str | None, shard: str, times: dict[str, float]) -> dict[str, Any]:
    failure = item.failure
    return {
        "position": item.planned.position,
        "key": key,
        "shard": item.shard or (shard if failure is None else None),
        "content": item.planned.content,
        "stage": failure.stage if failure else None,
        "code": failure.code if failure else None,
        "message": failure.message if failure else None,
        "media_fetch_ms": item.fetch_ms,
        "media_decode_ms": item.decode_ms,
        **(times if item.has_pixels else {}),
    }
