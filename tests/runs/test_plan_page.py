"""What `headrace plan` shows: every number, nothing that a manifest could smuggle in, and nothing that is loaded."""

from __future__ import annotations

import copy
from html.parser import HTMLParser
from typing import Any

import pytest

from pipeline.runs.plan_page import bar_chart, duration, plan_page, plan_text

EVIL = '<script>alert("x")</script>\x1b[2J&{title}'
PLAN: dict[str, Any] = {
    "job": "caption_videos",
    "model": EVIL,
    "items": {
        "listed": 5_000,
        "planned": 1_000,
        "windows": 3,
        "media": {"image": 4_000, "video": 950},
        "without_media": 0,
        "rejected": 50,
        "hits": 17,
        "duplicates": 0,
        "carried": 0,
    },
    "rejected": {"corrupt": {"items": 50, "examples": [EVIL]}},
    "shapes": [
        {"modality": "image", "frames": 1, "height": 480, "width": 640, "items": 3_000},
        {"modality": "video", "frames": 8, "height": 90, "width": 160, "items": 750},
    ],
    "num_shapes": 12,
    "encoder": {
        "media": 4_900,
        "batches": 400,
        "patches": 950_000,
        "computed_tokens": 1_000_000,
        "padding_waste": 0.05,
        "token_fill": 0.96,
        "item_fill": 0.5,
        "feature_tokens": 250_000,
        "frame_bytes": 3 * 10**9,
        "flops": 4 * 10**15,
        "decode_core_hours": 0.5,
    },
    "store": {
        "bytes": 8 * 10**9,
        "month_cost": 0.16,
        "recompute_flops": 4 * 10**15,
        "recompute_decode_core_hours": 0.5,
        "recompute_cost": 1.6,
        "break_even_months": 10.0,
    },
    "language": None,
    "texts": None,
    "times": {
        "device": "cuda",
        "accelerator": "one",
        "stage_seconds": {"media_decode": 1_800.0, "vision_encode": 100.0},
        "this_machine_seconds": 1_234.0,
        "schedules": [
            {
                "workers": 2,
                "decode_cores": 36,
                "stage_seconds": {},
                "seconds": 7_300.0,
                "bottleneck": "vision_encode",
                "cost": 12.5,
            }
        ],
        "decode_cores_per_accelerator": 18.0,
        "cores_per_accelerator": 8.0,
        "placement": {"separate": True, "queue_seconds": 1.25, "transfer_seconds": 0.5},
        "pools": [
            {
                "workers": 4,
                "encoders": 1,
                "separate": True,
                "in_turn_seconds": 356.25,
                "apart_seconds": 250.0,
                "queue_seconds": 200.0,
                "transfer_seconds": 10.0,
            }
        ],
        "second_question_seconds": 90.0,
    },
}


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: list[str] = []
        self.data: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.data.append(data)


def test_the_page_is_escaped_and_loads_nothing() -> None:
    page = Page(plan_page(PLAN))
    assert not {"script", "link", "img", "iframe", "image", "use"} & set(page.tags)
    assert not {"src", "href", "onclick"} & set(page.names)
    assert f"50; {EVIL}" in page.data and any(EVIL in each and "before anything" in each for each in page.data)
    assert page.tags.count("svg") == 3  # shapes, stages, workers; a job without prompts has no lengths of them
    assert "video 8 x 160 x 90" in page.data and "(and 10 rarer ones)" in " ".join(page.data)


def test_the_terminal_gets_every_number_and_no_commands() -> None:
    text = plan_text(PLAN)
    assert "\x1b" not in text and "?[2J" in text
    for said in (
        "5,000",
        "1,000 in 3 windows",
        "4,000 images, 950 videos",
        "1,000,000, padding 5.0%",
        "96% of their tokens, 50% of their items",
        "4 PFLOPs",
        "30.0 min of the reference core",
        "8 GB",
        "within 10.0 months",
        "2.0 h, most of it vision_encode, costs 12.50",
        "18.0; it has 8.0",
        "on machines of their own: a second of encoding waits 1.25 s for the cores beside it, 0.50 s for frames",
        "apart: in turn 5.9 min, 3.3 min of it waiting for decoders; 1 that encode and 3 that answer 4.2 min",
        "90.0 s",
        "20.6 min",
    ):
        assert said in text, said


def test_without_a_calibration_no_time_is_told() -> None:
    plan = copy.deepcopy(PLAN)
    plan["times"] = None
    assert "headrace calibrate" in plan_text(plan)
    assert Page(plan_page(plan)).tags.count("svg") == 1


def test_bars_are_as_long_as_their_values() -> None:
    svg = bar_chart([("a", 50, "50"), ("<b>", 200, "200")])
    assert 'width="105.0"' in svg and 'width="420.0"' in svg  # 420 * 50 / 200
    assert "&lt;b&gt;" in svg and 'viewBox="0 0 820 44"' in svg


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.25, "250 ms"), (90, "90.0 s"), (600, "10.0 min"), (36_000_000, "10,000.0 h")]
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
