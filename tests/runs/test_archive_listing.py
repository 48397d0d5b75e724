"""Archives as input: which members are listed, and which archives are refused."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from pipeline.errors import ManifestError
from pipeline.runs.listing import read_manifest
from tests.media.archive_files import make_tar, make_zip

FILES = {"b.jpg": b"1", "sub/a.mp4": b"2", "a.pdf": b"3", "a.json": b"{}", ".a.jpg": b"4", "sub/.b/c.jpg": b"5"}


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("place", ["local", "memory"])
def test_members_that_are_named_as_media(tmp_path: Path, kind: str, place: str) -> None:
    uri = f"{tmp_path}/all.{kind}" if place == "local" else f"memory://listing{tmp_path}/all.{kind}"
    with fsspec.open(uri if "://" in uri else f"file://{uri}", "wb") as file:
        file.write({"tar": make_tar, "zip": make_zip}[kind](FILES))
    requests = list(read_manifest(uri, limit=None))
    assert [request.id for request in requests] == ["a.pdf", "b.jpg", "sub/a.mp4"]
    assert [request.media[0].uri for request in requests] == [f"{uri}#{request.id}" for request in requests]
    assert [request.media[0].modality for request in requests] == [None, "image", "video"]
    assert [request.item_index for request in read_manifest(uri, limit=2)] == [0, 1]


@pytest.mark.parametrize("pattern", ["", "/*.tar"])
def test_archives_in_a_folder(tmp_path: Path, pattern: str) -> None:
    for shard in range(2):
        (tmp_path / f"{shard}.tar").write_bytes(make_tar({"b.jpg": b"1", "a.jpg": b"2", "a.txt": b"3"}))
    ids = ["0.tar#a.jpg", "0.tar#b.jpg", "1.tar#a.jpg", "1.tar#b.jpg"]
    requests = list(read_manifest(f"{tmp_path}{pattern}", limit=None))
    assert [request.id for request in requests] == ids
    assert [request.media[0].uri for request in requests] == [f"{tmp_path}/{id_}" for id_ in ids]
    (tmp_path / "1.tar").write_bytes(b"not a tar" * 100)
    assert len(list(read_manifest(f"{tmp_path}{pattern}", limit=2))) == 2
    with pytest.raises(ManifestError, match=r"1\.tar: there is no valid header"):
        list(read_manifest(f"{tmp_path}{pattern}", limit=3))


@pytest.mark.parametrize(
    "data, problem",
    [
        (make_tar(FILES)[:1200], "it ends at byte 1200"),
        (make_tar({"a.txt": b"1"}), "none of its members is named as media"),
        (b"not a tar" * 100, "no valid header at byte 0"),
    ],
)
def test_archives_that_are_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "all.tar"
    path.write_bytes(data)
    with pytest.raises(ManifestError, match=problem):
        list(read_manifest(str(path), limit=None))


def test_relative_members_start_at_the_manifests_folder(tmp_path: Path) -> None:
    manifest = tmp_path / "m.jsonl"
    manifest.write_text('{"id": "a", "uri": "./x/../s.tar#../a.jpg"}\n{"id": "b", "uri": "s.tar#./b.jpg"}\n')
    uris = [request.media[0].uri for request in read_manifest(str(manifest), limit=None)]
    assert uris == [f"{tmp_path}/s.tar#../a.jpg", f"{tmp_path}/s.tar#./b.jpg"]


def test_members_at_urls_have_the_modality_of_their_names(tmp_path: Path) -> None:
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(
        '{"id": "a", "uri": "https://h/s.tar?sig=1#a.jpg"}\n{"id": "b", "uri": "https://h/b.mp4?x=a.jpg"}\n'
    )
    assert [request.media[0].modality for request in read_manifest(str(manifest), limit=None)] == ["image", "video"]
