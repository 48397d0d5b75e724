"""A run's page, from what the run wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.planning.windows import plan_windows
from pipeline.runs.gallery import choose_rows, with_pictures
from pipeline.runs.ledger import Ledger
from pipeline.runs.manifest import read_frozen
from pipeline.runs.report import Findings, write_report
from pipeline.runs.run_folder import read_config
from pipeline.runs.timing_stats import stage_times
from pipeline.storage import Folder

_ITEMS = 24


def write_run_page(run: Folder, summary: Mapping[str, Any]) -> None:
    """Write `report.html` of a run that has all its parts; decodes a few dozen small pictures."""
    config = read_config(run)
    fine, failed = choose_rows(run, _ITEMS)
    findings = Findings(
        shown=with_pictures(run, config, fine),
        failed=with_pictures(run, config, failed),
        times=stage_times(_timings(run)),
        progress=_progress(run),
    )
    write_report(run, summary, findings)


def _timings(run: Folder) -> Iterator[pa.Table]:
    for name in run.list("timings", suffix=".parquet"):
        with run.open(f"timings/{name}") as file:
            yield pq.read_table(file)


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
        for name in ("encode", "generate", "pool")
    }
    first = min((each[0][0] for each in ended.values() if each), default=0.0)
    progress = {}
    for name, each in ended.items():
        items, points = 0, []
        for moment, index in each:
            items += windows[index].stop - windows[index].start
            points.append((moment - first, items))
        progress[name] = points
    return progress
