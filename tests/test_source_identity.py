"""`store.identity`: what a second question reads of known media, and what it takes them for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipeline import flow
from pipeline.config import parse_config
from pipeline.features.store import FeatureStore
from tests.media.media_files import long_video
from tests.models.dual_folders import FAMILIES, save_dual
from tests.without_ray import run_without_ray


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dual(tmp_path_factory.mktemp("model"), *FAMILIES["clip"]())


def pictures(folder: Path, number: int) -> list[Path]:
    """Two that no other number has: of the one the bytes travel on from the probe, the other is larger."""
    paths = [folder / f"small-{number}.png", folder / f"large-{number}.bmp"]
    for turns, path in enumerate(paths):
        picture = Image.linear_gradient("L").rotate(90 * turns).resize((400, 300)).convert("RGB")
        picture.putpixel((0, 0), (number, 0, 0))
        picture.save(path)
    assert paths[0].stat().st_size < 256 * 1024 < paths[1].stat().st_size
    return paths


def run(folder: Path, model: Path, rows: list[dict[str, Any]], identity: str, **changes: Any) -> dict[str, Any]:
    """The summary of a new run of `rows`."""
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    number = len(list(folder.glob("output/*/summary.json")))
    store = {"path": str(folder / "store"), "identity": identity, **changes.pop("store", {})}
    raw = {"job": "embed_backfill", "input": str(manifest), "output": str(folder / "output"), "model": str(model)}
    return flow.run(parse_config({**raw, "run_id": f"run-{number}", "store": store, **changes}))


def listed(paths: list[Path], **more: Any) -> list[dict[str, Any]]:
    return [{"id": path.name, "uri": str(path), **more} for path in paths]


def work(summary: dict[str, Any]) -> tuple[int, int]:
    """(fetches, encodes)"""
    assert summary["items_written"] == summary["items_in"]
    return summary["fetches"], summary["encodes"]


def test_a_second_question_reads_what_is_not_known_by_its_id(tmp_path: Path, model: Path) -> None:
    """Of each two pictures the storage says size and time, which are no promise; the caller a version; or a hash."""
    rows = []
    for number, said in enumerate(("time", "version", "sha256")):
        for path in pictures(tmp_path, number):
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            rows += listed([path], **{"time": {}, "version": {"version": "7"}, "sha256": {"sha256": sha256}}[said])
    assert work(run(tmp_path, model, rows, "content")) == (6 + 3, 6)  # large ones that are new are opened twice
    found = {mode: work(run(tmp_path, model, rows, mode)) for mode in ("content", "version", "auto")}
    assert found == {"content": (4, 0), "version": (0, 0), "auto": (2, 0)}


def test_other_bytes_of_the_same_size_and_time(tmp_path: Path, model: Path) -> None:
    """A change that the file system does not tell is found by whoever reads; and by `version` from then on."""
    _, path = pictures(tmp_path, 0)
    assert work(run(tmp_path, model, listed([path]), "version")) == (2, 1)
    was = path.stat()
    data = bytearray(path.read_bytes())
    data[-9000:] = bytes(9000)
    path.write_bytes(data)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert work(run(tmp_path, model, listed([path]), "version")) == (0, 0)
    assert work(run(tmp_path, model, listed([path]), "auto")) == (2, 1)
    assert work(run(tmp_path, model, listed([path]), "version")) == (0, 0)
    sources = FeatureStore(str(tmp_path / "store")).sources
    [entry] = sources.find([f"file:{path}:{was.st_size}:{was.st_mtime_ns}"]).values()
    assert entry.content == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_the_same_bytes_at_two_places_are_encoded_once(tmp_path: Path, model: Path) -> None:
    _, path = pictures(tmp_path, 0)
    copies = [tmp_path / f"copy-{number}.bmp" for number in range(2)]
    for copy in copies:
        shutil.copy(path, copy)
    first = run(tmp_path, model, listed([path, copies[0]]), "content")
    assert (first["encodes"], first["features_reused"]) == (1, 1)
    assert work(run(tmp_path, model, listed(copies), "content")) == (2, 0)
    # What was found of them is known from then on.
    assert work(run(tmp_path, model, listed(copies), "version")) == (0, 0)


def test_a_large_video_is_hashed_as_a_stream(tmp_path: Path, model: Path) -> None:
    """By version it is read in part, and known by its id alone; by content its copy is known, too."""
    path, copy = tmp_path / "long.mp4", tmp_path / "copy.mp4"
    path.write_bytes(long_video(num_groups=20))
    shutil.copy(path, copy)
    size = path.stat().st_size
    ranged = {"decode": {"max_whole_bytes": 300_000}, "sampling": {"policy": "uniform", "num_frames": 2}}
    by_version = run(tmp_path, model, listed([path]), "version", **ranged)
    assert by_version["encodes"] == 1 and by_version["bytes_fetched"] < size / 2
    by_content = run(tmp_path, model, listed([path]), "auto", **ranged)
    assert by_content["encodes"] == 1 and size < by_content["bytes_fetched"] < 1.5 * size
    again = run(tmp_path, model, listed([copy]), "content", **ranged)
    assert work(again) == (1, 0) and again["bytes_fetched"] >= size


def test_what_has_to_be_read_is_not_carried_over_unread(tmp_path: Path, model: Path) -> None:
    paths = pictures(tmp_path, 0)
    rows = [*listed(paths[:1]), *listed(paths[1:], sha256=hashlib.sha256(paths[1].read_bytes()).hexdigest())]
    run(tmp_path, model, rows, "content")
    summary = run(tmp_path, model, rows, "content", incremental={"base": "latest"})
    assert summary["items_carried"] == 1
    assert work(summary) == (1, 0)
