"""A window of scoring is done: every text's scores in its place, and what the highest is called."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.errors import ItemError
from pipeline.planning.windows import Window
from pipeline.runs.manifest import read_range
from pipeline.schema import Request
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import SCORED_TOKENS, failure_row, read_outcomes
from pipeline.stages.pool_plan import pool_plan_name
from pipeline.stages.publish import described_scores, publish_window

_TIMINGS_SCHEMA = pa.schema([("item_index", pa.int64()), ("text_score_ms", pa.float64())])


def scored_schema(context: StageContext) -> pa.Schema:
    """The columns of the run's parts; `scores` are a number a label, in the metadata's order."""
    return pa.schema(
        [
            ("item_index", pa.int64()),
            ("id", pa.string()),
            ("status", pa.string()),
            ("code", pa.string()),
            ("message", pa.string()),
            ("label", pa.string()),  # of the highest score; null where there is one label, and for tokens
            ("scores", pa.list_(pa.float32())),
            ("tokens", SCORED_TOKENS),
        ],
        metadata=described_scores(context.checked.scores),
    )


def finish_score_window(context: StageContext, window: Window) -> dict[str, Any]:
    """Publish the window; may be done again and gives the same part.

    Returns the ledger's counts, as `finish_pool_window`. Raises `RuntimeError` when an item is missing or there twice.
    """
    requests = read_range(context.folder, window.start, window.stop)
    plan = context.folder.read_json(pool_plan_name(window.index))
    failures = {failure["item_index"]: failure for failure in plan["failures"]}
    digests = [batch["digest"] for batch in plan["batches"]]
    scored = {
        row["item_index"]: row
        for table in read_outcomes(context.folder, "pool", window.index, digests)
        for row in table.to_pylist()
    }
    labels = context.checked.scores.labels if context.checked.scores else ()
    rows = [_part_row(request, scored.get(request.item_index), failures, labels) for request in requests]
    times = [
        {"item_index": r.item_index, "text_score_ms": scored.get(r.item_index, {}).get("text_score_ms")}
        for r in requests
    ]
    return publish_window(
        context,
        window,
        requests,
        rows=rows,
        schema=scored_schema(context),
        failures={index: [failure] for index, failure in failures.items()},
        timings=pa.Table.from_pylist(times, _TIMINGS_SCHEMA),
    )


def _part_row(
    request: Request,
    scored: dict[str, Any] | None,
    failures: dict[int, dict[str, Any]],
    labels: tuple[str, ...],
) -> dict[str, Any]:
    row = {"item_index": request.item_index, "id": request.id, "label": None, "scores": None, "tokens": None}
    row.update(status=None, code=None, message=None)
    if scored is not None:
        scores = np.array([scored["scores"]] if scored["tokens"] is None else [t["scores"] for t in scored["tokens"]])
        if np.isnan(scores).any():
            error = ItemError("score", "score_not_a_number", "the model gives a score that is not a number")
            failures[request.item_index] = failure_row(request.item_index, None, error)
        else:
            named = scored["tokens"] is None and len(labels) > 1
            label = labels[int(scores.argmax())] if named else None
            row.update(status="ok", label=label, scores=scored["scores"], tokens=scored["tokens"])
    if request.item_index in failures:
        failure = failures[request.item_index]
        row.update(status="quarantined", code=failure["code"], message=failure["message"])
    return row
