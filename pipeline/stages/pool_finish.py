"""A window of the pool pass is done: restore its order and publish its vectors, timings and quarantine."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.errors import ItemError
from pipeline.features.codec import FeatureRecord
from pipeline.planning.windows import Window
from pipeline.pooling.frames import pool_frames
from pipeline.runs.manifest import read_range
from pipeline.schema import Request
from pipeline.sinks.vectors import vector_schema
from pipeline.stages.carried import carried_rows
from pipeline.stages.context import StageContext
from pipeline.stages.encode_finish import ENCODE_TIMES, encoded_items, read_records
from pipeline.stages.outcomes import failure_row, read_outcomes
from pipeline.stages.pool_plan import pool_plan_name, read_chunks
from pipeline.stages.publish import Passed, publish_window, reused_items, summed_times, timed_item
from pipeline.stages.window_plan import load_plan


def part_schema(context: StageContext) -> pa.Schema:
    """The columns of the run's parts."""
    spaces = context.checked.vectors
    assert spaces is not None
    return vector_schema(dataclasses.asdict(spaces))


@dataclass(kw_only=True, slots=True)
class _Item:
    """What the passes left of one item."""

    media: list[dict[str, Any]] = field(default_factory=list)
    text: str | None = None
    source_id: str | None = None
    chunks: list[tuple[int, int]] = field(default_factory=list)
    pieces: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)


def finish_pool_window(context: StageContext, window: Window) -> dict[str, Any]:
    """Publish the window; may be done again and gives the same part.

    Returns the ledger's counts: `counts` (items written, reused, quarantined) and `quarantine` (code → items).
    Raises `RuntimeError` when an item is missing or there twice.
    """
    passed = Passed()
    requests = read_range(context.folder, window.start, window.stop)
    items = _gather(context, window, passed)
    vectors = _media_vectors(context, items)
    sources = _sources(context, window)
    carried = carried_rows(context, window.index)
    schema = part_schema(context)
    rows = [
        carried[r.item_index]
        if r.item_index in carried
        else _part_row(dict.fromkeys(schema.names), r, items[r.item_index], vectors.get(r.item_index), sources)
        for r in requests
    ]
    timings = [_timing_row(request, items[request.item_index]) for request in requests]
    return publish_window(
        context,
        window,
        requests,
        rows=rows,
        schema=schema,
        failures={index: item.failures for index, item in items.items()},
        passed=passed,
        timings=timings,
        timed=[*ENCODE_TIMES, "text_embed_ms"],
        reused={*carried, *reused_items({index: item.media for index, item in items.items()})},
    )


def _gather(context: StageContext, window: Window, passed: Passed) -> dict[int, _Item]:
    items: dict[int, _Item] = defaultdict(_Item)
    if context.checked.verdicts:
        media, failures = encoded_items(context, window)
        for index in {**media, **failures}:
            items[index].media, items[index].failures = media.get(index, []), failures.get(index, [])
    plan = passed.plan = context.folder.read_json(pool_plan_name(window.index))
    for failure in plan["failures"]:
        items[failure["item_index"]].failures.append(failure)
    for index, row in read_chunks(context, window.index).items():
        item = items[index]
        item.text, item.source_id, item.chunks = row["text"], row["source_id"], [tuple(c) for c in row["chunks"]]
    for table in read_outcomes(context.folder, "pool", window.index, [b["digest"] for b in plan["batches"]]):
        for piece, vector in zip(table.drop_columns("vector").to_pylist(), table["vector"], strict=True):
            passed.answered.append(piece)
            items[piece["item_index"]].pieces[piece["part"]] = {**piece, "vector": vector.values.to_numpy()}
    return items


def _media_vectors(context: StageContext, items: dict[int, _Item]) -> dict[int, npt.NDArray[np.float32]]:
    """Item → the vector of its media; reads the window's records, and nothing else of the store."""
    rows = [row for item in items.values() if not item.failures for row in item.media]
    records = read_records(context, rows)
    return {row["item_index"]: _pooled(context, row, record) for row, record in zip(rows, records, strict=True)}


def _pooled(context: StageContext, row: dict[str, Any], record: FeatureRecord) -> npt.NDArray[np.float32]:
    frames: npt.NDArray[np.float32] = record.tensors["pooler_output"].numpy()  # (T, D)
    return pool_frames(frames, context.config.pooling.video) if row["modality"] == "video" else frames[0].copy()


def _sources(context: StageContext, window: Window) -> dict[int, str]:
    """Item → the source id of its media."""
    plan = load_plan(context, window) if context.checked.verdicts else None
    return {} if plan is None else {media.item_index: media.source_id for media in plan.media}


def _part_row(
    row: dict[str, Any],
    request: Request,
    item: _Item,
    vector: npt.NDArray[np.float32] | None,
    sources: dict[int, str],
) -> dict[str, Any]:
    media = request.media[0] if request.media else None
    row.update(
        item_index=request.item_index,
        id=request.id,
        modality=item.media[0]["modality"] if item.media else ("text" if media is None else media.modality),
        uri=None if media is None else media.uri,
        tenant=request.tenant,
        page=None if media is None else media.page,
        text=item.text,
        source_id=item.source_id or sources.get(request.item_index),
    )
    if not item.failures and not _are_finite(item, vector):
        error = ItemError("pool", "not_finite", "the model made a vector of it that holds NaN or infinity")
        item.failures.append(failure_row(request.item_index, None, error))
    if item.failures:
        row.update(status="quarantined", code=item.failures[0]["code"], message=item.failures[0]["message"])
        return row
    if item.pieces.keys() != set(range(len(item.chunks))) or (vector is None and not item.pieces):
        raise RuntimeError(
            f"item {request.id!r} (item_index {request.item_index}) has neither failed nor all its vectors: of its "
            f"{len(item.chunks)} texts those of {sorted(item.pieces)} are there"
        )
    row["status"] = "ok"
    if media is None:
        row["vector"] = item.pieces[0]["vector"]
    else:
        row.update(vector=vector, chunks=_chunk_rows(item))
    return row


def _are_finite(item: _Item, vector: npt.NDArray[np.float32] | None) -> bool:
    vectors = [piece["vector"] for piece in item.pieces.values()] + ([] if vector is None else [vector])
    return all(bool(np.isfinite(each).all()) for each in vectors)


def _chunk_rows(item: _Item) -> list[dict[str, Any]] | None:
    if item.text is None:
        return None
    return [
        {"part": part, "start_char": start, "end_char": end, "vector": item.pieces[part]["vector"]}
        for part, (start, end) in enumerate(item.chunks)
    ]


def _timing_row(request: Request, item: _Item) -> dict[str, Any]:
    """An item's times: its media's and its chunks' added up."""
    row = timed_item(request, item.media)
    row |= summed_times(ENCODE_TIMES, item.media)
    row["text_embed_ms"] = sum(p["text_embed_ms"] for p in item.pieces.values()) if item.pieces else None
    return row
