"""A run's costs by kind, and its dearest items, from timings whose sums are known."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from pipeline.planning.calibration import Prices
from pipeline.runs.costs import cost_rows, dearest_rows, run_costs


def timings(start: int, *rows: tuple[str, float, float, int]) -> pa.Table:
    """Of items from `start` on: (modality, CPU seconds, accelerator seconds, bytes)."""
    sized: dict[str, Any] = {"wall_seconds": 9.0, "frames": 2, "pixels": 1_500_000, "feature_tokens": 64}
    media = [dict.fromkeys(("frames", "pixels", "feature_tokens")) if kind == "text" else {} for kind, *_ in rows]
    names = ("modality", "cpu_seconds", "accelerator_seconds", "bytes_fetched")
    return pa.Table.from_pylist(
        [
            {"item_index": start + n, **sized, **none, **dict(zip(names, row, strict=True))}
            for n, (row, none) in enumerate(zip(rows, media, strict=True))
        ]
    )


WINDOWS = [
    timings(0, ("video", 3.0, 0.25, 2_000), ("text", 0.5, 0.0, 0)),
    timings(2, ("image", 1.0, 0.5, 1_000), ("video", 2.0, 0.5, 1_000)),
    timings(4, ("video", 3.0, 0.25, 2_000)).slice(0, 0),  # of which all was deleted
    pa.table({"item_index": [4], "modality": ["image"]}),  # of an earlier version
]


def test_kinds_add_up() -> None:
    costs = run_costs(WINDOWS, Prices())
    head, rows = cost_rows(costs)
    assert head == ["kind", "items", "CPU s", "CPU ms an item", "accelerator s", "bytes fetched"]
    assert rows == [
        ["image", "1", "1.00", "1,000.00", "0.50", "1,000"],
        ["text", "1", "0.50", "500.00", "0.00", "0"],
        ["video", "2", "5.00", "2,500.00", "0.75", "3,000"],
        ["all", "4", "6.50", "1,625.00", "1.25", "4,000"],
    ]


@pytest.mark.parametrize(
    ("prices", "order", "last"),
    [
        (Prices(), [3, 2, 0, 1], None),  # accelerator seconds, then CPU seconds
        (Prices(core_hour=36), [0, 3, 2, 1], "0.005"),  # a cent a CPU second
        (Prices(core_hour=36, accelerator_hour=360), [3, 2, 0, 1], "0.005"),  # 7, 6, 5.5 and 0.5 cents
        (Prices(accelerator_hour=3600), [3, 2, 0, 1], "0"),
    ],
)
def test_the_dearest_come_first(prices: Prices, order: list[int], last: str | None) -> None:
    costs = run_costs(WINDOWS, prices)
    assert [item["item_index"] for item in costs.dearest] == order
    for item in costs.dearest:
        item["id"] = f"item-{item['item_index']}"
    head, rows = dearest_rows(costs)
    assert (head[-1] == "price") == (last is not None)
    text = ["item-1", "text", "", "", "", "9.00", "0.500", "0.000", "0"]
    assert rows[-1] == [*text, *([] if last is None else [last])]
    assert ["item-0", "video", "2", "1.5", "64", "9.00", "3.000", "0.250", "2,000"] in [row[:9] for row in rows]


def test_of_many_ten_are_kept() -> None:
    tables = [timings(100 * n, *(("image", (37 * n + k) % 101, 0.0, 1) for k in range(100))) for n in range(5)]
    costs = run_costs(tables, Prices())
    seconds = sorted(((37 * n + k) % 101 for n in range(5) for k in range(100)), reverse=True)
    assert [item["cpu_seconds"] for item in costs.dearest] == seconds[:10]
    assert costs.kinds["image"]["items"] == 500 and costs.kinds["image"]["cpu_seconds"] == sum(seconds)


def test_runs_without_costs_have_none() -> None:
    costs = run_costs(WINDOWS[2:], Prices())
    assert (cost_rows(costs)[1], dearest_rows(costs)[1]) == ([], [])
