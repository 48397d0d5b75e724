"""Scoring of media, on Ray: a driver that is killed while it encodes, resumed, and asked by another activation."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline import flow
from pipeline.config import load_config
from tests.models.classifier_folders import CLASSIFIERS, save_classifier
from tests.ray.conftest import Driver, Job, files
from tests.without_ray import run_without_ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def test_killed_while_it_encodes_resumed_and_asked_otherwise(
    tmp_path: Path, demo_media: Path, start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    media = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    rows: list[dict[str, Any]] = [
        {"id": f"{row['id']}-{tenant}", "uri": str(demo_media / row["media"][0]["uri"]), "tenant": str(tenant)}
        for tenant in range(4)  # features of one tenant never answer for another's
        for row in media
    ]
    rows.insert(7, {"id": "missing", "uri": "/nowhere.png"})
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "job": "score_media",
        "input": str(manifest),
        "output": str(tmp_path / "output"),
        "model": str(save_classifier(tmp_path / "model", *CLASSIFIERS["convnext"]())),
        "sampling": {"fps": 2, "max_frames": 8},
        "encode": {"max_batch_items": 4},
        "score": {"activation": "none", "per_frame": True},
        "store": {"path": str(tmp_path / "store")},
        "ray": {
            "num_cpus": 3,
            "encode_workers": 2,
            "object_store_bytes": 100_000_000,
            "first_window_items": 8,
            "window_items": 8,
            "segment_windows": 4,
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    job = Job(config=tmp_path / "job.yaml", output=tmp_path / "output")
    driver = start(job, name="score_media")
    driver.until(lambda: (job.output / "latest").exists() and len(files(job.folder, "_run/ledger/encode-*")) >= 2)
    assert driver.signal(signal.SIGKILL) == -signal.SIGKILL
    assert not (job.folder / "summary.json").exists()
    driver = start(job, name="score_media")
    assert driver.wait() == 0, driver.said
    summary, plain = job.summary(), rows_of(job.folder)
    assert (summary["items_in"], summary["items_written"]) == (81, 80)
    assert summary["quarantine"] == {"not_found": 1} and [row["id"] for row in plain] == [row["id"] for row in rows]

    driver = start(job, "score.activation=sigmoid", name="score_media")
    assert driver.wait() == 0, driver.said
    again, applied = job.summary(), rows_of(job.folder)
    assert again["run_id"] != summary["run_id"] and (again["encodes"], again["frames_decoded"]) == (0, 0)
    assert again["items_reused"] == again["items_written"] == 80
    for before, after in zip(plain, applied, strict=True):
        if before["status"] == "ok":
            np.testing.assert_allclose(after["scores"], 1 / (1 + np.exp(-np.array(before["scores"]))), atol=1e-6)

    run_without_ray(monkeypatch)
    own = load_config(str(job.config), [f"output={tmp_path / 'other'}", f"store.path={tmp_path / 'own'}"])
    expected = rows_of(tmp_path / "other" / flow.run(own)["run_id"])
    assert [row["label"] for row in plain] == [row["label"] for row in expected]
    for ours, theirs in zip(plain, expected, strict=True):
        assert (ours["status"], ours["code"]) == (theirs["status"], theirs["code"])
        np.testing.assert_allclose(ours["scores"] or [], theirs["scores"] or [], atol=2e-6)
        assert len(ours["frames"] or []) == len(theirs["frames"] or [])


def rows_of(run: Path) -> list[dict[str, Any]]:
    """All parts of a run, in order."""
    return [row for path in sorted(run.glob("part-*.parquet")) for row in pq.read_table(path).to_pylist()]
