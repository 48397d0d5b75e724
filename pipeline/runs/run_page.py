"""A run's page, from what the run wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ConfigError
from pipeline.planning.calibration import Prices
from pipeline.planning.windows import plan_windows
from pipeline.runs.costs import COST_COLUMNS, RunCosts, run_costs
from pipeline.runs.gallery import choose_rows, with_pictures
from pipeline.runs.ledger import Ledger
from pipeline.runs.manifest import FROZEN_INDEX, read_frozen, read_range
from pipeline.runs.receipts import ReceiptBook
from pipeline.runs.report import REPORT_NAME, Findings, write_report
from pipeline.runs.run_folder import CONFIG_NAME, read_config
from pipeline.runs.status import PASSES, run_status
from pipeline.runs.summary import SUMMARY_NAME, build_summary
from pipeline.runs.timing_stats import stage_times
from pipeline.storage import Folder

_ITEMS = 24
_NO_PRICES = Prices()


def rewrite_run_page(run: Folder, prices: Prices) -> str:
    """Write `report.html` of a run in whatever state, from what is in its folder; returns where it is.

    Of a run that has not ended, numbers are those of its finished windows. Raises `ConfigError` before its items are
    listed: there is nothing to tell yet.
    """
    if not run.exists(FROZEN_INDEX):
        raise ConfigError(f"{run.url}: the run's items are not listed yet; there is nothing to report")
    write_run_page(run, run.read_json(SUMMARY_NAME) if run.exists(SUMMARY_NAME) else _summary_so_far(run), prices)
    return run.locate(REPORT_NAME)


def _summary_so_far(run: Folder) -> dict[str, Any]:
    """As `summary.json`, of the windows that the ledger has; `items_in` are all of the listing."""
    ledger, book, config = Ledger(run), ReceiptBook(), read_config(run)
    items, quarantine = Counter[str](), Counter[str]()
    for name in PASSES:
        for window, entry in ledger.finished(name).items():
            book.restore(name, window, entry)
            items.update(entry["items"].get("counts", {}))
            quarantine.update(entry["items"].get("quarantine", {}))
    summary = build_summary(
        run_id=run.url.rstrip("/").rpartition("/")[2],
        config_digest=run.read_json(CONFIG_NAME)["digest"],
        status=run_status(run).state,
        items_in=sum(items[name] for name in ("items_written", "items_quarantined", "items_skipped")),
        counts={**book.counts, **items},
        seconds=book.seconds,
        quarantine=quarantine,
        environment={},
        store_peak_bytes=None,
        points={},
        sample_fraction=config.sample_fraction,
        cpu_seconds=book.cpu_seconds,
        accelerator_seconds=book.accelerator_seconds,
        job=config.job,
    )
    return {**summary, "items_in": read_frozen(run).num_items}


def write_run_page(run: Folder, summary: Mapping[str, Any], prices: Prices = _NO_PRICES) -> None:
    """Write `report.html` of a run, of those of its parts that are there; decodes a few dozen small pictures."""
    config = read_config(run)
    fine, failed = choose_rows(run, _ITEMS)
    findings = Findings(
        shown=with_pictures(run, config, fine),
        failed=with_pictures(run, config, failed),
        times=stage_times(_timings(run)),
        progress=_progress(run),
        costs=_costs(run, prices),
    )
    write_report(run, summary, findings)


def _timings(run: Folder, columns: Collection[str] | None = None) -> Iterator[pa.Table]:
    """The timings of each window, of those `columns` that it has; all without any."""
    for name in run.list("timings", suffix=".parquet"):
        with run.open(f"timings/{name}") as file:
            part = pq.ParquetFile(file)
            known = part.schema_arrow.names
            yield part.read(known if columns is None else [each for each in known if each in columns])


def _costs(run: Folder, prices: Prices) -> RunCosts:
    costs = run_costs(_timings(run, COST_COLUMNS), prices)
    for item in costs.dearest:
        item["id"] = read_range(run, item["item_index"], item["item_index"] + 1)[0].id
    return costs


def _progress(run: Folder) -> dict[str, list[tuple[float, int]]]:
    """Pass → (seconds since the first window of any pass was finished, items finished by then)."""
    config = read_config(run)
    windows = plan_windows(
        read_frozen(run).num_items, first_items=config.ray.first_window_items, full_items=config.window_items
    )
    ended = {
        name: sorted(
            (entry["finished_at"], index)
            for index, entry in Ledger(run).finished(name).items()
            if "finished_at" in entry
        )
        for name in PASSES
    }
    first = min((each[0][0] for each in ended.values() if each), default=0.0)
    progress: dict[str, list[tuple[float, int]]] = {}
    for name, each in ended.items():
        items, points = 0, []
        for moment, index in each:
            items += windows[index].stop - windows[index].start
            points.append((moment - first, items))
        progress[name] = points
    return progress
