"""What receipts and published windows add to a run's counters, and what metrics are called."""

from __future__ import annotations

import re
from collections import defaultdict

from pipeline.runs.metrics import MAX_CODES, METRICS, Metric, RunMetrics
from pipeline.schema import Receipt


class Recorded:
    """A meter that keeps sums by name and labels, and checks that labels are the metric's."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, ...], float] = defaultdict(float)

    def record(self, metric: Metric, value: float, **labels: str) -> None:
        assert set(labels) == set(metric.labels), metric.name
        self.sums[metric.name, *labels.values()] += value


def test_a_plan_announces_batches_and_a_batch_counts_what_it_did() -> None:
    meter = Recorded()
    metrics = RunMetrics(meter, 10)
    plan = Receipt(
        stage="plan",
        window=0,
        batch=-1,
        digest="p",
        counts={"batches": 3, "features_reused": 4, "fallbacks": 1, "forecast:encodes": 9},
        seconds={"probe": 0.5},
    )
    batch = Receipt(
        stage="encode", window=0, batch=0, digest="b", counts={"encodes": 2, "fetches": 0}, seconds={"commit": 0.25}
    )
    metrics.add_receipt(plan, "encode")
    metrics.add_receipt(batch, "encode")
    assert meter.sums == {
        ("headrace_listed_items",): 10,
        ("headrace_planned_batches_total", "encode"): 3,
        ("headrace_done_batches_total", "encode"): 1,
        ("headrace_stage_seconds", "probe", "window"): 0.5,
        ("headrace_busy_seconds_total", "probe"): 0.5,
        ("headrace_busy_seconds_total", "commit"): 0.25,
        ("headrace_cache_hits_total", "features"): 4,
        ("headrace_cache_fallbacks_total", "features"): 1,
        ("headrace_cache_misses_total", "features"): 2,
        ("headrace_encodes_total",): 2,
    }


def test_codes_are_told_apart_up_to_a_number() -> None:
    meter = Recorded()
    metrics = RunMetrics(meter, 1000)
    metrics.add_published(
        {"items_written": 5, "items_quarantined": 100}, {f"code_{number}": 1 for number in range(MAX_CODES + 30)}
    )
    metrics.add_published({}, {"code_3": 2, "code_70": 1})
    codes = {labels[1]: each for labels, each in meter.sums.items() if labels[0] == "headrace_quarantined_items_total"}
    assert len(codes) == MAX_CODES + 1
    assert (codes["code_3"], codes["other"]) == (3, 31)
    assert meter.sums["headrace_items_total", "written"] == 5


def test_names_say_kind_and_unit() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"headrace_[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        if metric.kind == "histogram":
            assert name.endswith("_seconds") and list(metric.boundaries) == sorted(metric.boundaries)
        assert "second" not in name or re.search(r"_seconds(_total)?$", name)
        assert "bytes" not in name or re.search(r"_bytes(_total)?$", name)
