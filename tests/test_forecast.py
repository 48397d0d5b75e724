"""What was forecast from headers, by `headrace plan` and by the run itself, beside what the run then found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import flow
from pipeline.config import Config, load_config
from pipeline.demo.drawn import draw_demo
from pipeline.stages.dry_run import Forecast, dry_run
from tests.without_ray import run_without_ray

CONFIGS = Path(__file__).parent.parent / "configs"
FEWER = ("demo_media.images=12", "demo_media.videos=8")
ENCODED = ("encodes", "feature_tokens", "computed_tokens", "store_bytes")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def demo(name: str, folder: Path, *settings: str) -> Config:
    """A demo's configuration, over a corpus of its own that is drawn as the demo's is."""
    file = f"{folder}/in/documents" if name == "documents" else f"{folder}/in/manifest.jsonl"
    own = [f"input={file}", f"output={folder}/output", f"store.path={folder}/store", "sinks={}"]
    config = load_config(str(CONFIGS / f"demo_{name}.yaml"), [*own, *settings])
    draw_demo(config)
    return config


def planned(config: Config, **options: Any) -> Forecast:
    return dry_run(config, "cpu", told=lambda number: None, **options)


def files_below(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_within(forecast: Forecast, summary: dict[str, Any], names: tuple[str, ...]) -> None:
    """10 %, which is the promise; both forecasts are one."""
    work = dataclasses.asdict(forecast.work)
    for name in names:
        pair = summary["forecast"][name]
        print(f"{name}: {pair}")
        assert pair["forecast"] == work[name]
        assert pair["found"] == pytest.approx(pair["forecast"], rel=0.1)


def test_captions(tmp_path: Path) -> None:
    config = demo("caption", tmp_path, "generate.max_new_tokens=4", *FEWER)
    before = files_below(tmp_path)
    forecast = planned(config)
    assert files_below(tmp_path) == before  # not the store, not the output: nothing is written
    summary = flow.run(config)
    assert_within(forecast, summary, (*ENCODED, "prompt_tokens"))
    assert (forecast.media, forecast.hits, forecast.failures) == ({"image": 12, "video": 8}, 0, {})
    assert sum(forecast.shapes.values()) == 20
    assert forecast.work.most_answer_tokens == 20 * 4
    assert summary["forecast"]["decode_core_seconds"]["found"] == summary["seconds"]["media_decode"]

    again = config.model_copy(update={"prompt": "What colour is the shape?"})
    before = files_below(tmp_path)
    expected = planned(again)
    assert files_below(tmp_path) == before
    work = expected.work
    assert (expected.hits, work.encodes, work.feature_bytes_read) == (20, 0, forecast.work.store_bytes)
    answered = flow.run(again)
    assert answered["forecast"]["encodes"] == {"forecast": 0, "found": 0}
    assert_within(expected, answered, ("prompt_tokens",))


def test_vectors(tmp_path: Path) -> None:
    config = demo("embed", tmp_path, "demo_media.captions=8", *FEWER)
    assert_within(planned(config), flow.run(config), (*ENCODED, "text_tokens"))


def test_documents(tmp_path: Path) -> None:
    config = demo("documents", tmp_path, "demo_media.documents=3")
    forecast = planned(config)
    assert_within(forecast, flow.run(config), (*ENCODED, "text_tokens"))
    assert forecast.pages == forecast.pages_read > 4


def test_what_would_be_quarantined(
    demo_media: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "no_image.jpg").write_bytes(b"\xff\xd8 and nothing more")
    [first, *_] = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    whole = str(demo_media / first["media"][0]["uri"])
    manifest = write_manifest(
        [
            {"id": "whole", "image": whole},
            {"id": "twice", "image": whole},
            {"id": "broken", "image": str(tmp_path / "no_image.jpg")},
            {"id": "gone", "image": str(tmp_path / "gone.jpg")},
            {"id": "long", "image": whole, "prompt": "very " * 200},
        ]
    )
    config = make_config(manifest, generate={"max_new_tokens": 2, "max_prompt_tokens": 100})
    forecast = planned(config)
    summary = flow.run(config)
    assert dict(forecast.failures) == summary["quarantine"]
    assert len(forecast.failures) == 3 and forecast.examples["prompt_too_long"][0].startswith("long: ")
    assert (forecast.duplicates, forecast.work.encodes) == (2, summary["encodes"])


def test_a_sample_stands_for_all(demo_media: Path, make_config: Callable[..., Config]) -> None:
    config = make_config(demo_media / "manifest.jsonl", ray={"first_window_items": 4, "window_items": 4})
    whole, half = planned(config), planned(config, sample=10)
    assert (whole.windows, whole.planned_items, whole.scale) == (5, 20, 1.0)
    assert (half.windows, half.planned_items, half.num_items) == (3, 12, 20)
    assert half.scale == pytest.approx(20 / 12)
