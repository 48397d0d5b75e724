"""What the driver logs of a run: from receipts and published windows, each once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pipeline.runs.receipts import PassName
from pipeline.runs.summary import FALLBACK_COUNT
from pipeline.schema import Receipt

_log = logging.getLogger(__name__)


def log_started(num_items: int, output: str) -> None:
    """A run has its listing."""
    _log.info("run started", extra={"items": num_items, "output": output})


def log_resumed(pass_name: PassName, windows: Iterable[int]) -> None:
    """An earlier start finished these windows; nothing is said of none."""
    done = sorted(windows)
    if done:
        _log.info("run resumed", extra={"pass": pass_name, "windows": len(done), "last_window": done[-1]})


def log_receipt(receipt: Receipt, pass_name: PassName) -> None:
    """A window was planned, or a batch is put away; and what a cache listed and could not give."""
    where: dict[str, Any] = {"pass": pass_name, "window": receipt.window}
    if receipt.batch >= 0:
        where |= {"batch": receipt.batch, "digest": receipt.digest}
    found = {name: count for name, count in receipt.counts.items() if count and ":" not in name}
    seconds = {name: round(each, 6) for name, each in receipt.seconds.items()}
    said = "batch done" if receipt.batch >= 0 else "window planned"
    _log.info(said, extra={**where, "counts": found, "seconds": seconds, "quarantine": receipt.quarantine})
    for name, count in receipt.counts.items():
        if name.startswith(FALLBACK_COUNT):
            shard = name.removeprefix(FALLBACK_COUNT)
            _log.info("fallback", extra={**where, "tier": "features", "shard": shard, "media": count})
    if receipt.counts.get("frames_fallbacks"):
        _log.info("fallback", extra={**where, "tier": "frames", "media": receipt.counts["frames_fallbacks"]})


def log_published(window: int, counts: Mapping[str, int], letters: Iterable[Mapping[str, Any]]) -> None:
    """A window's rows are published; `letters` (`QUARANTINE_SCHEMA`) say which items are in quarantine, and why."""
    for letter in letters:
        why = {name: letter[name] for name in ("item_index", "media_index", "stage", "code")}
        _log.info("quarantined", extra={"window": window, "item": letter["id"], **why, "reason": letter["message"]})
    _log.info("window published", extra={"window": window, "counts": dict(counts)})


def log_lost(pass_name: PassName, receipts: Collection[Receipt]) -> None:
    """A node took these batches with it, which are done again."""
    lost = {"pass": pass_name, "batches": len(receipts), "windows": len({receipt.window for receipt in receipts})}
    _log.warning("lost with a node: %(batches)d batches of %(windows)d windows, which are done again", lost, extra=lost)


def log_ended(summary: Mapping[str, Any]) -> None:
    """A run has its summary."""
    names = ("items_in", "items_written", "items_reused", "items_quarantined", "items_skipped")
    extra = {"counts": {name: summary[name] for name in names}, "seconds": {"total": summary["seconds"]["total"]}}
    _log.info("run ended", extra=extra)
