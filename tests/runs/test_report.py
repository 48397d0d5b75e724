"""The page is self-contained, and says nothing a row could have smuggled in."""

from html.parser import HTMLParser
from pathlib import Path

from pipeline.runs.report import forecast_rows, write_report
from pipeline.runs.summary import build_summary
from pipeline.storage import Folder

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


def report(tmp_path: Path, samples: list[dict[str, object]]) -> Page:
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
    write_report(Folder(str(tmp_path)), summary, iter(samples))
    return Page((tmp_path / "report.html").read_text(encoding="utf-8"))


def row(number: int, **values: object) -> dict[str, object]:
    return {"id": f"item-{number}", "status": "ok", "text": EVIL, "code": None, "message": None, **values}


def test_everything_is_escaped_and_nothing_is_loaded(tmp_path: Path) -> None:
    page = report(tmp_path, [row(0, id=EVIL), row(1, status="quarantined", code=EVIL, message=EVIL)])
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "onclick")]
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


def test_the_first_fifty_items_are_shown(tmp_path: Path) -> None:
    cells = report(tmp_path, [row(number) for number in range(80)]).cells
    assert [cell for cell in cells if cell.startswith("item-")] == [f"item-{number}" for number in range(50)]
