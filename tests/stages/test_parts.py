"""Parts of videos through the stages: their frames are those of decoding everything, at the times of the file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.media.resize import resize_frames
from pipeline.planning.windows import Window
from pipeline.runs.run import start_run
from pipeline.stages.checked_model import checked_model
from pipeline.stages.context import StageContext
from pipeline.stages.decode import DecodeBatches
from pipeline.stages.encode_finish import read_encoded
from pipeline.stages.encode_plan import PlanEncodeWindow
from pipeline.stages.window_plan import load_plan
from tests.media.media_files import Recipe, full_decode, long_video, make_audio, make_image, make_video, shown_at
from tests.media.sound_files import make_sound, sweep
from tests.stages.line import Line

SAMPLING = {"policy": "fps", "fps": 1, "min_frames": 1}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 s at 10 frames a second, no two alike."""
    path = tmp_path_factory.mktemp("parts") / "clip.mp4"
    path.write_bytes(make_video(Recipe(rate=10, num_frames=200, options={"g": "37", "bf": "3"})))
    return path


def entry(uri: Path | str, start: float | None, stop: float | None = None, **more: Any) -> dict[str, Any]:
    return {"uri": str(uri), "start_seconds": start, "stop_seconds": stop, **more}


def decoded(config: Config) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Items of a run of one window in batches of one, and their pixels."""
    with start_run(config) as run:
        context = StageContext(config=config, run_url=run.folder.url, checked=checked_model(config, "cpu"))
        window = pa.table({"index": [0], "start": [0], "stop": [run.manifest.num_items]})
        batches = pa.concat_tables(DecodeBatches(context)(pa.concat_tables(PlanEncodeWindow(context)(window))))
    rows = [row for row in batches.to_pylist() if row["items"]]
    items = [item for row in rows for item in row["items"]]
    shapes = [(len(item["shown"]), *item["geometry"]["resized_size"], 3) for item in items]
    return items, [
        np.frombuffer(row["pixels"], np.uint8).reshape(shape) for row, shape in zip(rows, shapes, strict=True)
    ]


@pytest.mark.parametrize("start, stop", [(12.0, 20.0), (7.35, 11.2), (None, 3.0), (18.0, None)])
def test_frames_of_a_part_are_those_of_a_full_decode(
    clip: Path,
    make_config: Callable[..., Config],
    write_manifest: Callable[..., Path],
    start: float | None,
    stop: float | None,
) -> None:
    manifest = write_manifest([{"id": "a", "media": [entry(clip, start, stop)]}])
    [item], [pixels] = decoded(make_config(manifest, sampling=SAMPLING))
    first, end = start or 0.0, 20.0 if stop is None else stop
    times = [first + k for k in range(int(np.ceil(end - first)))]
    assert item["requested"] == pytest.approx(times)
    assert item["shown"] == pytest.approx([np.floor(10 * t + 1e-6) / 10 for t in times])  # real times, on its clock
    assert item["probe"]["duration_seconds"] == item["geometry"]["duration_seconds"] == pytest.approx(end - first)
    frames = full_decode(clip.read_bytes())
    expected = np.stack([shown_at(frames, t) for t in times])
    np.testing.assert_array_equal(pixels, resize_frames(expected, pixels.shape[1:3], "bicubic"))


def test_parts_have_keys_of_their_own_and_equal_ones_share(
    clip: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    parts = [entry(clip, 2, 6), entry(clip, 12, 16), entry(clip, 2, 6), {"uri": str(clip)}, entry(clip, 2, 5.9)]
    manifest = write_manifest([{"id": str(n), "media": [part]} for n, part in enumerate(parts)])
    first = Line(make_config(manifest, run_id="first", sampling=SAMPLING))
    assert [row["status"] for row in first.rows] == ["ok"] * 5
    assert (first.count("encodes"), first.count("features_reused")) == (4, 1)
    again = Line(make_config(manifest, run_id="again", sampling=SAMPLING))
    assert again.rows == first.rows
    assert (again.count("encodes"), again.count("fetches"), again.count("features_reused")) == (0, 0, 5)


def test_a_part_of_a_large_video_is_read_by_range(
    tmp_path: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    path = tmp_path / "long.mp4"
    path.write_bytes(long_video(num_groups=40))
    by_range = {"max_whole_bytes": 300_000, "max_inline_bytes": 1_000}
    manifest = write_manifest([{"id": "a", "media": [entry(path, 30.2, 32.2)]}])
    sampling = {"policy": "fps", "fps": 2, "min_frames": 1}
    ranged = Line(make_config(manifest, run_id="ranged", sampling=sampling, decode=by_range))
    whole = Line(make_config(manifest, run_id="whole", sampling=sampling))
    assert ranged.rows == whole.rows and ranged.rows[0]["status"] == "ok"
    assert ranged.count("bytes_fetched") < path.stat().st_size / 5
    again = Line(make_config(manifest, run_id="again", sampling=sampling, decode=by_range))
    assert again.count("fetches") == again.count("encodes") == 0


def test_the_model_is_told_the_times_of_the_file(
    clip: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    manifest = write_manifest([{"id": "a", "media": [entry(clip, 12, 16)]}])
    context = Line(make_config(manifest, sampling=SAMPLING)).context
    window = Window(index=0, start=0, stop=1)
    plan = load_plan(context, window)
    assert plan is not None
    [planned] = plan.media
    terms = context.identity.key_terms(planned, planned.content or "")
    shard = read_encoded(context, window)["shard"][0].as_py()
    [record] = context.store.fetch([(shard, terms.digest())], [terms.as_dict()])
    assert record is not None
    assert record.geometry.timestamps == pytest.approx((12.0, 13.0, 14.0, 15.0))
    # Qwen3-VL writes the mean of each two frames.
    assert re.findall(r"<([\d.]+) seconds>", context.facts.placeholder("video", record.geometry).text) == [
        "12.5",
        "14.5",
    ]


def test_what_is_no_part_and_what_no_model_takes(
    clip: Path, tmp_path: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    (tmp_path / "a.png").write_bytes(make_image("PNG"))
    (tmp_path / "a.dat").write_bytes(make_image("PNG"))
    (tmp_path / "a.m4a").write_bytes(make_audio("mp4", "aac"))
    video = make_sound("mp4", "aac", sweep(48_000, 2.0), 48_000, video_seconds=2.0)
    (tmp_path / "spoken.mp4").write_bytes(video)
    rows = [
        {"id": "behind", "media": [entry(clip, 20.0)]},
        {"id": "beyond", "media": [entry(clip, 10.0, 22.0)]},
        {"id": "image", "media": [entry(tmp_path / "a.dat", 1.0)]},
        {"id": "sound", "uri": str(tmp_path / "a.m4a")},
        {"id": "sound of a video", "audio": str(tmp_path / "spoken.mp4")},
        {"id": "the video", "video": str(tmp_path / "spoken.mp4")},
    ]
    line = Line(make_config(write_manifest(rows)))
    assert {row["id"]: row["code"] for row in line.rows} == {
        "behind": "no_such_part",
        "beyond": "no_such_part",
        "image": "modality_mismatch",
        "sound": "modality_not_supported",
        "sound of a video": "modality_not_supported",
        "the video": None,
    }
    assert "cannot be used with sounds" in line.rows[3]["message"]
