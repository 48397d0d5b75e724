"""The rows of jobs that score: an item's scores, what the highest is called, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.errors import ItemError
from pipeline.schema import Request
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import failure_row
from pipeline.stages.publish import described_scores

Failures = dict[int, list[dict[str, Any]]]


def scored_schema(context: StageContext, *more: tuple[str, pa.DataType]) -> pa.Schema:
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
            *more,
        ],
        metadata=described_scores(context.checked.scores),
    )


def scored_row(
    context: StageContext, request: Request, found: Mapping[str, Any] | None, numbers: Any, failures: Failures
) -> dict[str, Any]:
    """The item's row: the columns that were `found` of it, `scores` among them, or the first of its `failures`.

    `numbers` are all that it was scored with; one that is not a number is a failure of the item, which is noted.
    """
    index = request.item_index
    if found is not None and np.isnan(numbers).any():
        error = ItemError("score", "score_not_a_number", "the model gives a score that is not a number")
        failures.setdefault(index, []).append(failure_row(index, None, error))
    row: dict[str, Any] = {"item_index": index, "id": request.id, "status": "ok", "code": None, "message": None}
    if index in failures:
        failure = failures[index][0]
        return {**row, "status": "quarantined", "code": failure["code"], "message": failure["message"]}
    if found is None:
        raise RuntimeError(f"item {request.id!r} (item_index {index}) has neither failed nor been scored")
    assert context.checked.scores is not None
    labels, scores = context.checked.scores.labels, found["scores"]
    label = labels[int(np.argmax(scores))] if scores is not None and len(labels) > 1 else None
    return {**row, "label": label, **found}
