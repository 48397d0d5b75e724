"""The page is self-contained, and says nothing a row could have smuggled in."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.media.thumbnail import as_jpeg
from pipeline.runs.gallery import choose_rows
from pipeline.runs.report import Findings, Shown, forecast_rows, write_report
from pipeline.runs.summary import build_summary
from pipeline.runs.timing_stats import Histogram, Timed, stage_times, waited_longest
from pipeline.sinks.parquet import restore_window, write_part
from pipeline.storage import Folder

PICTURE = as_jpeg(np.zeros((4, 6, 3), np.uint8))
EVIL = '<script>alert("x")</script>&{title}'


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.cells.append(data.strip())


def report(tmp_path: Path, samples: list[dict[str, object]], **found: Any) -> Page:
    summary = build_summary(
        run_id="run-7",
        config_digest=EVIL,
        status="done",
        items_in=1234 + 5,
        counts={"items_written": 1234, "items_quarantined": 5, "items_reused": 17, "padded_tokens": 9_876_543},
        seconds={"decode": 30.0, "encode": 60.0, EVIL: 0.0},
        quarantine={"rare": 1, EVIL: 4},
        environment={"python": "3.11", EVIL: [EVIL, "H200"], "torch": None},
        store_peak_bytes=None,
        points={},
    )
    shown = [Shown(row=each, picture=PICTURE) for each in samples]
    write_report(Folder(str(tmp_path)), summary, Findings(shown=shown, **found))
    return Page((tmp_path / "report.html").read_text(encoding="utf-8"))


def row(number: int, **values: object) -> dict[str, object]:
    return {"id": f"item-{number}", "status": "ok", "text": EVIL, "code": None, "message": None, **values}


def test_everything_is_escaped_and_nothing_is_loaded(tmp_path: Path) -> None:
    page = report(tmp_path, [row(0, id=EVIL), row(1, status="quarantined", code=EVIL, message=EVIL)])
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("href", "onclick", "srcset")]
    sources = [value for name, value in page.attributes if name == "src"]
    assert len(sources) == 2 and all(source and source.startswith("data:image/jpeg;base64,") for source in sources)
    assert page.cells.count(EVIL) == 1 + 2 + 2  # id and text of the first item, stage, reason, environment
    assert f"{EVIL}: {EVIL}" in page.cells
    assert f"{EVIL}, H200" in page.cells


def test_numbers_are_there(tmp_path: Path) -> None:
    page = report(tmp_path, [])
    for text in ("run-7: done", "1,239", "1,234", "5", "9,876,543", "17 of the written needed no encoding.", "60.00"):
        assert text in page.cells
    widths = [value for name, value in page.attributes if name == "style"]
    assert widths[:2] == ["width: 100.0%", "width: 50.0%"]


def test_the_forecast_stands_beside_what_was_found() -> None:
    rows = forecast_rows(
        {
            "feature_tokens": {"forecast": 2_000, "found": 2_100},
            "encodes": {"forecast": 0, "found": 3},
            "seconds": {"llm_prefill": {"forecast": 0.5, "found": 1.0}},
        }
    )
    assert rows == [
        ("feature tokens", "2,000", "2,100", "1.05"),
        ("encodes", "0", "3", ""),
        ("llm prefill, seconds", "0.50", "1.00", "2.00"),
    ]


def test_items_are_chosen_all_over_the_run_and_some_of_each_code(tmp_path: Path) -> None:
    run = Folder(str(tmp_path))
    numbers = range(100)
    codes = {7: "rare", **dict.fromkeys(range(40, 60), "often")}
    rows = [
        {"item_index": n, "id": f"item-{n}", "status": "quarantined" if n in codes else "ok", "code": codes.get(n)}
        for n in numbers
    ]
    for window, start in enumerate(range(0, 100, 25)):
        write_part(run, window, restore_window(rows[start : start + 25], start, start + 25))
    shown, failed = choose_rows(run, 5)
    fine = [n for n in numbers if n not in codes]
    assert [row["item_index"] for row in shown] == [fine[0], fine[20], fine[39], fine[58], fine[78]]
    assert [row["id"] for row in failed] == ["item-40", "item-41", "item-42", "item-7"]
    assert len(choose_rows(run, 500)[0]) == 79


def test_percentiles_are_those_of_numpy_within_a_hundredth() -> None:
    rng = np.random.default_rng(5)
    times = rng.lognormal(2.0, 1.5, 20_000)
    histogram = Histogram()
    for some in np.array_split(times, 7):
        histogram.add(some)
    assert histogram.count == 20_000 and histogram.sum_ms == pytest.approx(times.sum())
    for share in (0.01, 0.5, 0.95, 0.99, 1.0):
        exact = np.quantile(times, share, method="inverted_cdf")
        assert histogram.percentile(share) == pytest.approx(exact, rel=0.0101)
    with pytest.raises(ValueError, match="no durations"):
        Histogram().percentile(0.5)
    extremes = Histogram()
    extremes.add(np.array([0.0, 1e12]))
    assert extremes.count == 2


def test_times_are_told_by_stage_and_kind_and_the_longest_queue_is_named(tmp_path: Path) -> None:
    first = pa.table(
        {
            "item_index": [0, 1, 2],
            "modality": ["image", "video", "text"],
            "encoder_tokens": [256, 257, None],
            "media_decode_ms": [10.0, 100.0, None],
            "encoder_queue_ms": [1.0, 2.0, None],
            "llm_queue_ms": [3.0, 4.0, 5.0],
        }
    )
    times = stage_times([first, first])
    assert {key: each.count for key, each in times.items()} == {
        Timed("media_decode", "image", 256): 2,
        Timed("media_decode", "video", 512): 2,
        Timed("encoder_queue", "image", 256): 2,
        Timed("encoder_queue", "video", 512): 2,
        Timed("llm_queue", "image", 256): 2,
        Timed("llm_queue", "text"): 2,
        Timed("llm_queue", "video", 512): 2,
    }
    assert waited_longest(times) == "llm_queue" and waited_longest({}) is None
    # Of runs that are older than these columns.
    assert stage_times([first.drop_columns(["modality", "encoder_tokens"])]).keys() == {
        Timed("media_decode", "item"),
        Timed("encoder_queue", "item"),
        Timed("llm_queue", "item"),
    }
    progress = {"encode": [(0.0, 4), (8.0, 12)], "pool": [(2.0, 4)]}
    page = report(tmp_path, [], times=times, progress=progress)
    assert {"media_decode", "video", "≤ 512", "encode: 12 items in 8.0 s"} <= set(page.cells)
    points = [value for name, value in page.attributes if name == "points"]
    assert points == ["0,90 0.0,60.0 560.0,0.0", "0,90 140.0,0.0"]


def test_sections_are_of_what_the_summary_has(tmp_path: Path) -> None:
    bare = {
        **{"run_id": "old", "config_digest": "c", "status": "done", "quarantine": {}, "seconds": {"total": 1.0}},
        **{"items_in": 9, "items_written": 9, "items_quarantined": 0, "items_skipped": 0, "items_reused": 0},
        "environment": {},
    }
    headings = ("Fill and padding", "What was there already", "Cost", "CPU seconds, by stage")

    def page(**fields: Any) -> Page:
        write_report(Folder(str(tmp_path)), {**bare, **fields}, Findings())
        return Page((tmp_path / "report.html").read_text(encoding="utf-8"))

    assert not set(headings) & set(page().cells)
    full = page(
        computed_tokens=4_000,
        padded_tokens=1_000,
        prompt_tokens=900,
        prompt_padded_tokens=100,
        features_reused=3,
        encodes=9,
        fallbacks=2,
        oom_splits=4,
        cpu_seconds={"media_decode": 8.25},
        sample_fraction=0.01,
    ).cells
    assert set(headings) <= set(full)
    at = full.index("encoder batches")
    assert full[at : at + 4] == ["encoder batches", "4,000", "75.0%", "1,000"]
    at = full.index("prompt batches")
    assert full[at : at + 4] == ["prompt batches", "1,000", "90.0%", "100"]  # prompt_tokens are without padding
    at = full.index("features")
    assert full[at : at + 5] == ["features", "3", "9", "25.0%", "2"]
    assert "4 times a batch was cut for want of memory." in full and "text batches" not in full
    assert "8.25" in full and "configuration c, a sample of 1.0000%" in full
