"""A run knows the shards it made, whatever became of it."""

import uuid
from pathlib import Path

import pytest

from pipeline.runs.own_shards import forget_shards, note_shard, noted_shards
from pipeline.storage import Folder


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def test_noted_until_forgotten(folder: Folder) -> None:
    assert noted_shards(folder) == set()
    for shard_id in ("20261129T1-a", "20261129T2-b", "20261129T1-a"):
        note_shard(folder, shard_id)
    assert noted_shards(folder) == {"20261129T1-a", "20261129T2-b"}
    forget_shards(folder, ["20261129T1-a", "never-was"])
    assert noted_shards(folder) == {"20261129T2-b"}
