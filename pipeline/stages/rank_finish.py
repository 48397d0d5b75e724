"""A window of ranking is done: every score in its place, and the documents in their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.errors import ItemError
from pipeline.planning.windows import Window
from pipeline.pooling.rank import Pair, ScoreBoard, ranking
from pipeline.runs.manifest import read_range
from pipeline.schema import ItemFailure, Request
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import failure_row, read_outcomes
from pipeline.stages.pool_plan import pool_plan_name
from pipeline.stages.publish import Passed, described_scores, publish_window

RANKED_SCHEMA = pa.schema(
    [
        ("item_index", pa.int64()),
        ("id", pa.string()),
        ("status", pa.string()),
        ("code", pa.string()),
        ("message", pa.string()),
        ("scores", pa.list_(pa.float32())),  # in the order of the documents
        ("ranking", pa.list_(pa.int32())),  # indices of documents, the best first
    ]
)


def finish_rank_window(context: StageContext, window: Window) -> dict[str, Any]:
    """Publish the window; may be done again and gives the same part.

    Returns the ledger's counts, as `finish_pool_window`. Raises `RuntimeError` when a score is missing or there twice.
    """
    passed = Passed()
    requests = read_range(context.folder, window.start, window.stop)
    plan = passed.plan = context.folder.read_json(pool_plan_name(window.index))
    failures = {failure["item_index"]: failure for failure in plan["failures"]}
    scores = _scores(context, window, passed)
    rows = [_part_row(request, scores.get(request.item_index), failures) for request in requests]
    return publish_window(
        context,
        window,
        requests,
        rows=rows,
        schema=RANKED_SCHEMA.with_metadata(described_scores(context.checked.scores)),
        failures={index: [failure] for index, failure in failures.items()},
        passed=passed,
    )


def _scores(context: StageContext, window: Window, passed: Passed) -> dict[int, npt.NDArray[np.float32] | ItemFailure]:
    """By item, its documents' scores."""
    plan = passed.plan
    assert plan is not None
    counted = {int(index): count for index, count in plan["num_documents"].items()}
    numbers = {index: number for number, index in enumerate(counted)}
    board = ScoreBoard(list(counted.values()))
    for table in read_outcomes(context.folder, "pool", window.index, [b["digest"] for b in plan["batches"]]):
        pairs = [
            Pair(request=numbers[index], document=document)
            for index, document in zip(table["item_index"].to_pylist(), table["document"].to_pylist(), strict=True)
        ]
        board.place(pairs, table["score"].to_numpy())
        passed.answered += table.drop_columns("score").to_pylist()
    return dict(zip(counted, board.outcomes(), strict=True))


def _part_row(
    request: Request, scores: npt.NDArray[np.float32] | ItemFailure | None, failures: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(RANKED_SCHEMA.names)
    row.update(item_index=request.item_index, id=request.id)
    if scores is not None:
        assert not isinstance(scores, ItemFailure)
        try:
            row.update(status="ok", scores=scores, ranking=ranking(scores))
        except ItemError as error:
            failures[request.item_index] = failure_row(request.item_index, None, error)
    if request.item_index in failures:
        failure = failures[request.item_index]
        row.update(status="quarantined", code=failure["code"], message=failure["message"], scores=None, ranking=None)
    return row
