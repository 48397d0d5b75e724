"""A window whose prompts were embedded is done: restore its order and publish its vectors, timings and quarantine."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from pipeline.errors import ItemError
from pipeline.planning.windows import Window
from pipeline.runs.manifest import read_range
from pipeline.schema import Request
from pipeline.stages.carried import carried_rows
from pipeline.stages.context import StageContext
from pipeline.stages.encode_finish import ENCODED_SCHEMA
from pipeline.stages.generate_finish import gather
from pipeline.stages.identity import request_source
from pipeline.stages.outcomes import PROMPT_VECTOR_OUTCOME, failure_row
from pipeline.stages.pool_finish import part_schema
from pipeline.stages.publish import Passed, publish_window, reused_items, summed_times, timed_item
from pipeline.stages.window_plan import load_plan

_ENCODE_TIMES = [name for name in ENCODED_SCHEMA.names if name.endswith("_ms")]
_PROMPT_TIMES = [name for name in PROMPT_VECTOR_OUTCOME.names if name.endswith("_ms")]


def finish_prompt_vectors_window(context: StageContext, window: Window) -> dict[str, Any]:
    """Publish the window; may be done again and gives the same part.

    Returns the ledger's counts, as `finish_pool_window`. Raises `RuntimeError` when an item is missing or there twice.
    """
    passed = Passed()
    requests = read_range(context.folder, window.start, window.stop)
    media, vectors, failures = gather(context, window, passed)
    for index, row in vectors.items():
        if not np.isfinite(row["vector"]).all():
            error = ItemError("generate", "not_finite", "the model made a vector of it that holds NaN or infinity")
            failures[index].append(failure_row(index, None, error))
    plan = load_plan(context, window)
    sources: dict[int, list[str]] = defaultdict(list)
    for each in sorted(plan.media, key=lambda planned: planned.media_index) if plan else ():
        sources[each.item_index].append(each.source_id)
    schema = part_schema(context)
    carried = carried_rows(context, window.index)
    rows = [
        carried[r.item_index]
        if r.item_index in carried
        else _part_row(
            dict.fromkeys(schema.names), r, media[r.item_index], vectors, failures, _source(r, sources[r.item_index])
        )
        for r in requests
    ]
    timings = [_timing_row(r, media[r.item_index], vectors.get(r.item_index)) for r in requests]
    return publish_window(
        context,
        window,
        requests,
        rows=rows,
        schema=schema,
        failures=failures,
        passed=passed,
        timings=timings,
        timed=[*_ENCODE_TIMES, *_PROMPT_TIMES],
        reused={*carried, *reused_items(media)},
    )


def _source(request: Request, media_sources: list[str]) -> str | None:
    """None where not all is known: an item's media that failed, or nothing to embed."""
    said = request.media or request.text is not None or request.prompt is not None or request.messages is not None
    return request_source(request, media_sources) if said and len(media_sources) == len(request.media) else None


def _part_row(
    row: dict[str, Any],
    request: Request,
    media: list[dict[str, Any]],
    vectors: dict[int, dict[str, Any]],
    failures: dict[int, list[dict[str, Any]]],
    source_id: str | None,
) -> dict[str, Any]:
    index = request.item_index
    first = request.media[0] if request.media else None
    row.update(
        item_index=index,
        id=request.id,
        modality=media[0]["modality"] if media else ("text" if first is None else first.modality),
        uri=None if first is None else first.uri,
        page=None if first is None else first.page,
        tenant=request.tenant,
        text=request.text,
        source_id=source_id,
    )
    if failures.get(index):
        row.update(status="quarantined", code=failures[index][0]["code"], message=failures[index][0]["message"])
    elif index in vectors:
        row.update(status="ok", vector=vectors[index]["vector"])
    else:
        raise RuntimeError(f"item {request.id!r} (item_index {index}) is neither embedded nor failed")
    return row


def _timing_row(request: Request, media: list[dict[str, Any]], vector: dict[str, Any] | None) -> dict[str, Any]:
    """An item's times: its media's added up, its batch's where a batch shares one."""
    row = timed_item(request, media)
    row |= summed_times(_ENCODE_TIMES, media)
    for name in _PROMPT_TIMES:
        row[name] = vector[name] if vector else None
    return row
