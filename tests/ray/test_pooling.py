"""Jobs that embed, on Ray: a driver that is killed while vectors go out, and resumed."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline import flow
from pipeline.config import Sinks, load_config
from tests.models.dual_folders import FAMILIES, WORDS, save_dual
from tests.ray.conftest import Driver, Job, files
from tests.without_ray import run_without_ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_killed_while_vectors_go_out_and_resumed(
    tmp_path: Path, demo_media: Path, start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    media = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    rng = random.Random(3)
    rows: list[dict[str, Any]] = [
        *({"id": row["id"], "uri": str(demo_media / row["media"][0]["uri"])} for row in media),
        *({"id": f"t{n}", "text": " ".join(rng.choices(WORDS, k=5))} for n in range(60)),
        {"id": "missing", "uri": "/nowhere.png"},
    ]
    rng.shuffle(rows)
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "job": "embed_backfill",
        "input": str(manifest),
        "output": str(tmp_path / "output"),
        "model": str(save_dual(tmp_path / "model", *FAMILIES["clip"]())),
        "text": {"max_batch_items": 4},
        "store": {"path": str(tmp_path / "store")},
        "sinks": {"lancedb": {"uri": str(tmp_path / "lance"), "collection": "things"}},
        "ray": {"num_cpus": 1, "object_store_bytes": 100_000_000, "first_window_items": 8, "window_items": 8},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    job = Job(config=tmp_path / "job.yaml", output=tmp_path / "output")
    driver = start(job, name="embed_backfill")
    driver.until(lambda: (job.output / "latest").exists() and len(files(job.folder, "_run/ledger/sink_*")) >= 2)
    assert driver.signal(signal.SIGKILL) == -signal.SIGKILL
    assert not (job.folder / "summary.json").exists()
    driver = start(job, name="embed_backfill")
    assert driver.wait() == 0, driver.said
    summary = job.summary()
    assert (summary["items_in"], summary["items_written"], summary["quarantine"]) == (81, 80, {"not_found": 1})
    [(table, count)] = summary["points"].items()
    points = lancedb.connect(str(tmp_path / "lance")).open_table(table).to_arrow()
    assert count == 80 == len(points) == len(set(points["item_id"].to_pylist()))

    run_without_ray(monkeypatch)
    own = {"output": str(tmp_path / "other"), "sinks": Sinks()}
    expected = flow.run(load_config(str(job.config)).model_copy(update=own))
    assert rows_of(job.folder).equals(rows_of(tmp_path / "other" / expected["run_id"]))


def rows_of(run: Path) -> pa.Table:
    """All parts of a run."""
    return pa.concat_tables(pq.read_table(path) for path in sorted(run.glob("part-*.parquet")))
