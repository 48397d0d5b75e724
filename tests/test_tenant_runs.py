"""Runs over several tenants' media: each tenant's features, frames and sources lie below its folder, for it alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import flow
from pipeline.config import Config, parse_config
from pipeline.deletion import Selection, delete
from pipeline.features.store import FeatureStore
from pipeline.runs.receipts import receipt_from_json
from tests.models.dual_folders import FAMILIES, save_dual
from tests.without_ray import run_without_ray


def test_tenants_of_one_window_share_batches_and_nothing_else(
    tmp_path: Path, demo_media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_ray(monkeypatch)
    model = save_dual(tmp_path / "model", *FAMILIES["clip"]())
    images = sorted((demo_media / "media").glob("image*"))[:3]

    def configured(run_id: str, *tenants: str) -> Config:
        rows = [
            {"id": f"{tenant}{path.name}", "uri": str(path), "tenant": tenant} for path in images for tenant in tenants
        ]
        manifest = tmp_path / f"{run_id}.jsonl"
        manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
        raw: dict[str, Any] = {"job": "embed_backfill", "input": str(manifest), "model": str(model), "run_id": run_id}
        store = {"path": str(tmp_path / "store"), "keep_frames": True}
        return parse_config({**raw, "output": str(tmp_path / "output"), "store": store})

    def run(*arguments: str) -> tuple[int, int, int]:
        summary = flow.run(configured(*arguments))
        assert summary["items_written"] == summary["items_in"]
        return summary["fetches"], summary["images_decoded"], summary["encodes"]

    assert run("first", "acme", "globex", "") == (9, 9, 9)
    root = tmp_path / "store"
    for folder in (root, root / "tenants" / "acme", root / "tenants" / "globex"):
        places = [folder / name for name in ("shards", "catalogue", "sources", "frames/shards", "frames/catalogue")]
        assert [len(list(place.iterdir())) for place in places] == [1] * 5
    assert not list(root.glob("**/open/2*")) + list(root.glob("**/open/*_2*"))  # all are sealed
    # Known to those whose they are; another tenant starts with nothing.
    assert run("second", "acme", "globex", "") == (0, 0, 0)
    assert run("third", "initech", "acme") == (3, 3, 3)

    store = FeatureStore(str(root))
    [encoded] = {shard.shard_id for shard in store.of_tenant("acme").own_shards()}
    assert encoded.startswith("acme_")
    receipt = delete(configured("first", "acme"), store, Selection(tenant="acme"))
    assert receipt.records == {"frames": 3, "features": 3}
    assert receipt.sources == 3 + 3  # with those of nobody's; globex's are its own
    assert sorted(path.name for path in (root / "tenants").iterdir()) == ["globex", "initech"]
    assert run("fourth", "acme", "globex", "initech") == (3, 3, 3)


def test_receipts_of_before_there_were_tenants_folders_are_read() -> None:
    written = (
        '{"batch": 0, "counts": {}, "digest": "d", "quarantine": {}, "seconds": {}, "shard": "s", "stage": "encode"'
    )
    assert receipt_from_json(written + ', "window": 1}').shards == ("s",)
    assert receipt_from_json(written.replace('"s"', '""') + ', "window": 1}').shards == ()
