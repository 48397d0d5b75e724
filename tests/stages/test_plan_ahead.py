"""What windows will put into the store is known from their plans; and planning lets go of the store again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

from pipeline.config import Config
from pipeline.features.codec import encode_record
from pipeline.features.shard import SHARD_OVERHEAD_BYTES, disk_bytes
from pipeline.planning.windows import Window
from pipeline.stages.context import StageContext
from pipeline.stages.decode import DecodeBatches
from pipeline.stages.encode import EncodeBatches
from pipeline.stages.encode_finish import finish_encode_window, read_encoded
from pipeline.stages.plan_ahead import WindowBytes, awaited_shards, plan_ahead
from pipeline.stages.prompt import PlanPromptWindow
from pipeline.stages.record_size import record_bytes
from pipeline.stages.rows import receipts_apart
from pipeline.stages.window_plan import load_plan, planned_windows
from tests.models.families import FAMILIES, save_family
from tests.stages.line import Line
from tests.stages.test_plan import planned_rows, started


def row_of(window: Window) -> pa.Table:
    return pa.table({"index": [window.index], "start": [window.start], "stop": [window.stop]})


def encode_batches(context: StageContext, window: Window, stop: int | None = None) -> None:
    """The first `stop` batches of the window's plan, through decode and encode; their writer ends."""
    encoder = EncodeBatches(context, "cpu")
    _, batches = receipts_apart(planned_rows(context, window))
    for decoded in DecodeBatches(context)(batches.slice(0, stop)):
        list(encoder(decoded))
    encoder.writer.close()


@pytest.mark.parametrize("family", ["demo", *FAMILIES])
def test_no_record_is_larger_than_was_said(
    family: str, demo_media: Path, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "media").mkdir()
    rows = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    rows = [{**row, "media": [{"uri": str(demo_media / row["media"][0]["uri"])}], "tenant": "ü" * 20} for row in rows]
    for height, width in ((1500, 2000), (1999, 701), (333, 1777)):
        Image.effect_noise((width, height), 90).convert("RGB").save(tmp_path / "media" / f"{height}.jpg")
        rows.append({"id": str(height), "media": [{"uri": str(tmp_path / "media" / f"{height}.jpg")}]})
    manifest = tmp_path / "all.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = "demo:captioner" if family == "demo" else str(save_family(family, tmp_path / "model"))
    context = Line(make_config(manifest, model=model, sampling={"fps": 4}, generate={"max_new_tokens": 1})).context
    window = Window(index=0, start=0, stop=len(rows))
    plan = load_plan(context, window)
    assert plan is not None
    planned = {(media.item_index, media.media_index): media for media in plan.media}
    taken: list[tuple[int, int]] = []
    for row in read_encoded(context, window).to_pylist():
        if row["code"] is None:
            record = context.store.get(row["shard"], row["key"])
            assert record is not None
            media = planned[row["item_index"], row["media_index"]]
            taken.append((len(encode_record(record)), record_bytes(context, media)))
    assert len(taken) >= 10
    margins = [said - found for found, said in taken]
    print(f"{family}: records of {min(taken)[0]} to {max(taken)[0]} bytes, {min(margins)} to {max(margins)} less")
    assert min(margins) > 500 and max(margins) < 3000
    context.store.close()


def test_a_window_says_what_it_takes_and_what_is_missing(demo_media: Path, make_config: Callable[..., Config]) -> None:
    config = make_config(demo_media / "manifest.jsonl", encode={"max_batch_items": 2, "device": "cpu"})
    with started(config) as (context, window):
        planned = plan_ahead(context, window, 0)
        # Of each writer a shard in sixteen windows.
        assert plan_ahead(context, window, 16).num_bytes == planned.num_bytes + SHARD_OVERHEAD_BYTES
        plan = load_plan(context, window)
        assert plan is not None and planned_windows(context.folder) == [0]
        by_position = {media.position: media for media in plan.media}
        batches = [
            sum(disk_bytes(record_bytes(context, by_position[position])) for position in positions)
            for _, positions in plan.batches
        ]
        assert planned == WindowBytes(window=window, num_bytes=sum(batches), missing_bytes=sum(batches))
        encode_batches(context, window, stop=3)
        assert plan_ahead(context, window, 0) == WindowBytes(
            window=window, num_bytes=sum(batches), missing_bytes=sum(batches[3:])
        )
        encode_batches(context, window)
        assert plan_ahead(context, window, 0).missing_bytes == 0


def test_what_is_reused_takes_nothing(demo_media: Path, make_config: Callable[..., Config]) -> None:
    manifest = demo_media / "manifest.jsonl"
    Line(make_config(manifest, run_id="before"))
    with started(make_config(manifest, run_id="after")) as (context, window):
        assert plan_ahead(context, window, 0).num_bytes == 0
        [shard] = awaited_shards(context, window)
        assert context.store.is_sealed(shard)


def test_the_shards_a_window_cannot_do_without(demo_media: Path, make_config: Callable[..., Config]) -> None:
    config = make_config(demo_media / "manifest.jsonl", encode={"max_batch_items": 2, "device": "cpu"})
    with started(config) as (context, window):
        assert awaited_shards(context, window) == set()
        encode_batches(context, window, stop=2)
        [first] = awaited_shards(context, window)
        encode_batches(context, window)
        both = awaited_shards(context, window)
        assert first in both and len(both) == 2
        finish_encode_window(context, window)
        assert awaited_shards(context, window) == both


@pytest.mark.parametrize("retention", ["keep", "segment"])
def test_stages_let_go_of_what_they_have_read(
    retention: str, demo_media: Path, make_config: Callable[..., Config]
) -> None:
    """Their processes live on after a pass, and what they kept mapped would keep its disk space when it is deleted."""
    store = {"retention": retention}
    with started(make_config(demo_media / "manifest.jsonl", store=store, run_id="a")) as (context, window):
        encode_batches(context, window)
        finish_encode_window(context, window)
        [shard] = awaited_shards(context, window)
        assert context.store.in_use([shard]) == []
        [prompted] = PlanPromptWindow(context)(row_of(window))
        assert prompted.num_rows > 1
        assert context.store.in_use([shard]) == []
        context.store.recover()
    # Known by source in a store that is kept, so that planning reads; else by content, so that decoding does.
    config = make_config(demo_media / "manifest.jsonl", store=store, run_id="b", decode={"max_inline_bytes": 100})
    with started(config) as (context, window):
        planned = planned_rows(context, window)
        assert context.store.in_use([shard]) == []
        _, batches = receipts_apart(planned)
        shards = [item["shard"] for table in DecodeBatches(context)(batches) for item in table["items"].to_pylist()[0]]
        assert set(shards) == (set() if retention == "keep" else {shard})
        assert context.store.in_use([shard]) == []


def test_a_scratch_store_learns_no_sources_and_in_place_seals_nothing(
    demo_media: Path, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    store = {"retention": "segment", "shard_bytes": 200_000}
    config = make_config(demo_media / "manifest.jsonl", store=store, encode={"max_batch_items": 4})
    with started(config) as (context, window):
        context = replace(context, in_place=True)
        encode_batches(context, window)
        finish_encode_window(context, window)
        shards = awaited_shards(context, window)
        assert len(shards) > 2 and not any(context.store.is_sealed(shard) for shard in shards)
        assert {path.name for path in (Path(context.folder.path) / "_run" / "shards").iterdir()} == shards
    assert not (tmp_path / "store" / "sources").exists()
