"""A window of the generate pass is done: restore its order and publish its part, timings and quarantine."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pipeline.planning.windows import Window
from pipeline.runs.manifest import read_range
from pipeline.schema import Request
from pipeline.sinks.parquet import PART_SCHEMA
from pipeline.stages.context import StageContext
from pipeline.stages.encode_finish import ENCODED_SCHEMA, read_encoded
from pipeline.stages.outcomes import GENERATE_OUTCOME, read_outcomes
from pipeline.stages.prompt import prompt_plan_name
from pipeline.stages.publish import Passed, publish_window, reused_items, summed_times, timed_item

_ENCODE_TIMES = [name for name in ENCODED_SCHEMA.names if name.endswith("_ms")]
_GENERATE_TIMES = [name for name in GENERATE_OUTCOME.names if name.endswith("_ms")]


def finish_generate_window(context: StageContext, window: Window) -> dict[str, Any]:
    """Publish the window; may be done again and gives the same part.

    Returns the ledger's counts: `counts` (items written, reused, quarantined) and `quarantine` (code → items).
    Raises `RuntimeError` when an item is missing or there twice.
    """
    passed = Passed()
    requests = read_range(context.folder, window.start, window.stop)
    media, answers, failures = gather(context, window, passed)
    rows = [
        _part_row(request, answers.get(request.item_index), failures.get(request.item_index)) for request in requests
    ]
    timings = [_timing_row(r, media[r.item_index], answers.get(r.item_index)) for r in requests]
    return publish_window(
        context,
        window,
        requests,
        rows=rows,
        schema=PART_SCHEMA,
        failures=failures,
        passed=passed,
        timings=timings,
        timed=[*_ENCODE_TIMES, *_GENERATE_TIMES],
        reused=reused_items(media),
    )


def gather(
    context: StageContext, window: Window, passed: Passed
) -> tuple[dict[int, list[dict[str, Any]]], dict[int, dict[str, Any]], dict[int, list[dict[str, Any]]]]:
    """By item: its media, its answer, and why it failed (in the order of the stages); what is read goes to `passed`."""
    media: dict[int, list[dict[str, Any]]] = defaultdict(list)
    failures: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in read_encoded(context, window).to_pylist():
        (failures if row["code"] else media)[row["item_index"]].append(row)
    plan = passed.plan = context.folder.read_json(prompt_plan_name(window.index))
    for failure in plan["failures"]:
        failures[failure["item_index"]].append(failure)
    answers: dict[int, dict[str, Any]] = {}
    for table in read_outcomes(context.folder, "generate", window.index, [b["digest"] for b in plan["batches"]]):
        for row in table.to_pylist():
            passed.answered.append(row)
            if row["code"]:
                failures[row["item_index"]].append(row)
            else:
                answers[row["item_index"]] = row
    return media, answers, failures


def _part_row(request: Request, answer: dict[str, Any] | None, failures: list[dict[str, Any]] | None) -> dict[str, Any]:
    if (answer is None) == (not failures):
        state = "neither answered nor failed" if answer is None else "both answered and failed"
        raise RuntimeError(f"item {request.id!r} (item_index {request.item_index}) is {state}")
    row: dict[str, Any] = dict.fromkeys(PART_SCHEMA.names)
    row.update(item_index=request.item_index, id=request.id)
    if answer is None:
        assert failures
        row.update(status="quarantined", code=failures[0]["code"], message=failures[0]["message"])
    else:
        names = ("text", "finish_reason", "prompt_tokens", "generated_tokens")
        row.update(status="ok", **{name: answer[name] for name in names})
    return row


def _timing_row(request: Request, media: list[dict[str, Any]], answer: dict[str, Any] | None) -> dict[str, Any]:
    """An item's times: its media's added up, its batch's where a batch shares one."""
    row = timed_item(request, media)
    row |= summed_times(_ENCODE_TIMES, media)
    for name in _GENERATE_TIMES:
        row[name] = answer[name] if answer else None
    return row
