"""What callers read of the encode pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config import Config
from pipeline.stages.encoded import FEATURES_SCHEMA, DescribeEncoded
from tests.media.media_files import Recipe, make_image, make_video
from tests.stages.line import Line

# 64 x 96 pixels in patches of 16, merged two by two; the clip's four frames in pairs.
IMAGE_GRID, IMAGE_TOKENS = [1, 4, 6], 4 * 6 // 4
CLIP_GRID, CLIP_TOKENS = [2, 4, 6], 2 * 4 * 6 // 4


def test_a_row_a_media_item_and_a_row_a_failure(
    tmp_path: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    (tmp_path / "image.png").write_bytes(make_image("PNG"))
    (tmp_path / "clip.mp4").write_bytes(make_video(Recipe(num_frames=16, rate=8)))
    rows: list[dict[str, Any]] = [
        {"id": "both", "media": ["clip.mp4", "image.png"]},
        {"id": "text", "prompt": "Which?"},
        {"id": "half", "media": ["image.png", "nowhere.png"]},
        {"id": "again", "media": ["image.png"]},
        {"id": "many", "media": ["image.png"] * 2000},
    ]
    line = Line(make_config(write_manifest(rows), ray={"first_window_items": 3, "window_items": 3}))
    windows = pa.table({"index": [0, 1], "start": [0, 3], "stop": [3, 5]})
    tables = list(DescribeEncoded(line.context)(windows))
    assert [table.schema for table in tables] == [FEATURES_SCHEMA] * 2
    described = [row for table in tables for row in table.to_pylist()]
    assert [(row["item_index"], row["id"], row["media_index"], row["status"], row["code"]) for row in described] == [
        (0, "both", 0, "ok", None),
        (0, "both", 1, "ok", None),
        (2, "half", 1, "quarantined", "not_found"),
        (3, "again", 0, "ok", None),
        (4, "many", None, "quarantined", "over_budget_media"),
    ]
    clip, image, lost, again, _ = described
    assert (clip["modality"], clip["grid"], clip["feature_length"]) == ("video", CLIP_GRID, CLIP_TOKENS)
    assert (image["modality"], image["grid"], image["feature_length"]) == ("image", IMAGE_GRID, IMAGE_TOKENS)
    assert (again["feature_key"], again["shard"]) == (image["feature_key"], image["shard"])
    assert lost["feature_key"] is None and "nowhere.png" in lost["message"]
    for row in (clip, image):
        record = line.context.store.get(row["shard"], row["feature_key"])
        assert record is not None and record.geometry.feature_length == row["feature_length"]
