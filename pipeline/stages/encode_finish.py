"""A window of the encode pass is done: what became of each of its media items, in one file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.features.catalogue import SourceEntry
from pipeline.features.codec import FeatureRecord
from pipeline.planning.windows import Window
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import ENCODE_OUTCOME, read_outcomes
from pipeline.stages.spending import SPENT
from pipeline.stages.window_plan import WindowPlan, load_plan, plan_name

ENCODE_TIMES = [name for name in ENCODE_OUTCOME.names if name.endswith("_ms")]
_STEPS = ("decode_started_at", "decode_seconds", "started_at", "seconds")
_SPENT = ("decode_started_at", "decode_seconds", "decode_cpu_seconds", "bytes_fetched", *(name for name, _ in SPENT))
ENCODED_SCHEMA = pa.schema(
    [
        ("item_index", pa.int64()),
        ("media_index", pa.int32()),
        ("modality", pa.string()),
        ("encoder_tokens", pa.int64()),
        ("key", pa.string()),
        ("shard", pa.string()),
        ("reused", pa.bool_()),
        ("stage", pa.string()),
        ("code", pa.string()),
        ("message", pa.string()),
        *((name, pa.float64()) for name in ENCODE_TIMES),
        *(ENCODE_OUTCOME.field(name) for name in _SPENT),
    ]
)


def finish_encode_window(context: StageContext, window: Window) -> dict[str, Any]:
    """Write `_run/encoded/<window>` and tell a store that is kept what was learnt of sources; may be done again.

    Returns what the ledger notes besides the totals: the shards that the window's features lie in, and those of them
    that this run wrote.
    """
    plan = load_plan(context, window)
    if plan is None:
        raise RuntimeError(f"window {window.index} has receipts but no plan under {context.run_url}")
    rows, contents = _encoded_rows(context, plan)
    table = pa.Table.from_pylist(rows, ENCODED_SCHEMA)
    with context.folder.writing(encoded_name(window.index)) as file:
        pq.write_table(table, file, compression="zstd")
    if context.config.store.retention != "segment":  # scratch would grow with the run, for features that are gone
        learnt: dict[str, dict[str, SourceEntry]] = defaultdict(dict)
        for media in plan.media:
            if media.position in contents:
                entry = SourceEntry(content=contents[media.position], probe=media.probe)
                learnt[media.tenant][media.source_id] = entry
        for tenant, entries in learnt.items():
            context.store.of_tenant(tenant).sources.record(entries)
    shards = {row["shard"] for row in rows if row["shard"]}
    written = {row["shard"] for row in rows if row["shard"] and not row["reused"]}
    return {"shards": sorted(shards), "shards_written": sorted(written)}


def forget_encode_window(context: StageContext, window: int) -> None:
    """Take back a window whose features are gone: it is planned and encoded anew."""
    for name in (encoded_name(window), plan_name(window), f"_work/encode/window-{window:06d}"):
        context.folder.remove(name)


def read_encoded(context: StageContext, window: Window) -> pa.Table:
    """The window's media (`ENCODED_SCHEMA`), and rows of failed items."""
    with context.folder.open(encoded_name(window.index)) as file:
        return pq.read_table(file, schema=ENCODED_SCHEMA)


def encoded_items(
    context: StageContext, window: Window
) -> tuple[dict[int, list[dict[str, Any]]], dict[int, list[dict[str, Any]]]]:
    """By item, its media (`ENCODED_SCHEMA`) that have features, and the failures of it or its media."""
    media: dict[int, list[dict[str, Any]]] = defaultdict(list)
    failures: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in read_encoded(context, window).to_pylist():
        (failures if row["code"] else media)[row["item_index"]].append(row)
    return dict(media), dict(failures)


def read_records(context: StageContext, rows: Sequence[Mapping[str, Any]]) -> list[FeatureRecord]:
    """The features of rows of `encoded_items`, in order; reads nothing else of the store.

    Raises `RuntimeError` for those that it no longer has.
    """
    found = context.store.fetch([(row["shard"], row["key"]) for row in rows])
    # This process outlives its pass: a shard that it kept mapped would keep its disk space when it is deleted.
    context.store.close()
    records = [record for record in found if record is not None]
    if len(records) < len(found):
        lost = rows[found.index(None)]["item_index"]
        raise RuntimeError(f"item_index {lost}: its features left the store under a running job")
    return records


def encoded_name(window: int) -> str:
    """The file that says where a window's features are."""
    return f"_run/encoded/window-{window:06d}.parquet"


def _encoded_rows(context: StageContext, plan: WindowPlan) -> tuple[list[dict[str, Any]], dict[int, str]]:
    digests = [digest for digest, _ in plan.batches]
    outcomes: dict[int, dict[str, Any]] = {}
    for table in read_outcomes(context.folder, "encode", plan.window.index, digests):
        outcomes.update((row["position"], row) for row in table.to_pylist())
    rows: list[dict[str, Any]] = [{**dict.fromkeys(ENCODED_SCHEMA.names), **failure} for failure in plan.failures]
    learnt = set(plan.learnt)
    contents = {media.position: media.content or "" for media in plan.media if media.position in learnt}
    for media in plan.media:
        base = {
            "item_index": media.item_index,
            "media_index": media.media_index,
            "modality": media.probe.modality,
            "encoder_tokens": media.shaped.tokens,
            "reused": True,
        }
        if media.position in plan.hits:
            key, shard = plan.hits[media.position]
            rows.append({**base, "key": key, "shard": shard})
            continue
        same = plan.same_as.get(media.position)
        outcome = outcomes[media.position if same is None else same]
        taken = {name: outcome[name] for name in ("key", "shard", "stage", "code", "message")}
        # What another of the window stands for was not there before it.
        own = (*ENCODE_TIMES, *_SPENT) if same is None else _STEPS
        times = {name: outcome[name] for name in own}
        rows.append({**base, **taken, **times, "reused": same is not None})
        if outcome["code"] is None:
            contents[media.position] = outcome["content"]
    return rows, contents
