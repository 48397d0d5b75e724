"""Items taken out of what a run has written: their rows stay, so that all adds up, and say nothing any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import ConfigError
from pipeline.planning.windows import Window, plan_windows
from pipeline.runs.frozen_rows import FROZEN_SCHEMA
from pipeline.runs.ledger import Ledger
from pipeline.runs.manifest import read_frozen, replace_rows
from pipeline.runs.run_folder import CONFIG_NAME, read_config
from pipeline.runs.run_page import write_run_page
from pipeline.runs.status import run_status
from pipeline.runs.summary import SUMMARY_NAME
from pipeline.sinks.parquet import part_name, write_part, write_quarantine, write_timings
from pipeline.storage import Folder

DELETED = "deleted"  # the code of an item that was, with the status `skipped`
_ENCODED = "_run/encoded"
_SCRATCH = ("_run/plans", "_run/base.npy", "_work", "_retry")  # of a run that has ended; they name items, too


def ended_runs(output: Folder) -> list[Folder]:
    """The runs below an output folder. Raises `ConfigError` when one has not ended: it could write anew what goes."""
    runs = [output.sub(name) for name in output.folders() if output.sub(name).exists(CONFIG_NAME)]
    for run in runs:
        status = run_status(run)
        if status.state != "done":
            held = "" if status.holder is None else " by host {host}, pid {pid}".format(**status.holder)
            raise ConfigError(f"{run.url}: {status.state}{held}; let the run end, or remove its folder, then delete")
    return runs


def listed_items(run: Folder, is_meant: Callable[[dict[str, Any]], bool]) -> list[int]:
    """The items, ascending, whose row (`item_index`, `id`, `tenant`) in the frozen listing is meant."""
    return [row["item_index"] for row in listed_rows(run) if is_meant(row)]


def listed_rows(run: Folder) -> Iterator[dict[str, Any]]:
    """`item_index`, `id` and `tenant` of every item."""
    columns = [name for name in FROZEN_SCHEMA.names if name in ("item_index", "id", "tenant")]
    for name in read_frozen(run).files:
        with run.open(name) as file:
            yield from pq.read_table(file, columns=columns).to_pylist()


def items_of_keys(run: Folder, keys: Collection[str]) -> list[int]:
    """The items, ascending, that have features of these keys."""
    return sorted({row["item_index"] for row in _encoded(run) if row["key"] in keys})


def keys_of_items(run: Folder, items: Collection[int]) -> set[str]:
    """The keys of the features of these items."""
    return {row["key"] for row in _encoded(run) if row["item_index"] in items and row["key"]}


def _encoded(run: Folder) -> Iterator[dict[str, Any]]:
    for name in run.list(_ENCODED, suffix=".parquet"):
        with run.open(f"{_ENCODED}/{name}") as file:
            yield from pq.read_table(file, columns=["item_index", "key"]).to_pylist()


def forget_items(run: Folder, items: Collection[int]) -> int:
    """Take `items` out of a run that has ended; returns how many rows of its parts changed.

    Their rows in parts become `skipped` with the code `deleted`, under an id that says nothing; those in the listing
    likewise. Dead letters and times go, as do plans. Counts, summary and page are made anew. May be done again.
    """
    config, frozen = read_config(run), read_frozen(run)
    windows = plan_windows(frozen.num_items, first_items=config.ray.first_window_items, full_items=config.window_items)
    chosen = frozenset(items)
    replace_rows(run, lambda row: _blank_request(row) if row["item_index"] in chosen else row)
    changed = 0
    ledger = Ledger(run)
    answering = "generate" if ledger.windows("generate") else "pool"
    for window in windows:
        if any(window.start <= item < window.stop for item in chosen):
            changed += _forget_in_window(run, ledger, answering, window, chosen)
    for name in _SCRATCH:
        run.remove(name)
    _write_anew(run)
    return changed


def _blank_request(row: dict[str, Any]) -> dict[str, Any]:
    blank = dict.fromkeys(FROZEN_SCHEMA.names)
    return {**blank, "item_index": row["item_index"], "id": _blank_id(row["item_index"]), "media": [], "tenant": ""}


def _blank_id(item_index: int) -> str:
    return f"{DELETED}-{item_index}"


def _forget_in_window(run: Folder, ledger: Ledger, answering: str, window: Window, chosen: frozenset[int]) -> int:
    part = _read(run, part_name(window.index))
    assert part is not None  # the run has ended
    kept = _without(part, chosen)
    assert kept is not None
    blank = [_blank_row(item, part.schema) for item in sorted(chosen) if window.start <= item < window.stop]
    part = pa.concat_tables([kept, pa.Table.from_pylist(blank, part.schema)]).sort_by("item_index")
    write_part(run, window.index, part, part.schema)
    letters = _without(_read(run, f"quarantine/{part_name(window.index)}"), chosen)
    if letters is not None:
        write_quarantine(run, window.index, letters) if len(letters) else run.remove(
            f"quarantine/{part_name(window.index)}"
        )
    timings = _without(_read(run, f"timings/{part_name(window.index)}"), chosen)
    if timings is not None:
        write_timings(run, window.index, timings)
    encoded = f"{_ENCODED}/window-{window.index:06d}.parquet"
    left = _without(_read(run, encoded), chosen)
    if left is not None:
        with run.writing(encoded) as file:
            pq.write_table(left, file, compression="zstd")
    statuses = Counter(part["status"].to_pylist())
    quarantined = part.filter(pc.equal(part["status"], "quarantined"))
    entry = ledger.read(answering, window.index)
    entry["items"]["counts"] |= {
        "items_written": statuses["ok"],
        "items_quarantined": statuses["quarantined"],
        "items_skipped": statuses["skipped"],
    }
    entry["items"]["quarantine"] = dict(Counter(quarantined["code"].to_pylist()))
    ledger.replace(answering, window.index, entry)
    if ledger.has("encode", window.index):
        # Of a run that has ended nobody asks for them; they say of which tenants they are.
        entry = ledger.read("encode", window.index)
        entry["items"] |= {"shards": [], "shards_written": []}
        ledger.replace("encode", window.index, entry)
    return len(blank)


def _blank_row(item_index: int, schema: pa.Schema) -> dict[str, Any]:
    blank: dict[str, Any] = dict.fromkeys(schema.names)
    blank |= {"item_index": item_index, "id": _blank_id(item_index), "status": "skipped", "code": DELETED}
    if "tenant" in schema.names:
        blank["tenant"] = ""
    return blank


def _read(run: Folder, name: str) -> pa.Table | None:
    if not run.exists(name):
        return None
    with run.open(name) as file:
        return pq.read_table(file)


def _without(table: pa.Table | None, chosen: Collection[int]) -> pa.Table | None:
    if table is None:
        return None
    return table.filter(pc.invert(pc.is_in(table["item_index"], pa.array(sorted(chosen), pa.int64()))))


def _write_anew(run: Folder) -> None:
    """Summary and page, of the parts as they are now."""
    summary = run.read_json(SUMMARY_NAME)
    statuses, codes = Counter[str](), Counter[str]()
    for name in run.list(suffix=".parquet"):
        with run.open(name) as file:
            table = pq.read_table(file, columns=["status", "code"])
        statuses.update(table["status"].to_pylist())
        codes.update(table.filter(pc.equal(table["status"], "quarantined"))["code"].to_pylist())
    summary |= {
        "items_written": statuses["ok"],
        "items_quarantined": statuses["quarantined"],
        "items_skipped": statuses["skipped"],
        "quarantine": dict(codes),
    }
    write_run_page(run, summary)
    run.write_json(SUMMARY_NAME, summary, indent=2)
