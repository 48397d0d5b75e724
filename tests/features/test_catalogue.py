"""Parquet beside the shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.features import catalogue
from pipeline.features.catalogue import Entry, SealedShard, SourceCatalogue, SourceEntry
from pipeline.schema import Probe
from pipeline.storage import Folder

NUMBERS = itertools.count()


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "local":
        yield Folder(str(tmp_path))
        return
    root = f"/catalogue-{next(NUMBERS)}"
    yield Folder(f"memory:/{root}")
    fsspec.filesystem("memory").rm(root, recursive=True)


def list_shard(folder: Folder, shard_id: str, keys: list[str]) -> SealedShard:
    shard = SealedShard(shard_id=shard_id, num_records=len(keys), num_bytes=77, checksum="ab" * 32)
    terms = {"content": "sha256:00", "weights": "w", "decode_rules": 3, "sampling": [0.5]}
    rows = [Entry(key=k, tenant="acme", num_bytes=9, feature_length=8, grid=(1, 2, 4), key_terms=terms) for k in keys]
    catalogue.write_entries(folder, shard, rows)
    return shard


def test_keys_are_found_in_the_newest_shard(folder: Folder) -> None:
    list_shard(folder, "2", ["b", "c"])
    list_shard(folder, "1", ["a", "b"])
    found = catalogue.load_catalogue(folder).find(["c", "a", "zz", "b"])
    assert found == {"a": "1", "b": "2", "c": "2"}
    backwards = catalogue.Catalogue(dict(reversed(catalogue.load_catalogue(folder).parts.items())))
    assert backwards.find(["b"]) == {"b": "2"}


def test_keys_with_one_hash_are_told_apart(folder: Folder) -> None:
    """By their first 16 characters, from which the index is made; and those with none."""
    same = ["0123456789abcdef" + more for more in ("", "0", "1" * 24, "2" * 24)]
    list_shard(folder, "1", [same[1], same[2], "x"])
    list_shard(folder, "2", [same[0], same[2]])
    loaded = catalogue.load_catalogue(folder)
    wanted = [*same, "x", "0123456789abcde", "", same[2]]
    assert loaded.find(wanted) == {same[0]: "2", same[1]: "1", same[2]: "2", "x": "1"}


def test_many_keys_are_found_as_a_dictionary_finds_them(folder: Folder) -> None:
    rng = np.random.default_rng(1)
    keys = [rng.bytes(20).hex() for _ in range(5000)]
    truth = {}
    for shard in range(7):
        chosen = [keys[i] for i in rng.choice(4000, 1000, replace=False)]
        list_shard(folder, str(shard), chosen)
        truth |= dict.fromkeys(chosen, str(shard))
    assert catalogue.load_catalogue(folder).find(keys) == truth


def test_an_empty_store_finds_nothing(folder: Folder) -> None:
    folder.write_bytes("elsewhere", b"")
    loaded = catalogue.load_catalogue(folder)
    assert loaded.find(["a"]) == {} and loaded.find([]) == {}
    assert SourceCatalogue(folder).find(["a"]) == {}


def test_what_is_known_is_not_read_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    list_shard(folder, "1", ["a"])
    list_shard(folder, "2", ["b"])
    before = catalogue.load_catalogue(folder)
    list_shard(folder, "3", ["c"])
    catalogue.remove_entries(folder, "1")
    read = []
    real = Folder.read_bytes
    monkeypatch.setattr(Folder, "read_bytes", lambda self, name: read.append(name) or real(self, name))
    after = catalogue.load_catalogue(folder, before)
    assert read == ["catalogue/3.parquet"]
    assert after.find(["a", "b", "c"]) == {"b": "2", "c": "3"}
    assert before.find(["a", "b", "c"]) == {"a": "1", "b": "2"}


def test_one_shard_is_looked_up_by_its_footer(folder: Folder) -> None:
    shard = list_shard(folder, "1", ["a", "b"])
    assert catalogue.read_sealed(folder, "1") == shard
    assert catalogue.read_sealed(folder, "2") is None


def test_others_can_read_the_file(tmp_path: Path) -> None:
    list_shard(Folder(str(tmp_path)), "1", ["a"])
    (row,) = pq.read_table(tmp_path / "catalogue" / "1.parquet").to_pylist()
    assert row.pop("created").tzinfo is not None
    assert row == {
        "key": "a",
        "shard": "1",
        "tenant": "acme",
        "num_bytes": 9,
        "feature_length": 8,
        "grid": [1, 2, 4],
        "made_seconds": 0.0,
        **dict.fromkeys(catalogue.TERM_COLUMNS),
        "content": "sha256:00",
        "weights": "w",
        "decode_rules": "3",
    }


def source(number: int) -> SourceEntry:
    probe = Probe(
        modality="video",
        container="mp4",
        codec="h264",
        width=640,
        height=360,
        num_bytes=number,
        duration_seconds=10 / 3,
        rate_fps=29.97,
        num_frames=100,
        coded_frames=101,
        coded_bytes=number + 1,
        keyframes=3,
        keyframe_bytes=2,
        keyframe_spacing=0,
        group_frames=40.5,
        reorder_depth=2,
    )
    return SourceEntry(content=f"sha256:{number}", probe=probe)


def test_sources_are_remembered_and_the_last_word_wins(folder: Folder) -> None:
    sources = SourceCatalogue(folder)
    sources.record({"etag:1": source(1), "etag:2": source(2)})
    sources.record({"etag:1": source(3)})
    sources.record({})
    assert sources.find(["etag:1", "etag:2", "etag:9"]) == {"etag:1": source(3), "etag:2": source(2)}
    assert len(folder.list("sources")) == 2


def test_sources_of_others_show_after_reload(folder: Folder) -> None:
    first, second = SourceCatalogue(folder), SourceCatalogue(folder)
    first.record({"etag:1": source(1)})
    assert second.find(["etag:1"]) == {"etag:1": source(1)}
    first.record({"etag:2": source(2)})
    second.record({"etag:3": source(3)})
    assert second.find(["etag:2", "etag:3"]) == {"etag:3": source(3)}
    second.reload()
    assert second.find(["etag:2", "etag:3"]) == {"etag:2": source(2), "etag:3": source(3)}


def test_a_file_of_before_there_were_facts_of_packets_is_still_read(tmp_path: Path) -> None:
    SourceCatalogue(Folder(str(tmp_path))).record({"etag:1": source(1)})
    [path] = (tmp_path / "sources").glob("*.parquet")
    later = ["coded_frames", "coded_bytes", "keyframes", "keyframe_bytes", "keyframe_spacing", "group_frames"]
    pq.write_table(pq.read_table(path).drop_columns([*later, "reorder_depth"]), path)
    entry = SourceCatalogue(Folder(str(tmp_path))).find(["etag:1"])["etag:1"]
    assert (entry.probe.num_frames, entry.probe.coded_frames, entry.probe.reorder_depth) == (100, 0, 0)
