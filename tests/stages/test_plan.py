"""The written plan of a window: what it holds, and that a later start follows it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.planning.windows import Window
from pipeline.runs.manifest import read_range
from pipeline.runs.receipts import receipt_from_json
from pipeline.runs.run import start_run
from pipeline.schema import Geometry, MediaItem, Probe, Receipt, Request, SamplePlan
from pipeline.stages.checked_model import checked_model
from pipeline.stages.context import StageContext
from pipeline.stages.decode import DecodeBatches
from pipeline.stages.encode import EncodeBatches
from pipeline.stages.encode_finish import finish_encode_window, read_encoded
from pipeline.stages.encode_plan import PlanEncodeWindow
from pipeline.stages.outcomes import encode_batch_receipts
from pipeline.stages.rows import PlannedMedia, receipts_apart
from pipeline.stages.window_plan import WindowPlan, load_plan, plan_name
from tests.media.media_files import Recipe, make_image, make_video
from tests.stages.line import Line

FIRST = Window(index=3, start=40, stop=44)


@contextmanager
def started(config: Config) -> Iterator[tuple[StageContext, Window]]:
    """A run of one window, and that window."""
    with start_run(config) as run:
        context = StageContext(config=config, run_url=run.folder.url, checked=checked_model(config, "cpu"))
        yield context, Window(index=0, start=0, stop=run.manifest.num_items)


def planned_rows(context: StageContext, window: Window) -> pa.Table:
    """What the plan stage emits."""
    row = pa.table({"index": [window.index], "start": [window.start], "stop": [window.stop]})
    return pa.concat_tables(PlanEncodeWindow(context)(row))


def places(table: pa.Table) -> list[tuple[int, str]]:
    """(batch, digest) of the batches that are still to be done."""
    return [(row["batch"], row["digest"]) for row in table.to_pylist() if row["receipt"] is None]


def receipts(table: pa.Table) -> list[Receipt]:
    """The receipts that travel along."""
    return [receipt_from_json(text) for text in table["receipt"].to_pylist() if text is not None]


def media(position: int, item: MediaItem, **changes: Any) -> PlannedMedia:
    """A planned clip of the third item of `FIRST`."""
    return PlannedMedia(
        position=position,
        item_index=42,
        media_index=position,
        tenant="a",
        media=item,
        source_id=f"file:/m/{position}",
        content=None,
        probe=Probe(
            modality="video", container="mov", codec="h264", width=96, height=64, num_bytes=9, duration_seconds=1.5
        ),
        requested=SamplePlan(pts_seconds=(0.0, 0.1 + 0.2, 1 / 3)),
        geometry=Geometry(
            grid=(2, 4, 6), merge_size=2, feature_length=12, original_size=(64, 96), resized_size=(64, 96)
        ),
        **changes,
    )


def test_a_plan_comes_back_from_json_as_it_was() -> None:
    listed = (
        MediaItem(uri="/m/0.mp4", modality="video", version="7"),
        MediaItem(data=b"inline", sha256="ab" * 32),
        MediaItem(uri="/m/2.mp4"),
    )
    requests = [Request(item_index=i, id=str(i), media=listed if i == 42 else ()) for i in range(40, 44)]
    plan = WindowPlan(
        window=FIRST,
        media=[media(i, item) for i, item in enumerate(listed)],
        hits={0: ("a1", "shard-x")},
        same_as={2: 1},
        batches=[("d1", [1]), ("d2", [2])],
        failures=[{"item_index": 41, "media_index": None, "stage": "admit", "code": "over", "message": "é\n"}],
        receipt=Receipt(stage="plan", window=3, batch=-1, digest="d", counts={"batches": 2}, seconds={"plan": 0.1}),
    )
    written = json.dumps(plan.to_json())
    assert WindowPlan.from_json(json.loads(written), requests) == plan
    assert "inline" not in written and plan.media[1].media.data == b"inline"


def test_bytes_that_the_probe_read_stay_out_of_the_plan(demo_media: Path, make_config: Callable[..., Config]) -> None:
    with started(make_config(demo_media / "manifest.jsonl")) as (context, window):
        first = planned_rows(context, window)
        again = planned_rows(context, window)
        listed = read_range(context.folder, window.start, window.stop)
        plan = load_plan(context, window)
    assert plan is not None
    assert [m.media for m in plan.media] == [item for request in listed for item in request.media]
    carried = [item["media"]["data"] for row in first.to_pylist() for item in row["items"]]
    assert carried and all(carried)
    assert not any(item["media"]["data"] for row in again.to_pylist() for item in row["items"])
    assert places(first) == places(again)


def test_bytes_above_the_limit_of_a_window_are_read_again(
    demo_media: Path, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(make_config(demo_media / "manifest.jsonl", store={"reuse": False})) as (context, window):
        listed = [request.media[0] for request in read_range(context.folder, window.start, window.stop)]
        sizes = [Path(item.uri or "").stat().st_size for item in listed]
        monkeypatch.setattr("pipeline.stages.encode_plan._MAX_CARRIED_BYTES", sum(sizes[:7]))
        table = planned_rows(context, window)
        items = [item for row in table.to_pylist() for item in row["items"]]
        decoded = pa.concat_tables(DecodeBatches(context)(table))
    carried = sorted(item["item_index"] for item in items if item["media"]["data"])
    assert carried == list(range(7))
    assert len(items) == len(sizes) and all(item["content"] for item in items)  # read once and hashed, all of them
    assert sum(row["fetches"] or 0 for row in decoded.to_pylist()) == len(sizes) - 7
    assert not [item for row in decoded.to_pylist() for item in row["items"] if item["failure"]]


def test_a_later_start_follows_the_plan_whatever_the_store_holds_by_then(
    demo_media: Path, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    manifest = demo_media / "manifest.jsonl"
    with started(make_config(manifest, run_id="interrupted")) as (context, window):
        before = planned_rows(context, window)
        written = context.folder.read_bytes(plan_name(0))
    assert Line(make_config(manifest, run_id="another")).count("encodes") == 20
    with started(make_config(manifest, run_id="interrupted")) as (context, window):
        after = planned_rows(context, window)
        plan = load_plan(context, window)
        assert context.folder.read_bytes(plan_name(0)) == written
    assert plan is not None and plan.hits == {}
    assert places(after) == places(before) and len(places(after)) > 1
    assert receipts(after) == receipts(before)
    assert Line(make_config(manifest, run_id="third")).count("features_reused") == 20


def test_finished_batches_are_not_emitted_again(demo_media: Path, make_config: Callable[..., Config]) -> None:
    config = make_config(demo_media / "manifest.jsonl", encode={"max_batch_items": 3})
    with started(config) as (context, window):
        planned = planned_rows(context, window)
        todo = places(planned)
        assert len(todo) > 4
        encoder = EncodeBatches(context, "cpu")
        # Row 0 is the plan's receipt; batches 1 and 3 are done, 0 and 2 are not.
        done = [next(iter(encoder(next(iter(DecodeBatches(context)(planned.slice(row, 1))))))) for row in (2, 4)]
        rest = planned_rows(context, window)
        assert places(rest) == [todo[0], todo[2], *todo[4:]]
        expected = [receipt_from_json(table["receipt"][0].as_py()) for table in done]
        assert receipts(rest) == [receipts(planned)[0], *expected]
        for decoded in DecodeBatches(context)(receipts_apart(rest)[1]):
            list(encoder(decoded))
        assert places(planned_rows(context, window)) == []
        encoder.writer.close()
        assert set(encode_batch_receipts(context.folder, 0)) == set(todo)
        finish_encode_window(context, window)
        assert read_encoded(context, window).num_rows == 20


@pytest.fixture
def copies(tmp_path: Path, write_manifest: Callable[..., Path]) -> Path:
    """A manifest of one image under three names and for two tenants, twice one clip, and another image."""
    image, clip = make_image("PNG"), make_video(Recipe(num_frames=60))
    for name, data in {"a.png": image, "b.png": image, "c.jpg": make_image("JPEG"), "d.mp4": clip}.items():
        (tmp_path / name).write_bytes(data)
    files = ["a.png", "b.png", "c.jpg", "d.mp4", "a.png", "d.mp4"]
    rows: list[dict[str, Any]] = [{"id": f"r{i}", "media": [str(tmp_path / f)]} for i, f in enumerate(files)]
    rows.append({"id": "r6", "media": [str(tmp_path / "a.png")], "tenant": "other"})
    return write_manifest(rows)


@pytest.mark.parametrize("max_inline_bytes", [256 * 1024, 100])
def test_duplicates_of_a_window_are_encoded_once(
    copies: Path, make_config: Callable[..., Config], max_inline_bytes: int
) -> None:
    line = Line(make_config(copies, decode={"max_inline_bytes": max_inline_bytes}))
    plan = load_plan(line.context, Window(index=0, start=0, stop=7))
    assert plan is not None
    # By content where the bytes were read; by source (path, size and time) where only the header was.
    by_content = {1: 0, 4: 0, 5: 3}
    by_source = {4: 0, 5: 3}
    assert plan.same_as == (by_content if max_inline_bytes > 100 else by_source)
    assert sorted(p for _, positions in plan.batches for p in positions) == sorted(set(range(7)) - set(plan.same_as))
    assert line.count("encodes") == 7 - len(plan.same_as)
    assert line.count("features_reused") == len(plan.same_as)
    texts = [row["text"] for row in line.rows]
    assert texts[0] == texts[1] == texts[4] == texts[6] and texts[3] == texts[5]
    table = read_encoded(line.context, plan.window)
    keys = dict(zip(table["item_index"].to_pylist(), table["key"].to_pylist(), strict=True))
    assert keys[0] == keys[1] == keys[4] != keys[6]
    assert keys[3] == keys[5]


@pytest.mark.parametrize("max_inline_bytes", [256 * 1024, 100], ids=["whole", "ranged"])
def test_bytes_that_are_not_those_claimed_are_not_stored_under_their_name(
    tmp_path: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path], max_inline_bytes: int
) -> None:
    (tmp_path / "a.png").write_bytes(make_image("PNG"))
    (tmp_path / "b.png").write_bytes(make_image("PNG", "L"))
    right = hashlib.sha256((tmp_path / "a.png").read_bytes()).hexdigest()
    rows = [{"id": name, "media": [{"uri": str(tmp_path / name), "sha256": right}]} for name in ("b.png", "a.png")]
    store = {"path": str(tmp_path / "store"), "reuse": False}
    line = Line(make_config(write_manifest(rows), decode={"max_inline_bytes": max_inline_bytes}, store=store))
    assert [(row["id"], row["code"]) for row in line.rows] == [("b.png", "content_mismatch"), ("a.png", None)]


def test_an_object_that_changes_after_it_was_planned_is_quarantined(
    copies: Path, make_config: Callable[..., Config]
) -> None:
    config = make_config(copies)
    with started(config) as (context, window):
        planned_rows(context, window)
    (copies.parent / "c.jpg").write_bytes(make_image("JPEG", "L"))
    rows = {row["id"]: row["code"] for row in Line(config).rows}
    assert rows == {**dict.fromkeys((f"r{i}" for i in range(7)), None), "r2": "content_mismatch"}


def test_without_reuse_every_item_is_encoded(copies: Path, make_config: Callable[..., Config]) -> None:
    Line(make_config(copies, run_id="before"))
    line = Line(make_config(copies, run_id="after", store={"reuse": False}))
    assert (line.count("encodes"), line.count("features_reused")) == (7, 0)


def test_what_takes_long_to_decode_is_spread_over_the_blocks(
    tmp_path: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    clips = {f"{i}.mp4": make_video(Recipe(num_frames=30 + i, options={"g": "60"})) for i in range(3)}
    files = {**clips, **{f"{i}.png": make_image("PNG", compress_level=i) for i in range(6)}}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    manifest = write_manifest([{"id": name, "media": [str(tmp_path / name)]} for name in files])
    with started(make_config(manifest, encode={"max_batch_items": 1})) as (context, window):
        row = pa.table({"index": [0], "start": [0], "stop": [len(files)]})
        rows = pa.concat_tables(PlanEncodeWindow(context, rows_per_block=4)(row)).to_pylist()
        plan = load_plan(context, window)
    assert plan is not None
    assert [position < 3 for _, [position] in plan.batches] == [True] * 3 + [False] * 6  # written as it was planned
    assert sorted(row["batch"] for row in rows) == [-1, *range(9)]
    blocks = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    assert [sum(item["position"] < 3 for row in block for item in row["items"]) for block in blocks] == [1, 1, 1]
    seconds = {item["position"]: item["decode_seconds"] for row in rows for item in row["items"]}
    assert min(seconds[i] for i in range(3)) > 2 * max(seconds[i] for i in range(3, 9))


def test_a_plan_of_before_there_were_estimates_is_followed(
    demo_media: Path, make_config: Callable[..., Config]
) -> None:
    with started(make_config(demo_media / "manifest.jsonl")) as (context, window):
        before = planned_rows(context, window)
        written = context.folder.read_json(plan_name(0))
        for item in written["media"]:
            del item["decode_seconds"]
            for name in ("coded_frames", "coded_bytes", "keyframes", "keyframe_bytes", "keyframe_spacing"):
                del item["probe"][name]
            del item["probe"]["group_frames"], item["probe"]["reorder_depth"]
        context.folder.write_json(plan_name(0), written)
        assert sorted(places(planned_rows(context, window))) == sorted(places(before))
