"""`headrace profile-cache` on the demo's media and model: each tier's work and room, and the same answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from pipeline import flow
from pipeline.config import parse_config
from pipeline.features.identity import FeatureKeyTerms, FrameKeyTerms
from tests.without_ray import run_without_ray

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def profiled(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    file = folder / "profile.json"
    settings = [
        f"input={folder}/in/manifest.jsonl",
        f"output={folder}/output",
        f"store.path={folder}/store",
        "demo_media.images=6",
        "demo_media.videos=4",
        "generate.max_new_tokens=8",
    ]
    words = ["profile-cache", str(CONFIGS / "demo_caption.yaml"), "--json", str(file), *arguments]
    done = CliRunner().invoke(app, [*words, *(word for setting in settings for word in ("--set", setting))])
    return done.exit_code, done.output, json.loads(file.read_text()) if file.exists() else {}


def test_each_tier_does_less_takes_room_and_answers_the_same(tmp_path: Path) -> None:
    code, output, profile = profiled(tmp_path, "--question", "What colour is the shape?", "--items", "8")
    print(output)
    assert code == 0, output
    none, decoded, encoder = profile["tiers"]
    assert [each["tier"] for each in profile["tiers"]] == ["none", "decoded", "encoder"]
    assert profile["items"] == 8 and profile["question"] == "What colour is the shape?"
    assert (none["encodes"], decoded["encodes"], encoder["encodes"]) == (8, 8, 0)
    assert none["decodes"] >= 8 and (decoded["decodes"], encoder["decodes"]) == (0, 0)
    assert none["retained_bytes"] == 0 and none["saved_ms_per_mb"] is None
    assert decoded["retained_bytes"] > 100_000 and encoder["retained_bytes"] > 10_000
    assert encoder["encode_seconds"] < none["encode_seconds"] and encoder["saved_ms"] > 0
    saved = 1e3 * (none["encode_seconds"] - encoder["encode_seconds"])
    assert encoder["saved_ms_per_mb"] == pytest.approx(saved / (encoder["retained_bytes"] / 1e6))
    assert all(each["same_output"] for each in profile["tiers"])
    assert decoded["identity"] == list(FrameKeyTerms.__slots__)
    assert encoder["identity"] == list(FeatureKeyTerms.__slots__)
    assert "weights" in encoder["identity"] and "weights" not in decoded["identity"]
    assert not list((tmp_path / "store").glob("profiling-*")) and not (tmp_path / "output").exists()


def test_answers_that_differ_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = flow.run

    def run(config: Any) -> dict[str, Any]:
        if config.run_id == "decoded":  # as if kept frames were others
            config = parse_config(config.model_dump() | {"prompt": "Something else."}, "test")
        return whole(config)

    monkeypatch.setattr(flow, "run", run)
    code, output, profile = profiled(tmp_path, "--items", "4")
    assert code == 1 and "NO" in output
    assert [each["same_output"] for each in profile["tiers"]] == [True, False, True]


def test_a_job_without_questions_is_refused(tmp_path: Path) -> None:
    words = ["profile-cache", str(CONFIGS / "demo_embed.yaml"), "--set", f"input={tmp_path}/in/manifest.jsonl"]
    done = CliRunner().invoke(app, [*words, "--set", f"store.path={tmp_path}/store"])
    assert done.exit_code == 2 and "asks no question about media" in done.output
