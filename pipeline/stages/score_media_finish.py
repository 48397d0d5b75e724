"""A window of media is encoded to logits: each item's scores by the job's activation and rule for videos."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from pipeline.errors import ItemError
from pipeline.features.codec import FeatureRecord
from pipeline.planning.windows import Window
from pipeline.pooling.scores import activate, score_frames
from pipeline.runs.manifest import read_range
from pipeline.schema import Request
from pipeline.stages.context import StageContext
from pipeline.stages.encode_finish import ENCODE_TIMES, encoded_items, read_records
from pipeline.stages.outcomes import failure_row
from pipeline.stages.publish import Passed, publish_window, reused_items, summed_times, timed_item
from pipeline.stages.scored_rows import Failures, scored_row, scored_schema

_FRAMES = pa.list_(pa.struct([("pts_seconds", pa.float64()), ("scores", pa.list_(pa.float32()))]))


def finish_score_media_window(context: StageContext, window: Window) -> dict[str, Any]:
    """Publish the window; may be done again and gives the same part.

    Returns the ledger's counts, as `finish_pool_window`. Raises `RuntimeError` when an item is missing or there twice,
    or its logits are no longer in the store.
    """
    passed = Passed()
    requests = read_range(context.folder, window.start, window.stop)
    media, failures = encoded_items(context, window)
    for request in requests:
        if len(request.media) != 1 and request.item_index not in failures:
            failures[request.item_index] = [_not_one_media(request)]
    scored = [rows[0] for index, rows in media.items() if index not in failures]
    records = dict(zip((r["item_index"] for r in scored), read_records(context, scored), strict=True))
    rows = [_part_row(context, request, records.get(request.item_index), failures) for request in requests]
    times = [
        {
            **timed_item(r, media.get(r.item_index, ())),
            **summed_times(ENCODE_TIMES, media.get(r.item_index, ())),
        }
        for r in requests
    ]
    return publish_window(
        context,
        window,
        requests,
        rows=rows,
        schema=scored_schema(context, ("frames", _FRAMES)),
        failures=failures,
        passed=passed,
        timings=times,
        timed=ENCODE_TIMES,
        reused=reused_items(media),
    )


def _not_one_media(request: Request) -> dict[str, Any]:
    message = f"an item is one image, video or page, and this one has {len(request.media)} media items"
    return failure_row(request.item_index, None, ItemError("score", "not_one_media", message))


def _part_row(
    context: StageContext, request: Request, record: FeatureRecord | None, failures: Failures
) -> dict[str, Any]:
    if record is None:
        return scored_row(context, request, None, (), failures)
    space, section = context.checked.scores, context.config.score
    assert space is not None
    logits = record.tensors["pooler_output"].numpy()  # (T, labels)
    scores, frames = score_frames(logits, space.activation, section.video), None
    if section.per_frame and record.slot == "video":
        frames = [
            {"pts_seconds": time, "scores": each}
            for time, each in zip(record.geometry.timestamps, activate(logits, space.activation), strict=True)
        ]
    return scored_row(context, request, {"scores": scores, "frames": frames}, scores, failures)
