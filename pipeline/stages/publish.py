"""What a finished window becomes: its part, timings and quarantine, and the counts for the ledger."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipeline.planning.windows import Window
from pipeline.schema import Request, ScoreSpace
from pipeline.sinks.parquet import (
    QUARANTINE_SCHEMA,
    quarantine_row,
    restore_window,
    write_part,
    write_quarantine,
    write_timings,
)
from pipeline.stages.context import StageContext
from pipeline.stages.encode_finish import read_encoded
from pipeline.stages.item_costs import COST_COLUMNS, cost_columns, publishing_since
from pipeline.stages.outcomes import count_codes
from pipeline.stages.window_plan import plan_name


@dataclass(kw_only=True, slots=True)
class Passed:
    """What the answering pass left of a window: its written plan, if there is one, and its outcomes' rows (`SPENT`).

    `started_at` is when its publication began, in seconds since the epoch.
    """

    plan: Mapping[str, Any] | None = None
    answered: list[Mapping[str, Any]] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)


def publish_window(
    context: StageContext,
    window: Window,
    requests: Sequence[Request],
    *,
    rows: Sequence[Mapping[str, Any]],
    schema: pa.Schema,
    failures: Mapping[int, Sequence[Mapping[str, Any]]],
    passed: Passed,
    timings: Sequence[Mapping[str, Any]] = (),
    timed: Sequence[str] = (),
    reused: Collection[int] = (),
) -> dict[str, Any]:
    """Write the window's files; may be done again and gives the same part.

    `rows` (of `schema`, with `status` and `code`) are one an item, in any order; `failures` say why items are out;
    `timings` are rows of `TIMED_ITEM` and of the times `timed`, and `passed` says what to add to them of every job;
    `reused` items needed no encoding. Returns the ledger's `counts` (items written, reused, quarantined) and
    `quarantine` (code → items), and the `letters` (`QUARANTINE_SCHEMA`) that were written.
    Raises `RuntimeError` when an item is missing or there twice.
    """
    part = restore_window(rows, window.start, window.stop, schema)
    write_part(context.folder, window.index, part, schema)
    write_timings(context.folder, window.index, _timings(context, window, requests, passed, timings, timed))
    letters = [quarantine_row(r.id, failure) for r in requests for failure in failures.get(r.item_index, ())]
    if letters:
        write_quarantine(context.folder, window.index, pa.Table.from_pylist(letters, QUARANTINE_SCHEMA))
    written = [row["item_index"] for row in rows if row["status"] == "ok"]
    quarantine = count_codes(row["code"] for row in rows)
    counts = {
        "items_written": len(written),
        "items_reused": sum(index in reused for index in written),
        "items_quarantined": sum(quarantine.values()),
    }
    return {"counts": counts, "quarantine": quarantine, "letters": letters}


def _timings(
    context: StageContext,
    window: Window,
    requests: Sequence[Request],
    passed: Passed,
    timings: Sequence[Mapping[str, Any]],
    timed: Sequence[str],
) -> pa.Table:
    encodes = bool(context.checked.verdicts)
    found = cost_columns(
        [request.item_index for request in requests],
        encode_plan=context.folder.read_json(plan_name(window.index)) if encodes else None,
        encoded=read_encoded(context, window).to_pylist() if encodes else (),
        plan=passed.plan,
        answered=passed.answered,
        publishing=publishing_since(passed.started_at),
    )
    known = {row["item_index"]: row for row in timings} or {r.item_index: timed_item(r, ()) for r in requests}
    schema = pa.schema([*TIMED_ITEM, *((name, pa.float64()) for name in timed), *COST_COLUMNS])
    return pa.Table.from_pylist([{**row, **found[item]} for item, row in known.items()], schema)


def described_scores(space: ScoreSpace | None) -> dict[str, str]:
    """The metadata of a part with scores: model, labels, activation and contract, as `headrace.scores`."""
    assert space is not None
    return {"headrace.scores": json.dumps(dataclasses.asdict(space), sort_keys=True)}


# What timings begin with: of which item they are, and of what kind and size it is.
TIMED_ITEM = (("item_index", pa.int64()), ("modality", pa.string()), ("encoder_tokens", pa.int64()))


def timed_item(request: Request, media: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of `TIMED_ITEM`. `media` are the item's rows (`ENCODED_SCHEMA`), which know what a listing without
    modalities does not: `modality` is theirs, `mixed`, or `text` without media; `encoder_tokens` their patches, null
    where none of them came through."""
    found = {row["modality"] for row in media} or {each.modality for each in request.media} or {"text"}
    kind = str(next(iter(found)) or "unknown") if len(found) == 1 else "mixed"
    sizes = [row["encoder_tokens"] for row in media if row["encoder_tokens"] is not None]
    return {
        "item_index": request.item_index,
        "modality": kind,
        "encoder_tokens": sum(sizes) if sizes else None,
    }


def reused_items(media: Mapping[int, Sequence[Mapping[str, Any]]]) -> set[int]:
    """Items whose media (`ENCODED_SCHEMA`), of which they have some, were all encoded before."""
    return {index for index, each in media.items() if each and all(row["reused"] for row in each)}


def summed_times(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """An item's times over its media: added up, null where none was taken."""
    taken = {name: [row[name] for row in rows if row[name] is not None] for name in names}
    return {name: sum(times) if times else None for name, times in taken.items()}
