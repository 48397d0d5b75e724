"""How far a run is, told from its folder alone: while it runs, after it was cut off, and when it has ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.planning.windows import plan_windows
from pipeline.runs.ledger import Ledger
from pipeline.runs.lock import current_holder
from pipeline.runs.manifest import FROZEN_INDEX, read_frozen
from pipeline.runs.receipts import PassName, ReceiptBook
from pipeline.runs.run_folder import read_config
from pipeline.runs.summary import SUMMARY_NAME
from pipeline.storage import Folder

PASSES: tuple[PassName, ...] = ("encode", "generate", "pool")
State = Literal["listing", "running", "interrupted", "done"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassStatus:
    """What a pass has finished: windows, and the items in them."""

    windows: int
    items: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """`items_in`, `windows` are None before the listing is frozen; `holder` is who runs it: host, pid, since when.

    `passes` has those that have finished a window; an item is finished when the last of its passes is. `counts` are of
    finished items alone: `items_written`, `items_quarantined`, `items_skipped`; `quarantine` is code → how many.
    `cpu_seconds` and `accelerator_seconds` are what finished windows took, by stage.
    """

    run_id: str
    url: str
    job: str
    state: State
    holder: dict[str, Any] | None
    items_in: int | None
    windows: int | None
    passes: dict[str, PassStatus] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    quarantine: dict[str, int] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    accelerator_seconds: dict[str, float] = field(default_factory=dict)


def run_status(run: Folder) -> RunStatus:
    """The status of the run in the folder `run`, from its small files: the ledger's lines are most of them."""
    config = read_config(run)
    holder = current_holder(run)
    listed = run.exists(FROZEN_INDEX)
    about: dict[str, Any] = {
        "run_id": run.url.rstrip("/").rpartition("/")[2],
        "url": run.url,
        "job": config.job,
        "holder": holder,
    }
    if not listed:
        state: State = "listing" if holder is not None else "interrupted"
        return RunStatus(**about, state=state, items_in=None, windows=None)
    items_in = read_frozen(run).num_items
    windows = plan_windows(items_in, first_items=config.ray.first_window_items, full_items=config.window_items)
    ledger = Ledger(run)
    finished = {name: ledger.finished(name) for name in PASSES}
    counts, quarantine = Counter[str](), Counter[str]()
    for name in ("generate", "pool"):
        for entry in finished[name].values():
            counts.update(entry["items"].get("counts", {}))
            quarantine.update(entry["items"].get("quarantine", {}))
    book = ReceiptBook()
    for name in PASSES:
        for window, entry in finished[name].items():
            book.restore(name, window, entry)
    ended = run.exists(SUMMARY_NAME)
    return RunStatus(
        **about,
        state="running" if holder is not None else "done" if ended else "interrupted",
        items_in=items_in,
        windows=len(windows),
        passes={
            name: PassStatus(
                windows=len(entries), items=sum(windows[index].stop - windows[index].start for index in entries)
            )
            for name, entries in finished.items()
            if entries
        },
        counts={name: counts[name] for name in ("items_written", "items_quarantined", "items_skipped")},
        quarantine=dict(quarantine.most_common()),
        cpu_seconds=book.cpu_seconds,
        accelerator_seconds=book.accelerator_seconds,
    )


def status_text(status: RunStatus) -> str:
    """For people."""
    lines = [f"{status.run_id}  {status.job}  {status.state}", f"output       {status.url}"]
    if status.holder is not None:
        lines.append("held by      host {host}, pid {pid}, since {started}".format(**status.holder))
    if status.items_in is None:
        return "\n".join([*lines, "items        not listed yet"])
    lines.append(f"items        {status.items_in:,} in {status.windows:,} windows")
    for name, each in status.passes.items():
        share = each.items / status.items_in if status.items_in else 1.0
        lines.append(f"{name:12} {each.items:,} items, {each.windows:,} windows ({share:.0%})")
    if any(status.counts.values()):
        told = ", ".join(f"{count:,} {name.removeprefix('items_')}" for name, count in status.counts.items())
        lines.append(f"finished     {told}")
    if status.cpu_seconds:
        cpu, accelerator = sum(status.cpu_seconds.values()), sum(status.accelerator_seconds.values())
        lines.append(f"cost         {cpu:,.1f} CPU seconds, {accelerator:,.1f} accelerator seconds")
    lines += [f"quarantined  {count:,} {code}" for code, count in status.quarantine.items()]
    if status.state == "interrupted":
        lines.append("to resume    start the same command again")
    return "\n".join(lines)
