"""Media on S3 are known again by what the server says of them: a second question, or another model, fetches nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipeline import flow
from pipeline.config import parse_config
from pipeline.media.source import stat_source
from pipeline.schema import MediaItem
from tests.models.dual_folders import FAMILIES, save_dual
from tests.s3.conftest import BUCKET, S3
from tests.without_ray import run_without_ray


def put_picture(s3: S3, name: str, colour: str, scratch: Path) -> None:
    """An uncompressed picture: every colour takes the same bytes."""
    Image.new("RGB", (400, 300), colour).save(scratch / "picture.bmp")
    s3.folder.write_bytes(name, (scratch / "picture.bmp").read_bytes())


def test_known_objects_are_not_fetched_and_replaced_ones_are(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_ray(monkeypatch)
    model = save_dual(tmp_path / "model", *FAMILIES["clip"]())
    colours = {"a.bmp": "red", "b.bmp": "blue"}
    for name, colour in colours.items():
        put_picture(s3, name, colour, tmp_path)
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text("".join(json.dumps({"id": name, "uri": f"{s3.url}/{name}"}) + "\n" for name in colours))

    def run(run_id: str, identity: str, **changes: Any) -> tuple[int, int, int]:
        raw = {"job": "embed_backfill", "input": str(manifest), "output": str(tmp_path / "output"), "model": str(model)}
        store = {"path": str(tmp_path / "store"), "identity": identity, "keep_frames": True}
        summary = flow.run(parse_config({**raw, "run_id": run_id, "store": store, **changes}))
        assert summary["items_written"] == 2
        return summary["fetches"], summary["images_decoded"], summary["encodes"]

    assert run("first", "auto") == (4, 2, 2)  # for the header, and whole
    assert run("second", "auto") == (0, 0, 0)
    assert run("precise", "auto", encode={"dtype": "bfloat16"}) == (0, 0, 2)  # other features of the kept frames
    put_picture(s3, "b.bmp", "green", tmp_path)
    assert run("replaced", "auto") == (2, 1, 1)
    assert run("read", "content") == (2, 0, 0)


def test_versions_of_an_object_are_other_sources(s3: S3) -> None:
    """In a bucket with versions also of equal bytes, for an MD5 does not tell all bytes apart."""
    bucket = f"{BUCKET}-versions"
    if not s3.other.exists(bucket):
        s3.other.mkdir(bucket)
    s3.other.call_s3("put_bucket_versioning", Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    item, found = MediaItem(uri=f"s3://{bucket}/{s3.folder.path.rpartition('/')[2]}"), []
    for _ in range(2):
        s3.other.pipe_file(item.uri, b"the same bytes")
        found.append(stat_source(item))
    assert found[0].source_id != found[1].source_id
    assert found[0].source_id.rpartition(":")[0] == found[1].source_id.rpartition(":")[0]
    assert {facts.strength for facts in found} == {"strong"}
    assert stat_source(item) == found[1]
