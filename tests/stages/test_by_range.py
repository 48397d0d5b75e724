"""Large videos through the stages: read by range, with the answers that the whole file gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import Config
from pipeline.runs.run import start_run
from pipeline.stages.checked_model import checked_model
from pipeline.stages.context import StageContext
from pipeline.stages.decode import DecodeBatches
from pipeline.stages.encode_plan import PlanEncodeWindow
from tests.media.media_files import Recipe, long_video, make_video
from tests.stages.line import Line

BY_RANGE = {"max_whole_bytes": 300_000, "max_inline_bytes": 1_000}
SAMPLING = {"policy": "uniform", "num_frames": 4}


@pytest.fixture(scope="module", params=["mp4", "matroska"])
def clip(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """40 s, 9 MB."""
    path = tmp_path_factory.mktemp("long") / "long"
    path.write_bytes(long_video(num_groups=40, container=request.param))
    return path


def test_answers_are_those_of_the_whole_file(
    clip: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    manifest = write_manifest([{"id": "a", "video": str(clip)}])
    ranged = Line(make_config(manifest, run_id="ranged", sampling=SAMPLING, decode=BY_RANGE))
    whole = Line(make_config(manifest, run_id="whole", sampling=SAMPLING))
    assert ranged.rows == whole.rows and ranged.rows[0]["status"] == "ok"
    assert whole.count("encodes") == 1  # what was read in part is not what is read whole
    size = clip.stat().st_size
    assert whole.count("bytes_fetched") == size  # its header is known
    assert ranged.count("bytes_fetched") < size / 5
    for line in (ranged, whole):
        [name] = line.context.folder.list("timings", suffix=".parquet")
        [row] = pq.read_table(Path(line.context.folder.path, "timings", name)).to_pylist()
        assert row["bytes_fetched"] == line.count("bytes_fetched")
        assert row["media_bytes"] == size and row["frames"] == 4 and row["media_seconds"] == pytest.approx(40, abs=0.1)
    again = Line(make_config(manifest, run_id="again", sampling=SAMPLING, decode=BY_RANGE))
    assert again.rows == whole.rows
    assert again.count("fetches") == again.count("encodes") == 0


def test_a_file_that_was_replaced_since_it_was_planned_is_quarantined(
    clip: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.mp4"
    copy.write_bytes(clip.read_bytes())
    manifest = write_manifest([{"id": "a", "video": str(copy)}])
    with planned(make_config(manifest, sampling=SAMPLING, decode=BY_RANGE)) as (context, batches):
        os.utime(copy, ns=(1, 1))
        decoded = pa.concat_tables(DecodeBatches(context)(batches)).to_pylist()
    [item] = [item for row in decoded for item in row["items"]]
    assert (item["failure"]["stage"], item["failure"]["code"]) == ("fetch", "content_mismatch")


def test_what_is_read_of_an_item_is_its_own(
    clip: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    gone = tmp_path / "gone.mp4"
    gone.write_bytes(make_video(Recipe(size=(360, 640), num_frames=30)))
    assert BY_RANGE["max_inline_bytes"] < gone.stat().st_size < BY_RANGE["max_whole_bytes"]
    manifest = write_manifest([{"id": "clip", "video": str(clip)}, {"id": "gone", "video": str(gone)}])
    with planned(make_config(manifest, sampling=SAMPLING, decode=BY_RANGE)) as (context, batches):
        gone.unlink()
        rows = pa.concat_tables(DecodeBatches(context)(batches)).to_pylist()
    [batch] = [row for row in rows if row["items"]]
    read = {Path(item["media"]["uri"]).name: item["bytes_fetched"] for item in batch["items"]}
    assert read == {clip.name: batch["bytes_fetched"], "gone.mp4": 0} and read[clip.name] > 0


@contextmanager
def planned(config: Config) -> Iterator[tuple[StageContext, Any]]:
    """The batches of a run of one window."""
    with start_run(config) as run:
        context = StageContext(config=config, run_url=run.folder.url, checked=checked_model(config, "cpu"))
        window = pa.table({"index": [0], "start": [0], "stop": [run.manifest.num_items]})
        yield context, pa.concat_tables(PlanEncodeWindow(context)(window))
