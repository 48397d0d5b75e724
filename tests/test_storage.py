"""A folder shows whole files or none, wherever it lies."""

import json
import os
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from pipeline.errors import ConfigError
from pipeline.storage import Folder


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "local":
        yield Folder(str(tmp_path / "root"))
        return
    name = uuid.uuid4().hex
    yield Folder(f"memory://{name}/root")
    fs = fsspec.filesystem("memory")
    if fs.exists(f"/{name}"):
        fs.rm(f"/{name}", recursive=True)


def everything(folder: Folder) -> list[str]:
    """Every file below the folder, temporary ones included, relative to it."""
    return sorted(path.removeprefix(f"{folder.path}/") for path in folder.fs.find(folder.path))


def test_what_was_written_is_read(folder: Folder) -> None:
    folder.write_bytes("a/b.bin", b"\x00\xff")
    assert folder.read_bytes("a/b.bin") == b"\x00\xff"
    folder.write_bytes("a/b.bin", b"second")
    with folder.open("a/b.bin") as file:
        file.seek(2)
        assert file.read() == b"cond"
    assert everything(folder) == ["a/b.bin"]


def test_json_is_the_same_bytes_for_equal_values(folder: Folder) -> None:
    folder.write_json("1.json", {"b": [1, None], "a": "ü"})
    folder.write_json("2.json", {"a": "ü", "b": [1, None]})
    assert folder.read_bytes("1.json") == folder.read_bytes("2.json")
    assert folder.read_json("1.json") == json.loads('{"a": "ü", "b": [1, null]}')


def test_an_absent_file_is_said_so(folder: Folder) -> None:
    assert not folder.exists("x")
    assert folder.list() == folder.list("x") == []
    with pytest.raises(FileNotFoundError):
        folder.read_bytes("x")
    folder.remove("x")


def test_nothing_is_visible_while_a_file_is_written(folder: Folder) -> None:
    folder.write_bytes("d/old", b"old")
    with folder.writing("d/old") as replacement, folder.writing("d/new") as new:
        replacement.write(b"replacement")
        new.write(b"new")
        new.flush()
        assert folder.read_bytes("d/old") == b"old"
        assert folder.list("d") == ["old"]
        assert not folder.exists("d/new")
    assert (folder.read_bytes("d/old"), folder.read_bytes("d/new")) == (b"replacement", b"new")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_things_as_they_were(folder: Folder, error: type[BaseException]) -> None:
    folder.write_bytes("old", b"old")
    for name in ("old", "new", "deeper/new"):
        with pytest.raises(error), folder.writing(name) as file:
            file.write(b"half")
            file.flush()
            raise error
    assert folder.read_bytes("old") == b"old"
    assert everything(folder) == ["old"]


def test_lists_files_directly_below_in_order(folder: Folder) -> None:
    for name in ("part-2.parquet", "part-1.parquet", "notes.txt", "part-3.parquet.0123.tmp", "sub/part-9.parquet"):
        folder.write_bytes(name, b"x")
    assert folder.list() == ["notes.txt", "part-1.parquet", "part-2.parquet"]
    assert folder.list(suffix=".parquet") == ["part-1.parquet", "part-2.parquet"]
    assert folder.list("sub") == ["part-9.parquet"]


def test_removes_files_and_folders(folder: Folder) -> None:
    for name in ("keep", "gone", "tree/a", "tree/deep/b"):
        folder.write_bytes(name, b"x")
    folder.remove("gone")
    folder.remove("tree")
    assert everything(folder) == ["keep"]


def test_a_file_is_created_once(folder: Folder) -> None:
    folder.create_bytes("a/x", b"1")
    with pytest.raises(FileExistsError):
        folder.create_bytes("a/x", b"2")
    assert folder.read_bytes("a/x") == b"1"


def test_without_versions_a_swap_replaces_what_is_there(folder: Folder) -> None:
    assert folder.version("x") is None
    folder.write_bytes("x", b"1")
    assert folder.version("x") == ""
    assert folder.swap_bytes("x", b"2", "")
    assert folder.read_bytes("x") == b"2"


def test_local_files_go_up_and_come_down(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "up").write_bytes(b"x" * 100_000)
    folder.upload(str(tmp_path / "up"), "deep/x")
    folder.download("deep/x", str(tmp_path / "down"))
    assert (tmp_path / "down").read_bytes() == (tmp_path / "up").read_bytes()
    with pytest.raises(FileNotFoundError):
        folder.download("never", str(tmp_path / "none"))


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="nonsense:// cannot be used"):
        Folder("nonsense://x/y")


def test_a_subfolder_and_a_pickled_copy_are_the_same_place(folder: Folder) -> None:
    folder.sub("a").sub("b").write_bytes("c", b"x")
    assert folder.read_bytes("a/b/c") == b"x"
    copy: Folder = pickle.loads(pickle.dumps(folder))
    assert (copy.url, copy.path, copy.is_local) == (folder.url, folder.path, folder.is_local)


@pytest.mark.parametrize("url", ["out/run", "./out/run/", "file://out/run"])
def test_a_relative_path_means_the_directory_it_was_named_in(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Folder(url)
    packed = pickle.dumps(folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    pickle.loads(packed).sub("s").write_bytes("f", b"x")
    assert (tmp_path / "out/run/s/f").read_bytes() == b"x"
    assert os.listdir(".") == []


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Folder("~/store").path == str(tmp_path / "store")


@pytest.mark.parametrize(("url", "below"), [("/", "/a/b"), ("memory://", "/a/b"), ("memory:///", "/a/b")])
def test_a_root_is_a_folder_too(url: str, below: str) -> None:
    folder = Folder(url)
    assert folder.locate("a/b").lstrip("/") == below.lstrip("/")
    assert folder.sub("a").locate("b") == below
    assert folder.sub("a").is_local == folder.is_local == (url == "/")


def test_what_a_file_and_a_folder_take(folder: Folder) -> None:
    assert folder.num_bytes() == folder.num_bytes("x") == 0
    folder.write_bytes("a/one", bytes(5000))
    folder.write_bytes("a/b/two", bytes(100_000))
    if not folder.is_local:
        assert (folder.num_bytes("a/one"), folder.num_bytes("a"), folder.num_bytes()) == (5000, 105_000, 105_000)
        return
    blocks = [os.stat(folder.locate(name)).st_blocks * 512 for name in ("a/one", "a/b/two")]
    folders = [os.stat(folder.locate(name)).st_blocks * 512 for name in ("", "a", "a/b")]
    assert folder.num_bytes("a/one") == blocks[0] >= 5000
    assert folder.num_bytes() == sum(blocks + folders) >= 105_000
    with open(folder.locate("a/sparse"), "wb") as file:
        file.truncate(10**9)
    assert folder.num_bytes("a/sparse") < 10**6
