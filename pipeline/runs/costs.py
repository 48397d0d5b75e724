"""What a run's items cost by kind, and those that cost most: from its timings, in a few kilobytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.planning.calibration import Prices

_DEAREST = 10
_SUMMED = ("cpu_seconds", "accelerator_seconds", "bytes_fetched")
# Of timings, what is read for it.
COST_COLUMNS = ("item_index", "modality", "wall_seconds", "frames", "pixels", "feature_tokens", *_SUMMED)
_ORDER = [("price", "descending"), ("accelerator_seconds", "descending"), ("cpu_seconds", "descending")]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCosts:
    """`kinds`: modality → `items` and the sums of their `cpu_seconds`, `accelerator_seconds`, `bytes_fetched`.

    `dearest` are rows of `COST_COLUMNS`, those first that cost most: by their `price` where `prices` are known, else by
    accelerator seconds and then CPU seconds.
    """

    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dearest: list[dict[str, Any]] = field(default_factory=list)
    prices: Prices = field(default_factory=Prices)


def run_costs(timings: Iterable[pa.Table], prices: Prices) -> RunCosts:
    """Of all windows' timings; those of an earlier version, which lack a column of `COST_COLUMNS`, are left out."""
    kinds: dict[str, dict[str, Any]] = {}
    dearest: pa.Table | None = None
    for table in timings:
        if not set(COST_COLUMNS) <= set(table.column_names):
            continue
        sums = table.group_by("modality").aggregate([("item_index", "count"), *((name, "sum") for name in _SUMMED)])
        for row in sums.to_pylist():
            kind = kinds.setdefault(row["modality"], {"items": 0, **dict.fromkeys(_SUMMED, 0)})
            kind["items"] += row["item_index_count"]
            for name in _SUMMED:
                kind[name] += row[f"{name}_sum"] or 0
        priced = table.append_column("price", _prices(table, prices))
        candidates = priced if dearest is None else pa.concat_tables([dearest, priced])
        first = pc.select_k_unstable(candidates, _DEAREST, [*_ORDER, ("item_index", "ascending")])
        dearest = candidates.take(first)
    return RunCosts(
        kinds=dict(sorted(kinds.items())), dearest=[] if dearest is None else dearest.to_pylist(), prices=prices
    )


def _prices(table: pa.Table, prices: Prices) -> pa.Array:
    """0 without prices: items are in the order of what they took then."""
    pairs = zip(table["cpu_seconds"].to_pylist(), table["accelerator_seconds"].to_pylist(), strict=True)
    found = [prices.of_seconds(cpu or 0.0, accelerator or 0.0) or 0.0 for cpu, accelerator in pairs]
    return pa.array(found, pa.float64())  # also of a window of which all was deleted


def cost_rows(costs: RunCosts) -> tuple[list[str], list[list[str]]]:
    """A head and rows of text: a kind each, and all of them."""
    head = ["kind", "items", "CPU s", "CPU ms an item", "accelerator s", "bytes fetched"]
    whole = {name: sum(kind[name] for kind in costs.kinds.values()) for name in ("items", *_SUMMED)}
    kinds = [*costs.kinds.items(), ("all", whole)] if costs.kinds else []
    rows = [
        [
            name,
            f"{kind['items']:,}",
            f"{kind['cpu_seconds']:,.2f}",
            f"{1e3 * kind['cpu_seconds'] / kind['items']:,.2f}",
            f"{kind['accelerator_seconds']:,.2f}",
            f"{kind['bytes_fetched']:,}",
            *_price(costs, kind["cpu_seconds"], kind["accelerator_seconds"]),
        ]
        for name, kind in kinds
    ]
    return [*head, *_price_head(costs)], rows


def dearest_rows(costs: RunCosts) -> tuple[list[str], list[list[str]]]:
    """As `cost_rows`, an item each; what it is made of beside what it took. `dearest` have their `id`."""
    head = ["item", "kind", "frames", "megapixels", "tokens", "wall s", "CPU s", "accelerator s", "bytes fetched"]
    rows = [
        [
            str(item["id"]),
            item["modality"],
            *("" if item["frames"] is None else f"{value:,}" for value in _size(item)),
            f"{item['wall_seconds']:,.2f}",
            f"{item['cpu_seconds']:,.3f}",
            f"{item['accelerator_seconds']:,.3f}",
            f"{item['bytes_fetched']:,}",
            *_price(costs, item["cpu_seconds"], item["accelerator_seconds"]),
        ]
        for item in costs.dearest
    ]
    return [*head, *_price_head(costs)], rows


def _size(item: Mapping[str, Any]) -> tuple[Any, ...]:
    """Nothing of what has no media."""
    return item["frames"], round((item["pixels"] or 0) / 1e6, 1), item["feature_tokens"]


def _price_head(costs: RunCosts) -> list[str]:
    return [] if costs.prices.of_seconds(0, 0) is None else ["price"]


def _price(costs: RunCosts, cpu_seconds: float, accelerator_seconds: float) -> list[str]:
    price = costs.prices.of_seconds(cpu_seconds, accelerator_seconds)
    return [] if price is None else [f"{price:,.4g}"]
