"""A whole run with `store.keep_frames`, and another model's after it: what the summary says, and the same vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline import flow
from pipeline.config import parse_config
from pipeline.features.inspect import describe_store
from pipeline.features.store import FeatureStore
from tests.models.dual_folders import FAMILIES, save_dual
from tests.without_ray import run_without_ray

UNTOUCHED = ("fetches", "bytes_fetched", "images_decoded", "frames_decoded", "pages_decoded", "frames_missed")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def run(folder: Path, manifest: Path, model: Path, run_id: str, **store: Any) -> tuple[dict[str, Any], pa.Table]:
    """The summary, and all parts."""
    summary = flow.run(
        parse_config(
            {
                "job": "embed_backfill",
                "input": str(manifest),
                "output": str(folder / "output"),
                "run_id": run_id,
                "model": str(model),
                "store": {"path": str(folder / "store"), **store},
                "ray": {"first_window_items": 8, "window_items": 8},
            }
        )
    )
    paths = sorted((folder / "output" / run_id).glob("part-*.parquet"))
    return summary, pa.concat_tables(pq.read_table(path) for path in paths)


def test_a_dual_encoder_that_is_replaced_needs_no_media(tmp_path: Path, demo_media: Path) -> None:
    rows = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    manifest = tmp_path / "manifest.jsonl"
    entries = [{"id": row["id"], "uri": str(demo_media / row["media"][0]["uri"])} for row in rows]
    manifest.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    model, processor = FAMILIES["clip"]()  # its processor crops
    older = save_dual(tmp_path / "older", model, processor)
    with torch.no_grad():
        model.vision_model.post_layernorm.weight[0] += 0.5
    newer = save_dual(tmp_path / "newer", model, processor)

    first, vectors = run(tmp_path, manifest, older, "first", keep_frames=True)
    assert (first["encodes"], first["frames_missed"], first["frames_reused"]) == (20, 20, 0)
    assert first["frames_bytes_written"] > 0
    store = tmp_path / "store"
    assert not list((store / "frames" / "open").glob("[!.]*"))  # sealed, and so found by every machine
    raw = 32 * 32 * 3 * (first["images_decoded"] + first["frames_decoded"])
    assert first["frames_bytes_written"] < raw

    # What each record took, together: what the run's stages took.
    stages = [first["seconds"][name] for name in ("media_fetch", "media_decode", "vision_encode")]
    took = describe_store(FeatureStore(str(store)))["tiers"]
    assert took["features"]["made_seconds"] == pytest.approx(sum(stages), rel=2e-3)
    assert took["frames"]["made_seconds"] == pytest.approx(sum(stages[:2]), rel=2e-3)
    nothing = {"fallbacks": 0, "evictions": 0, "evicted_bytes": 0, "max_bytes": None}
    made = {"found": 0, "made": 20, "hit_rate": 0.0, "saved_seconds": 0.0, **nothing}
    assert {name: made | {"bytes": first["tiers"][name]["bytes"]} for name in took} == {
        name: first["tiers"][name] for name in took
    }
    assert first["tiers"]["frames"]["bytes"] == FeatureStore(str(store)).frames.num_bytes()

    second, others = run(tmp_path, manifest, newer, "second", keep_frames=True)
    assert {name: second[name] for name in UNTOUCHED} == dict.fromkeys(UNTOUCHED, 0)
    assert (second["encodes"], second["frames_reused"], second["features_reused"]) == (20, 20, 0)
    assert second["frames_bytes_read"] == first["frames_bytes_written"]
    assert second["sandbox"] == {}
    saved = [second["tiers"][name] for name in ("frames", "features")]
    assert [(each["found"], each["made"], each["hit_rate"]) for each in saved] == [(20, 0, 1.0), (0, 20, 0.0)]
    # That, less the time in which they were read, which is all that was fetched.
    reading = took["frames"]["made_seconds"] - saved[0]["saved_seconds"]
    assert reading == pytest.approx(second["seconds"]["media_fetch"], abs=0.01)
    again, _ = run(tmp_path, manifest, newer, "again", keep_frames=True)
    made_seconds = describe_store(FeatureStore(str(store)))["tiers"]["features"]["made_seconds"]
    found = again["tiers"]["features"]
    assert (found["found"], found["made"]) == (20, 0)
    reading = made_seconds - took["features"]["made_seconds"] - found["saved_seconds"]
    assert 0 < reading < again["seconds"]["plan"]
    scratch, expected = run(tmp_path, manifest, newer, "scratch", path=str(tmp_path / "apart"))
    assert (scratch["images_decoded"], scratch["frames_reused"]) == (12, 0)
    assert others.equals(expected)
    assert not others.equals(vectors)
