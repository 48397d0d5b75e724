"""Members of archives through every stage: the answers of the same files beside each other, and hostile members."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import Config
from tests.media.archive_files import add, make_tar, make_zip
from tests.media.media_files import Recipe, make_image, make_video
from tests.stages.line import Line

FILES = {"a.png": make_image("PNG"), "clips/b.mp4": make_video(Recipe(num_frames=45)), "c.jpg": make_image("JPEG")}


@pytest.mark.parametrize("kind", ["tar", "stored.zip", "deflated.zip"])
def test_members_are_answered_as_files_are(tmp_path: Path, make_config: Callable[..., Config], kind: str) -> None:
    folder, archive = tmp_path / "folder", tmp_path / f"all.{kind}"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    files = {**FILES, "c.json": b"{}", ".hidden.jpg": b"x"}
    method = zipfile.ZIP_STORED if kind.startswith("stored") else zipfile.ZIP_DEFLATED
    archive.write_bytes(make_tar(files) if kind == "tar" else make_zip(files, method=method))
    decode = {"max_inline_bytes": 1024}  # so that headers are read by range
    expected = Line(make_config(folder, decode=decode, store={"path": str(tmp_path / "other")}))
    found = Line(make_config(archive, decode=decode))
    assert [row["id"] for row in found.rows] == ["a.png", "c.jpg", "clips/b.mp4"]
    assert found.rows == expected.rows
    assert {row["status"] for row in found.rows} == {"ok"}
    # Content has one key wherever it lies: in the store of the folder's run everything is found.
    assert Line(make_config(archive, store={"path": str(tmp_path / "other")})).count("encodes") == 0


def test_each_bad_member_by_itself(
    tmp_path: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        add(archive, "good.png", FILES["a.png"])
        add(archive, "link.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(archive, "../out.png", FILES["a.png"])
        add(archive, "empty.png")
        add(archive, "cut.png", FILES["a.png"] * 20)
    (tmp_path / "a.tar").write_bytes(buffer.getvalue()[: buffer.getvalue().index(FILES["a.png"] * 20) + 100])
    names = ("good.png", "link.png", "../out.png", "empty.png", "cut.png")
    line = Line(make_config(write_manifest([{"id": name, "uri": f"a.tar#{name}"} for name in names])))
    assert {row["id"]: row["code"] for row in line.rows} == {
        "good.png": None,
        "link.png": "member_refused",
        "../out.png": "member_refused",
        "empty.png": "empty_file",
        "cut.png": "corrupt_archive",
    }
