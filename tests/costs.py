"""What the timings of a finished run say of each item's time and cost, held against its clock and its summary."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

STAGES = ("plan", "decode", "encode", "prompt", "answer", "publish")
STEPS = [f"{stage}_{kind}" for stage in STAGES for kind in ("wait_seconds", "seconds")]


def assert_costs(folder: Path) -> list[dict[str, Any]]:
    """As both below, of a run on CPUs that went through at once; returns the rows of its timings."""
    summary, rows = read_costs(folder)
    assert_times(rows)
    assert_sums(rows, summary)
    for row in rows:
        assert row["wall_seconds"] <= summary["seconds"]["total"]
        assert row["cpu_seconds"] > 0 and row["accelerator_seconds"] == 0
    return rows


def read_costs(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run's summary, and its timings."""
    paths = sorted((folder / "timings").glob("part-*.parquet"))
    rows: list[dict[str, Any]] = pa.concat_tables(pq.read_table(path) for path in paths).to_pylist()
    return json.loads((folder / "summary.json").read_text()), rows


def assert_times(rows: list[dict[str, Any]]) -> None:
    """An item's stages and waits come to its wall time within 2 %."""
    for row in rows:
        known = {name: row[name] for name in STEPS if row[name] is not None}
        assert known["publish_seconds"] > 0 and min(known.values()) >= 0
        assert sum(known.values()) == pytest.approx(row["wall_seconds"], rel=0.02), row


def assert_sums(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """The items' costs come to the run's."""
    assert [row["item_index"] for row in rows] == list(range(summary["items_in"]))
    for kind in ("cpu_seconds", "accelerator_seconds"):
        assert sum(row[kind] for row in rows) == pytest.approx(sum(summary[kind].values()), rel=1e-6, abs=1e-9)
    assert sum(row["bytes_fetched"] for row in rows) == summary["bytes_fetched"]


def cpu_seconds_of_this_tree() -> float:
    """Of this process, its children that have ended, and those that live, by the kernel's own accounts in /proc."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = sum(each.ru_utime + each.ru_stime for each in map(resource.getrusage, whose))
    for status in Path("/proc").glob("[0-9]*/stat"):
        fields = status.read_text().rpartition(")")[2].split()
        if int(fields[1]) == os.getpid():
            used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used
