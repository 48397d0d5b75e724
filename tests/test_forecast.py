"""What was forecast from headers, by `headrace plan` and by the run itself, beside what the run then found."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from pipeline import flow
from pipeline.config import Config, load_config
from pipeline.demo.drawn import draw_demo
from pipeline.media import sandbox
from pipeline.runs.manifest import freeze_part, read_frozen, read_range
from pipeline.runs.run import stage_listing
from pipeline.stages.calibrations import read_calibration, write_calibration
from pipeline.stages.dry_run import Forecast, dry_run
from pipeline.storage import Folder
from pipeline.trial import calibrate
from tests.media.sandboxed import open_hostile, ordering
from tests.without_ray import run_without_ray

CONFIGS = Path(__file__).parent.parent / "configs"
FEWER = ("demo_media.images=12", "demo_media.videos=8")
ENCODED = ("encodes", "feature_tokens", "computed_tokens", "store_bytes")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def demo(name: str, folder: Path, *settings: str) -> Config:
    """A demo's configuration, over a corpus of its own that is drawn as the demo's is."""
    config = load_config(str(CONFIGS / f"demo_{name}.yaml"), [*own(name, folder), *settings])
    draw_demo(config)
    return config


def own(name: str, folder: Path) -> list[str]:
    file = f"{folder}/in/documents" if name == "documents" else f"{folder}/in/manifest.jsonl"
    return [f"input={file}", f"output={folder}/output", f"store.path={folder}/store", "sinks={}"]


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
    assert "seconds" not in summary["forecast"]
    stored = files_below(tmp_path / "store")

    rates = calibrate(config, "cpu", told=lambda what: None)
    assert files_below(tmp_path / "store") == stored  # what was measured with is gone
    # The first of four tokens comes of the prompt.
    assert (rates.sampled_items, rates.accelerators, rates.batch_steps) == (20, 0, 3)
    assert rates.answer_tokens is not None and 1 <= rates.answer_tokens <= 4
    missing = [name for name, value in rates.to_json().items() if value is None]
    assert missing == ["text_flops_per_second", "transfer_bytes_per_second"]  # no texts; that one needs Ray
    assert Path(write_calibration(config, rates)).exists()
    assert read_calibration(config, "cpu") == rates
    assert read_calibration(config, "cuda") is None

    again = config.model_copy(update={"prompt": "What colour is the shape?"})
    before = files_below(tmp_path)
    expected = planned(again)
    assert files_below(tmp_path) == before
    work = expected.work
    assert (expected.hits, work.encodes, work.feature_bytes_read) == (20, 0, forecast.work.store_bytes)
    answered = flow.run(again)
    assert answered["forecast"]["encodes"] == {"forecast": 0, "found": 0}
    assert answered["forecast"]["seconds"].keys() == {"feature_transfer", "llm_prefill", "llm_decode", "total"}
    assert_within(expected, answered, ("prompt_tokens",))


def test_vectors_by_the_command(tmp_path: Path) -> None:
    settings = ["demo_media.captions=8", *FEWER]
    sets = [word for setting in [*own("embed", tmp_path), *settings] for word in ("--set", setting)]
    files = ["--json", str(tmp_path / "plan.json"), "--page", str(tmp_path / "plan.html")]
    result = CliRunner().invoke(app, ["plan", str(CONFIGS / "demo_embed.yaml"), *sets, *files])
    assert result.exit_code == 0, result.output
    assert "12 images, 8 videos" in result.stdout and "headrace calibrate CONFIG" in result.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["items"]["listed"], plan["items"]["without_media"], plan["texts"]["texts"]) == (28, 8, 8)
    assert sum(shape["items"] for shape in plan["shapes"]) == plan["encoder"]["media"] == 20
    assert "<svg" in (tmp_path / "plan.html").read_text()
    assert not (tmp_path / "store").exists() and not (tmp_path / "output").exists()

    config = demo("embed", tmp_path, *settings)
    assert_within(planned(config), flow.run(config), (*ENCODED, "text_tokens"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "1,0"], "--workers takes numbers"),
        (["--calibration", "/nowhere.json"], "not what headrace calibrate writes"),
    ],
)
def test_options_that_are_refused(options: list[str], said: str, tmp_path: Path) -> None:
    sets = [word for setting in [*own("embed", tmp_path), *FEWER] for word in ("--set", setting)]
    result = CliRunner().invoke(app, ["plan", str(CONFIGS / "demo_embed.yaml"), *sets, *options])
    assert result.exit_code == 2 and said in result.stderr


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


@pytest.mark.slow
def test_the_command_that_calibrates(tmp_path: Path) -> None:
    settings = [*own("caption", tmp_path), "generate.max_new_tokens=2", "ray.num_cpus=1", *FEWER]
    sets = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-c", "from jobs.cli import main; main()"]
    ran = subprocess.run(
        [*command, "calibrate", str(CONFIGS / "demo_caption.yaml"), *sets, "--output", str(tmp_path / "rates.json")],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stderr
    rates = json.loads((tmp_path / "rates.json").read_text())
    # A copy in memory, with what Ray adds: between a tenth of a GB and a hundred GB a second on any machine.
    assert 1e8 < rates["transfer_bytes_per_second"] < 1e11
    assert not [path for path in (tmp_path / "store").iterdir() if path.name.startswith("calibrat")]


def test_a_part_of_a_listing_is_a_listing(demo_media: Path, make_config: Callable[..., Config], tmp_path: Path) -> None:
    with stage_listing(make_config(demo_media / "manifest.jsonl")) as staged:
        source, part = Folder(staged.directory), Folder(str(tmp_path / "part"))
        freeze_part(source, part, 7, 12)
        whole = read_range(source, 0, staged.num_items)
    frozen = read_frozen(part)
    assert (frozen.num_items, frozen.num_texts) == (5, 0)
    expected = [dataclasses.replace(request, item_index=n) for n, request in enumerate(whole[7:12])]
    assert read_range(part, 0, 5) == expected and read_range(part, 2, 4) == expected[2:4]


def test_documents_that_break_what_counts_their_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process of `plan` and of `calibrate` they would end it, or hang it."""
    config = demo("documents", tmp_path, "demo_media.documents=3")
    before = planned(config)
    document = (tmp_path / "in" / "documents").glob("*.pdf")
    whole = next(document).read_bytes()
    for what in ("hang", "segfault"):
        (tmp_path / "in" / "documents" / f"{what}.pdf").write_bytes(ordering(whole, f"count_{what}"))
    monkeypatch.setattr(sandbox, "open_sandbox", lambda mode, item_seconds: open_hostile(item_seconds=1.0))
    forecast = planned(config)
    # Each stays one row, which is no page, and is refused as one.
    assert forecast.num_items == before.num_items + 2
    assert forecast.failures - before.failures == {"unknown_format": 2}
    rates = calibrate(config, "cpu", told=lambda what: None)
    assert rates.sampled_items == min(64, forecast.num_items)
