"""A store within its bounds.

As scratch: what a run puts there for a segment of windows goes when the segment is answered; with `store.max_bytes` a
segment is as many windows as there is room for. Kept: what is too old or too much goes before a run and after it.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from datetime import timedelta

from pipeline import engine
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.features.evict import evict, worth_seconds
from pipeline.features.shard import SHARD_OVERHEAD_BYTES
from pipeline.planning.windows import Window, num_fitting
from pipeline.runs.ledger import Ledger
from pipeline.runs.own_shards import forget_shards, noted_shards
from pipeline.runs.receipts import PassName
from pipeline.runs.tiers import TierSize
from pipeline.stages import memory
from pipeline.stages.context import StageContext
from pipeline.stages.opened_store import open_store
from pipeline.stages.plan_ahead import WindowBytes, awaited_shards, plan_ahead
from pipeline.stages.window_plan import planned_windows

ACTORS_END_SECONDS = 120  # after their pass, at most
_SHARDS_A_BOUND = 4  # a writer's: what sealing copies at a time is a quarter of the bound at most


def with_small_shards(config: Config, writers: int) -> Config:
    """For a bounded store whose shards are sealed: so small that a copy of one a writer is little."""
    store = config.store
    if store.max_bytes is None or store.retention != "segment":
        return config
    shard_bytes = min(store.shard_bytes, max(1, store.max_bytes // (_SHARDS_A_BOUND * writers)))
    return config.model_copy(update={"store": store.model_copy(update={"shard_bytes": shard_bytes})})


def segments_that_fit(
    context: StageContext, windows: Sequence[Window], max_bytes: int, writers: int
) -> Iterator[list[Window]]:
    """Segments of as many windows as there is room for when each is asked for; the one before must be released by then.

    Windows ahead are planned for it, as many at a time as the cluster has CPUs. Raises `ConfigError` for a window that
    the store could not even hold by itself; with another `store.max_bytes` the run goes on from there.
    """
    config = context.config
    store, limit = open_store(config.store), config.ray.segment_windows
    # Shards end with their bytes (two that follow one another hold more than one at most) or with their windows.
    shards = writers + 2 * max_bytes // config.store.shard_bytes
    step = min(limit, math.floor(engine.describe_cluster().num_cpus))
    unplanned, planned = deque(windows), list[WindowBytes]()
    while unplanned or planned:
        room = max_bytes - shards * SHARD_OVERHEAD_BYTES - store.num_bytes()
        while unplanned and (not planned or _more_may_fit(planned, room, limit)):
            some = [unplanned.popleft() for _ in range(min(step, len(unplanned)))]
            arguments = [(context, window, writers) for window in some]
            planned += engine.run_tasks(plan_ahead, arguments, memory_bytes=memory.plan_bytes(config))
        count = num_fitting([each.missing_bytes for each in planned], room, limit)
        if count == 0:
            own = sum(store.shard_num_bytes(shard) for shard in noted_shards(context.folder))
            _check_fits(planned[0], room + own, max_bytes)
            count = 1  # what is in its way are batches that starts which were killed have stored twice
        yield [each.window for each in planned[:count]]
        planned = planned[count:]


def _more_may_fit(planned: Sequence[WindowBytes], room: int, limit: int) -> bool:
    return len(planned) < limit and sum(each.missing_bytes for each in planned) <= room


def _check_fits(planned: WindowBytes, free: int, max_bytes: int) -> None:
    if planned.num_bytes <= free:
        return
    window, free = planned.window, max(0, free)
    fewer = (window.stop - window.start) * free // planned.num_bytes
    smaller = f", or ray.window_items to {fewer} at most, which starts another run" if fewer else ""
    raise ConfigError(
        f"items {window.start} to {window.stop - 1} are one window, whose features take up to {planned.num_bytes} "
        f"bytes, and of store.max_bytes ({max_bytes}) {free} are free for them; set store.max_bytes to "
        f"{max_bytes - free + planned.num_bytes} or more, with which the run goes on{smaller}"
    )


def release(context: StageContext, windows: Sequence[Window], answering: PassName) -> None:
    """Delete what this run has put into the store, its disk space with it, but for what those of its `windows` that the
    pass `answering` has not finished cannot do without.

    Waits for the workers of the last pass to end. Raises `RuntimeError` when somebody goes on writing or reading.
    """
    engine.end_actors()
    waiting = sorted(set(planned_windows(context.folder)).difference(Ledger(context.folder).windows(answering)))
    arguments = [(context, windows[index]) for index in waiting]
    awaited = engine.run_tasks(awaited_shards, arguments, memory_bytes=memory.plan_bytes(context.config))
    released = sorted(noted_shards(context.folder).difference(*awaited))
    deadline = time.monotonic() + ACTORS_END_SECONDS
    used = released
    while used:
        used = sorted(set().union(*engine.run_on_every_node(_delete_unused, context.config, used)))
        if used and time.monotonic() > deadline:
            raise RuntimeError(
                f"shards are still written or read {ACTORS_END_SECONDS} s after their pass: {used}; end what uses the "
                "store besides this run, then start the same command again"
            )
        time.sleep(0.1 if used else 0)
    forget_shards(context.folder, released)


def evict_records(config: Config, to_size: bool) -> dict[str, int]:
    """Bring a kept store down to what it may hold, as `evict` does: `evictions` and `evicted_bytes`, as counts, and the
    same of each tier.

    Waits for the workers of the last pass to end: what they read stays until then.
    """
    store, section = open_store(config.store), config.store
    max_bytes, frames_max_bytes = (section.max_bytes, section.frames_max_bytes) if to_size else (None, None)
    ttl = None if section.ttl is None else timedelta(seconds=section.ttl)
    byte_seconds = None
    if to_size and section.gb_month is not None and section.worker_hour is not None and section.ttl is not None:
        byte_seconds = worth_seconds(section.gb_month, section.worker_hour, section.ttl)
    deadline, counts = time.monotonic() + ACTORS_END_SECONDS, Counter(evictions=0, evicted_bytes=0)
    while True:
        bounds = {"max_bytes": max_bytes, "frames_max_bytes": frames_max_bytes}
        for tier in evict(store, ttl=ttl, byte_seconds=byte_seconds, **bounds):
            for name in ("", f"{tier.tier}_"):
                counts[f"{name}evictions"] += tier.expired + tier.evicted
                counts[f"{name}evicted_bytes"] += tier.num_bytes
        shards = [shard.shard_id for shard in store.sealed_shards()]
        is_over = max_bytes is not None and store.num_bytes() > max_bytes
        if not is_over or not store.in_use(shards) or time.monotonic() > deadline:
            return dict(counts)
        time.sleep(0.5)


def tier_sizes(config: Config) -> dict[str, TierSize]:
    """What the tiers of a kept store take, and may; nothing of scratch."""
    section = config.store
    if section.retention == "segment":
        return {}
    store = open_store(section)
    frames = sum(part.frames.num_bytes() for part in store.parts())
    own_max_bytes = min(filter(None, (section.frames_max_bytes, section.max_bytes)), default=None)
    return {
        "frames": TierSize(num_bytes=frames, max_bytes=own_max_bytes),
        "features": TierSize(num_bytes=store.num_bytes() - frames, max_bytes=section.max_bytes),
    }


def _delete_unused(config: Config, shards: list[str]) -> list[str]:
    store = open_store(config.store)
    used = store.in_use(shards)
    store.delete_shards([shard for shard in shards if shard not in used])
    return used
