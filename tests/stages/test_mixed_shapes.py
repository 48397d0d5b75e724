"""Batches of items of many shapes: their frames travel in one row, and each item's features are its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from pipeline.config import Config
from pipeline.media.resize import resize_frames
from pipeline.models.location import resolve_model
from pipeline.planning.windows import Window
from pipeline.runs.receipts import receipt_from_json
from pipeline.runs.run import start_run
from pipeline.stages.checked_model import checked_model
from pipeline.stages.context import StageContext
from pipeline.stages.decode import DecodeBatches
from pipeline.stages.encode import EncodeBatches
from pipeline.stages.encode_finish import finish_encode_window, read_encoded
from pipeline.stages.encode_plan import PlanEncodeWindow
from pipeline.stages.rows import receipts_apart
from tests.media.media_files import Recipe, make_video
from tests.models.dual_folders import save_dual, siglip2

SIZES = [(64, 64), (64, 192), (128, 96), (96, 160), (160, 64), (64, 128)]  # (height, width)
BROKEN = 2


def noise(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*SIZES[number], 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of all tests, so that checkpoints are checked once; nothing is taken out of it."""
    return {"path": str(tmp_path_factory.mktemp("store")), "reuse": False}


@pytest.fixture
def manifest(tmp_path: Path, write_manifest: Callable[..., Path]) -> Path:
    """PNGs of `SIZES`, one of them cut short, and two clips that differ in size and length."""
    clips = [Recipe(rate=10, num_frames=frames, size=size) for frames, size in ((20, (96, 64)), (40, (64, 128)))]
    for number in range(len(SIZES)):
        path = tmp_path / f"{number}.png"
        Image.fromarray(noise(number)).save(path)
        if number == BROKEN:
            path.write_bytes(path.read_bytes()[:-2000])
    for number, clip in enumerate(clips, len(SIZES)):
        (tmp_path / f"{number}.mp4").write_bytes(make_video(clip))
    names = [f"{number}.png" for number in range(len(SIZES))] + ["6.mp4", "7.mp4"]
    return write_manifest([{"id": name, "media": [str(tmp_path / name)]} for name in names])


@contextmanager
def decoded(config: Config) -> Iterator[tuple[StageContext, Window, list[pa.Table]]]:
    """A run's only window, and its batches with their frames."""
    with start_run(config) as run:
        context = StageContext(config=config, run_url=run.folder.url, checked=checked_model(config, "cpu"))
        window = Window(index=0, start=0, stop=run.manifest.num_items)
        row = pa.table({"index": [window.index], "start": [window.start], "stop": [window.stop]})
        planned = [receipts_apart(table)[1] for table in PlanEncodeWindow(context)(row)]
        yield context, window, [batch for table in planned for batch in DecodeBatches(context)(table)]


def encoded(config: Config) -> tuple[dict[int, np.ndarray], dict[str, int], list[list[int]]]:
    """Item → its features; counts, added up; the items of each batch."""
    with decoded(config) as (context, window, batches):
        encoder = EncodeBatches(context, "cpu")
        receipts = [receipt_from_json(t["receipt"][0].as_py()) for batch in batches for t in encoder(batch)]
        encoder.writer.close()
        context.store.recover()
        finish_encode_window(context, window)
        found = {}
        for row in read_encoded(context, window).to_pylist():
            if row["shard"]:
                record = context.store.get(row["shard"], row["key"])
                assert record is not None
                found[row["item_index"]] = record.tensors["pooler_output"].numpy()
        names = ("computed_tokens", "padded_tokens", "encodes")
        counts = {name: sum(receipt.counts[name] for receipt in receipts) for name in names}
        return found, counts, [[item["item_index"] for item in batch["items"].to_pylist()[0]] for batch in batches]


def assert_same(ours: np.ndarray, expected: np.ndarray) -> None:
    """Within sixteen times the rounding of a float32, of the largest number."""
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6 * float(np.abs(expected).max()))


def test_frames_of_many_shapes_lie_one_after_another_without_those_of_a_failed_item(
    manifest: Path, make_config: Callable[..., Config], store: dict[str, Any]
) -> None:
    with decoded(make_config(manifest, store=store)) as (_, _, batches):
        images, clips = sorted(batches, key=lambda batch: -len(batch["items"][0]))
        items = images["items"].to_pylist()[0]
        assert sorted(item["item_index"] for item in items) == list(range(len(SIZES)))
        failures = {item["item_index"]: item["failure"]["code"] for item in items if item["failure"]}
        assert list(failures) == [BROKEN]
        expected = [
            resize_frames(noise(item["item_index"])[None], tuple(item["geometry"]["resized_size"])).reshape(-1)
            for item in items
            if item["item_index"] != BROKEN
        ]
        pixels = np.frombuffer(images["pixels"][0].as_buffer(), np.uint8)
        np.testing.assert_array_equal(pixels, np.concatenate(expected))
        shapes = [(len(i["shown"]), *i["geometry"]["resized_size"], 3) for i in clips["items"].to_pylist()[0]]
        assert len(set(shapes)) == 2
        assert clips["pixels"][0].as_buffer().size == sum(map(math.prod, shapes))


def test_features_of_a_packed_batch_are_those_of_each_item_alone(
    manifest: Path, make_config: Callable[..., Config], store: dict[str, Any]
) -> None:
    together, counts, batches = encoded(make_config(manifest, store=store))
    assert sorted(map(len, batches)) == [2, len(SIZES)]
    one_by_one = make_config(manifest, encode={"max_batch_items": 1}, store=store)
    alone, counts_alone, batches_alone = encoded(one_by_one)
    assert len(batches_alone) == len(SIZES) + 2
    assert counts == counts_alone and counts["padded_tokens"] == 0 and counts["encodes"] == len(SIZES) + 1
    assert together.keys() == alone.keys() == set(range(len(SIZES) + 2)) - {BROKEN}
    for item, features in together.items():
        assert_same(features, alone[item])
    path = resolve_model("demo:captioner")
    processor = AutoProcessor.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    for item in set(range(len(SIZES))) - {BROKEN}:
        inputs = processor.image_processor(images=[Image.fromarray(noise(item))], return_tensors="pt")
        with torch.inference_mode():
            [expected] = model.get_image_features(**inputs).pooler_output
        assert_same(together[item], expected.numpy())


def test_a_padded_batch_counts_its_padding_and_masks_it(
    tmp_path: Path, manifest: Path, make_config: Callable[..., Config], store: dict[str, Any]
) -> None:
    model, processor = siglip2()
    folder = save_dual(tmp_path / "model", model, processor)
    config = make_config(manifest, job="embed_backfill", model=str(folder), limit=len(SIZES), store=store)
    found, counts, batches = encoded(config)
    patches = {}
    for number in range(len(SIZES)):
        inputs = processor.image_processor(images=[Image.fromarray(noise(number))], return_tensors="pt")
        patches[number] = math.prod(inputs["spatial_shapes"][0].tolist())
        if number != BROKEN:
            with torch.inference_mode():
                expected = model.get_image_features(**inputs).pooler_output[0].numpy()
            assert_same(found[number][0], expected / np.linalg.norm(expected))
    shown = [[patches[number] for number in batch if number != BROKEN] for batch in batches]
    assert max(map(len, shown)) > 1
    assert counts["computed_tokens"] == sum(len(batch) * max(batch) for batch in shown if batch)
    assert counts["padded_tokens"] == counts["computed_tokens"] - sum(map(sum, shown))
