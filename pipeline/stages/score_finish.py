"""A window of scoring is done: every text's scores in its place, and what the highest is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.planning.windows import Window
from pipeline.runs.manifest import read_range
from pipeline.schema import Request
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import SCORED_TOKENS, read_outcomes
from pipeline.stages.pool_plan import pool_plan_name
from pipeline.stages.publish import Passed, publish_window, timed_item
from pipeline.stages.scored_rows import Failures, scored_row, scored_schema


def finish_score_window(context: StageContext, window: Window) -> dict[str, Any]:
    """Publish the window; may be done again and gives the same part.

    Returns the ledger's counts, as `finish_pool_window`. Raises `RuntimeError` when an item is missing or there twice.
    """
    passed = Passed()
    requests = read_range(context.folder, window.start, window.stop)
    plan = passed.plan = context.folder.read_json(pool_plan_name(window.index))
    failures = {failure["item_index"]: [failure] for failure in plan["failures"]}
    digests = [batch["digest"] for batch in plan["batches"]]
    for table in read_outcomes(context.folder, "pool", window.index, digests):
        passed.answered += table.to_pylist()
    scored = {row["item_index"]: row for row in passed.answered}
    times = [
        {**timed_item(r, ()), "text_score_ms": scored.get(r.item_index, {}).get("text_score_ms")} for r in requests
    ]
    return publish_window(
        context,
        window,
        requests,
        rows=[_part_row(context, request, scored.get(request.item_index), failures) for request in requests],
        schema=scored_schema(context, ("tokens", SCORED_TOKENS)),
        failures=failures,
        passed=passed,
        timings=times,
        timed=["text_score_ms"],
    )


def _part_row(
    context: StageContext, request: Request, scored: Mapping[str, Any] | None, failures: Failures
) -> dict[str, Any]:
    if scored is None:
        return scored_row(context, request, None, (), failures)
    tokens = scored["tokens"]
    numbers = np.array([scored["scores"]] if tokens is None else [token["scores"] for token in tokens])
    return scored_row(context, request, {"scores": scored["scores"], "tokens": tokens}, numbers, failures)
