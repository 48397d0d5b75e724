"""Working on what a run has quarantined once more: the items become a run of their own, whose rows replace theirs.

`_retry/<n>.json` has the `item_index` of each, in order, and whether they are `merged`; `_retry/retry-<n>/` is the run.
Every step can be cut off and done again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.planning.windows import Window, plan_windows
from pipeline.runs.frozen_rows import FROZEN_SCHEMA, frozen_row
from pipeline.runs.ledger import Ledger
from pipeline.runs.manifest import read_frozen, read_range
from pipeline.runs.run import TEXTS
from pipeline.runs.run_folder import read_config
from pipeline.runs.summary import COUNTS, SECONDS, SUMMARY_NAME
from pipeline.runs.tables import write_manifest
from pipeline.sinks.parquet import part_name, write_part, write_quarantine, write_timings
from pipeline.storage import Folder

_FOLDER = "_retry"
_COSTS = ("cpu_seconds", "accelerator_seconds", "bytes_fetched")
_ITEM_COUNTS = ("items_written", "items_quarantined", "items_skipped")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """The `number`-th retry of a run: which of its items, and the configuration of the run that works on them."""

    number: int
    items: tuple[int, ...]
    config: Config


def begin_retry(run: Folder, codes: Collection[str] = ()) -> Retry | None:
    """Choose what the run has quarantined, with one of `codes` where some are given; None when there is nothing.

    A retry that was cut off is gone on with, whatever its codes. Raises `ConfigError` when the run has not ended.
    """
    if not run.exists(SUMMARY_NAME):
        raise ConfigError(f"{run.url}: the run has not ended; start its command again, which goes on with it")
    config = read_config(run)
    number = len(run.list(_FOLDER, suffix=".json"))
    if number:
        known = run.read_json(_state_name(number))
        if not known["merged"]:
            return Retry(number=number, items=tuple(known["items"]), config=_config_of(run, config, number, known))
    number += 1
    items = _quarantined(run, config, codes)
    if not items:
        return None
    rows = [frozen_row(request) for item in items for request in read_range(run, item, item + 1)]
    table = pa.Table.from_pylist(rows, FROZEN_SCHEMA).drop_columns("item_index")
    manifest = write_manifest([table], run.sub(_FOLDER), TEXTS.get(config.job, ()))
    state = {"items": items, "input": manifest, "merged": False}
    run.write_json(_state_name(number), state)
    return Retry(number=number, items=tuple(items), config=_config_of(run, config, number, state))


def _state_name(number: int) -> str:
    return f"{_FOLDER}/{number:04d}.json"


def _config_of(run: Folder, config: Config, number: int, state: dict[str, Any]) -> Config:
    return config.model_copy(
        update={
            "input": state["input"],
            "output": run.sub(_FOLDER).url,
            "run_id": f"retry-{number:04d}",
            "limit": None,
            "sample_fraction": None,
            "demo_media": None,
            "max_quarantined_fraction": 1.0,
            "incremental": type(config.incremental)(),
        }
    )


def _quarantined(run: Folder, config: Config, codes: Collection[str]) -> list[int]:
    """Ascending. Documents whose pages could not be counted are left out: they would become items that no part has."""
    found: list[int] = []
    for name in run.list(suffix=".parquet"):
        with run.open(name) as file:
            part = pq.read_table(file, columns=["item_index", "status", "code"])
        chosen = pc.equal(part["status"], "quarantined")
        if codes:
            chosen = pc.and_(chosen, pc.is_in(part["code"], pa.array(sorted(codes), pa.string())))
        found += part.filter(chosen)["item_index"].to_pylist()
    if config.job != "index_documents":
        return found
    return [item for item in found if all(m.page is not None for r in read_range(run, item, item + 1) for m in r.media)]


def merge_retry(run: Folder, retry: Retry) -> None:
    """Put the rows of the retry's run, which has ended, in the place of those they are of, window by window.

    Parts, timings and dead letters are each replaced whole.
    """
    source = run.sub(f"{_FOLDER}/retry-{retry.number:04d}")
    config = read_config(run)
    windows = plan_windows(
        read_frozen(run).num_items, first_items=config.ray.first_window_items, full_items=config.window_items
    )
    parts, timings, letters = (_all_rows(source, folder, retry.items) for folder in ("", "timings", "quarantine"))
    ledger, first = Ledger(run), True
    answering = "generate" if ledger.windows("generate") else "pool"
    for window in windows:
        if any(window.start <= item < window.stop for item in retry.items):
            part = _replace(run, window, parts, timings, letters, retry.items)
            costs = source.read_json(SUMMARY_NAME) if first else {}
            _account(ledger, answering, window, part, retry.number, costs)
            first = False
    run.write_json(_state_name(retry.number), {**run.read_json(_state_name(retry.number)), "merged": True})


def _all_rows(source: Folder, folder: str, items: Sequence[int]) -> pa.Table | None:
    """The rows of a run's files, with the item's own `item_index`; None when there are none."""
    tables = []
    for name in source.list(folder, suffix=".parquet"):
        with source.open(f"{folder}/{name}".lstrip("/")) as file:
            tables.append(pq.read_table(file))
    if not tables:
        return None
    table = pa.concat_tables(tables)
    own = pa.array(items, pa.int64()).take(table["item_index"].combine_chunks())
    return table.set_column(table.schema.get_field_index("item_index"), "item_index", own)


def _replace(
    run: Folder,
    window: Window,
    parts: pa.Table | None,
    timings: pa.Table | None,
    letters: pa.Table | None,
    items: Sequence[int],
) -> pa.Table:
    part = _merged(_read(run, "", window), parts, window, items)
    assert part is not None  # a window has rows
    before, after = _read(run, "quarantine", window), letters
    if after is not None and before is not None:
        after = _with_attempts(after, before)
    lost = _merged(before, after, window, items)
    if lost is not None and len(lost):
        write_quarantine(run, window.index, lost)
    else:
        run.remove(f"quarantine/{part_name(window.index)}")
    timed = _read(run, "timings", window)
    took = _merged(timed, _with_costs(timings, timed), window, items)
    if took is not None:
        write_timings(run, window.index, took)
    write_part(run, window.index, part, part.schema)
    return part


def _read(run: Folder, folder: str, window: Window) -> pa.Table | None:
    name = f"{folder}/{part_name(window.index)}".lstrip("/")
    if not run.exists(name):
        return None
    with run.open(name) as file:
        return pq.read_table(file)


def _merged(kept: pa.Table | None, new: pa.Table | None, window: Window, items: Sequence[int]) -> pa.Table | None:
    """`kept` but for `items`, and of `new` what is of the window; in order of items."""
    tables = []
    if kept is not None:
        tables.append(kept.filter(pc.invert(pc.is_in(kept["item_index"], pa.array(items, pa.int64())))))
    if new is not None:
        index = new["item_index"]
        ours = pc.and_(pc.greater_equal(index, window.start), pc.less(index, window.stop))
        tables.append(new.filter(ours).replace_schema_metadata(tables[0].schema.metadata if tables else None))
    # By name: a run that is older than a column has parts without it.
    return pa.concat_tables(tables, promote_options="default").sort_by("item_index") if tables else None


def _with_attempts(letters: pa.Table, before: pa.Table) -> pa.Table:
    """Dead letters that count the attempts of those they replace."""
    attempts: dict[int, int] = {}
    for row in before.select(["item_index", "attempts"]).to_pylist():
        attempts[row["item_index"]] = max(row["attempts"], attempts.get(row["item_index"], 0))
    counted = [
        row["attempts"] + attempts.get(row["item_index"], 0)
        for row in letters.select(["item_index", "attempts"]).to_pylist()
    ]
    place = letters.schema.get_field_index("attempts")
    return letters.set_column(place, letters.schema.field(place), pa.array(counted, pa.int32()))


def _with_costs(timings: pa.Table | None, before: pa.Table | None) -> pa.Table | None:
    """Timings whose costs have in them those that they replace: what was spent is not got back.

    Rows that are in their place already, put there before the retry was cut off, have it.
    """
    if timings is None or before is None or not {"wall_seconds", *_COSTS} <= set(before.column_names):
        return timings
    replaced = {row["item_index"]: row for row in before.select(["item_index", "wall_seconds", *_COSTS]).to_pylist()}
    rows = timings.to_pylist()
    for row in rows:
        spent = replaced.get(row["item_index"])
        if spent is None:
            continue
        again = spent["wall_seconds"] != row["wall_seconds"]
        row.update({name: (row[name] if again else 0) + (spent[name] or 0) for name in _COSTS})
    return pa.Table.from_pylist(rows, timings.schema)


def _account(
    ledger: Ledger, answering: str, window: Window, part: pa.Table, number: int, costs: dict[str, Any]
) -> None:
    """Count the window's items anew, and add what the retry cost, once."""
    entry = ledger.read(answering, window.index)
    statuses = Counter(part["status"].to_pylist())
    codes = Counter(part.filter(pc.equal(part["status"], "quarantined"))["code"].to_pylist())
    items = entry["items"]
    items["counts"] |= {"items_written": statuses["ok"], "items_quarantined": statuses["quarantined"]}
    items["quarantine"] = dict(codes)
    if number not in entry.setdefault("retries", []):
        entry["retries"].append(number)
        for name in COUNTS:
            if costs.get(name) and name not in _ITEM_COUNTS:
                kind = items["counts"] if name == "items_reused" else entry["counts"]
                kind[name] = kind.get(name, 0) + costs[name]
        for stage in set(costs.get("seconds", {})) - set(SECONDS):
            entry["seconds"][stage] = entry["seconds"].get(stage, 0.0) + costs["seconds"][stage]
        for kind in ("cpu_seconds", "accelerator_seconds"):
            sums = entry.setdefault(kind, {})
            for stage, seconds in costs.get(kind, {}).items():
                sums[stage] = sums.get(stage, 0.0) + seconds
    ledger.replace(answering, window.index, entry)
