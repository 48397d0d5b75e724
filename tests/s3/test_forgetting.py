"""`headrace store delete` where store and output lie on S3: nothing readable is left in any object, nor on the disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from jobs.cli import app
from pipeline import flow
from pipeline.config import parse_config
from pipeline.features.store import FeatureStore
from pipeline.features.verify import verify
from pipeline.storage import Folder
from tests.models.dual_folders import FAMILIES, save_dual
from tests.s3.conftest import S3
from tests.without_ray import run_without_ray

NAMES = ("person-4711", "person-0815", "person-1234", "person-2345")


def readable(data: bytes, name: str) -> bytes:
    """The bytes of a file, and of a Parquet file its values besides; vectors as float32."""
    if not name.endswith(".parquet"):
        return data
    table = pq.read_table(pa.BufferReader(data))
    values = [value for column in table.columns for value in column.to_pylist()]
    lists = [value for value in values if isinstance(value, list) and value and isinstance(value[0], float)]
    numbers = [np.array(value, np.float32).tobytes() for value in lists]
    return b"".join([data, json.dumps(values, default=str).encode(), *numbers])


def holding(s3: S3, local: Path, needles: list[bytes]) -> list[str]:
    """Every object below the prefix, and every file of this machine's part of the store, that has one of `needles`."""
    files = {name: bytes(s3.other.cat_file(f"{s3.folder.path}/{name}")) for name in s3.names()}
    files |= {str(path): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    return [name for name, data in files.items() if any(needle in readable(data, name) for needle in needles)]


@pytest.mark.slow
def test_nothing_of_it_is_left_on_s3(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)
    model, local = save_dual(tmp_path / "model", *FAMILIES["clip"]()), tmp_path / "local"
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(NAMES):
        picture = tmp_path / f"{name}.png"
        Image.effect_noise((96, 64), 20 + number).convert("RGB").save(picture)
        rows.append({"id": name, "uri": str(picture), "tenant": "ab"[number % 2]})
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "job": "embed_backfill",
        "input": str(tmp_path / "given.jsonl"),
        "output": f"{s3.url}/output",
        "run_id": "night",
        "model": str(model),
        "store": {"path": f"{s3.url}/store", "local_path": str(local), "keep_frames": True},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    assert flow.run(parse_config(raw))["encodes"] == 4
    run = Folder(f"{s3.url}/output/night")
    part = pq.read_table(pa.BufferReader(run.read_bytes("part-000000.parquet"))).to_pylist()
    encoded = pq.read_table(pa.BufferReader(run.read_bytes("_run/encoded/window-000000.parquet"))).to_pylist()

    def needles(number: int) -> list[bytes]:
        """What tells of an item: its name, its content, the key of its features, and they themselves."""
        content = hashlib.sha256((tmp_path / f"{NAMES[number]}.png").read_bytes()).hexdigest()
        [key] = [row["key"] for row in encoded if row["item_index"] == number]
        return [
            *(text.encode() for text in (NAMES[number], content, key)),
            np.array(part[number]["vector"], "<f4").tobytes(),
        ]

    def delete(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["store", "delete", str(tmp_path / "job.yaml"), *words])
        assert done.exit_code == 0, done.output
        return dict(json.loads(done.stdout.rpartition("}")[0] + "}"))

    assert all(holding(s3, local, [needle]) for number in range(4) for needle in needles(number))
    shown = delete("--tenant", "a", "--item", NAMES[0])
    assert shown["records"] == {"frames": 1, "features": 1} and holding(s3, local, needles(0))
    receipt = delete("--tenant", "a", "--item", NAMES[0], "--yes")
    assert (receipt["records"], receipt["sources"]) == ({"frames": 1, "features": 1}, 1)
    assert holding(s3, local, needles(0)) == []
    assert all(holding(s3, local, [needle]) for number in (1, 2, 3) for needle in needles(number))

    assert delete("--tenant", "b", "--yes")["records"] == {"frames": 2, "features": 2}
    assert holding(s3, local, [*needles(1), *needles(3)]) == []
    assert not [name for name in s3.names() if name.startswith("store/tenants/b")]
    store = FeatureStore(f"{s3.url}/store", str(local))
    assert list(verify(store)) == [] and len(store.sealed_shards()) == 1
    summary = run.read_json("summary.json")
    assert (summary["items_written"], summary["items_skipped"]) == (1, 3)
    assert flow.run(parse_config(raw))["items_written"] == 1  # ended, and makes nothing anew
    assert holding(s3, local, [*needles(0), *needles(1), *needles(3)]) == []
