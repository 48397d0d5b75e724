"""Planning ahead of a segment: what windows will put into the store is known before they are encoded."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.features.shard import SHARD_OVERHEAD_BYTES, disk_bytes
from pipeline.planning.windows import Window
from pipeline.stages.context import StageContext
from pipeline.stages.encode_finish import encoded_name, read_encoded
from pipeline.stages.encode_plan import written_plan
from pipeline.stages.outcomes import encode_batch_receipts, read_finished
from pipeline.stages.record_size import record_bytes
from pipeline.stages.window_plan import load_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowBytes:
    """What a planned window's features take in the store, at most, and the part that has not been encoded yet."""

    window: Window
    num_bytes: int
    missing_bytes: int


def plan_ahead(context: StageContext, window: Window, writers: int) -> WindowBytes:
    """Have the window's plan written down, and say what it comes to, in shards of as many `writers`.

    Each of them starts a shard with every so many windows, and one of each tenant with every window at most.
    """
    plan = written_plan(context, window)
    tenants = {media.tenant for media in plan.media} - {""}
    besides = writers * SHARD_OVERHEAD_BYTES // context.config.store.shard_windows
    besides += min(len(tenants) * writers, len(plan.media)) * SHARD_OVERHEAD_BYTES
    done = encode_batch_receipts(context.folder, window.index)
    by_position = {media.position: media for media in plan.media}
    num_bytes = missing_bytes = besides
    for number, (digest, positions) in enumerate(plan.batches):
        batch = sum(disk_bytes(record_bytes(context, by_position[position])) for position in positions)
        num_bytes += batch
        missing_bytes += 0 if (number, digest) in done else batch
    return WindowBytes(window=window, num_bytes=num_bytes, missing_bytes=missing_bytes)


def awaited_shards(context: StageContext, window: Window) -> set[str]:
    """The shards that a window which is planned and not answered cannot do without."""
    if context.folder.exists(encoded_name(window.index)):
        return {shard for shard in read_encoded(context, window)["shard"].to_pylist() if shard}
    plan = load_plan(context, window)
    hits = {shard for _, shard in plan.hits.values()} if plan is not None else set()
    outcomes = read_finished(context.folder, "encode", window.index)
    return hits.union(shard for table in outcomes for shard in table["shard"].to_pylist() if shard)
