"""Vectors by a vision-language model's last token, whole and without Ray: beside the whole model on the same pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers as hf
from PIL import Image

from pipeline import flow
from pipeline.config import Config, parse_config
from pipeline.errors import ConfigError
from pipeline.models.location import resolve_model
from pipeline.runs.run_folder import find_run
from pipeline.search import search
from pipeline.stages.dry_run import dry_run
from tests.costs import assert_costs
from tests.foretold import run_as_foretold
from tests.without_ray import run_without_ray

MODEL = "demo:captioner"
INSTRUCTION = "Describe what you see."


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


@pytest.fixture
def images(demo_media: Path) -> list[str]:
    rows = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    paths = [str(demo_media / row["media"][0]["uri"]) for row in rows if row["id"].startswith("image")]
    return [path for path in paths if path.endswith(".png")]


def configured(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Config:
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw: dict[str, Any] = {
        "job": "embed_backfill",
        "input": str(manifest),
        "output": str(folder / "output"),
        "model": MODEL,
        "generate": {"system": INSTRUCTION, "max_batch_items": 3},
        "store": {"path": str(folder / "store")},
    }
    return parse_config({**raw, **changes})


def pixels_of(path: str) -> int:
    with Image.open(path) as image:
        return image.width * image.height


def rows_of(config: Config, summary: dict[str, Any]) -> list[dict[str, Any]]:
    folder = Path(config.output) / summary["run_id"]
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))).to_pylist()


@torch.inference_mode()
def whole(paths: list[str], text: str | None) -> np.ndarray:
    """The whole model on an item alone, from its pictures' pixels."""
    folder = resolve_model(MODEL)
    processor = hf.AutoProcessor.from_pretrained(folder)
    model = hf.AutoModelForImageTextToText.from_pretrained(folder).eval()
    content: list[dict[str, Any]] = [{"type": "image"} for _ in paths]
    content += [{"type": "text", "text": text}] if text else []
    chat = [
        {"role": "system", "content": [{"type": "text", "text": INSTRUCTION}]},
        {"role": "user", "content": content},
    ]
    prompt = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    images = [Image.open(path).convert("RGB") for path in paths] or None
    inputs = processor(text=[prompt], images=images, return_tensors="pt")
    vector = model.base_model(**inputs).last_hidden_state[0, -1].numpy()
    return np.asarray(vector / np.linalg.norm(vector))


def test_vectors_equal_the_whole_model_on_pixels(tmp_path: Path, images: list[str]) -> None:
    items: dict[str, tuple[list[str], str | None]] = {
        "picture": (images[:1], None),
        "other": (images[1:2], None),
        "both": (images[:2], "a red circle"),
        "said": (images[2:3], "Where is the shape?"),
        "text": ([], "a small red circle moving left on a white background"),
        "short": ([], "red"),
    }
    rows: list[dict[str, Any]] = [{"id": n, "images": p, "text": t} for n, (p, t) in items.items()]
    rows += [{"id": "nothing"}, {"id": "gone", "image": "/nowhere.png"}]
    config = configured(tmp_path, rows)
    summary = run_as_foretold(config)
    found = {row["id"]: row for row in rows_of(config, summary)}
    for name, (paths, text) in items.items():
        expected = whole(paths, text)
        ours = np.asarray(found[name]["vector"], np.float32)
        assert float(ours @ expected) >= 0.99999, name
        np.testing.assert_allclose(ours, expected, atol=2e-5)
    assert {name: found[name]["code"] for name in ("nothing", "gone")} == {
        "nothing": "nothing_to_embed",
        "gone": "not_found",
    }
    assert (summary["items_written"], summary["items_quarantined"], summary["encodes"]) == (6, 2, 3)
    costs = dict(zip((row["id"] for row in rows), assert_costs(Path(config.output) / summary["run_id"]), strict=True))
    assert (costs["both"]["frames"], costs["text"]["frames"]) == (2, None)
    assert costs["both"]["pixels"] == sum(map(pixels_of, images[:2]))
    [media, texts] = search(find_run(config.output), "red", limit=2)
    assert texts.hits[0].item_id == "short" and texts.hits[0].score > 0.9999 and len(media.hits) == 2


def test_features_are_those_of_captioning(tmp_path: Path, images: list[str]) -> None:
    rows = [{"id": path, "image": path} for path in images]
    caption = configured(tmp_path, rows, job="caption_videos", prompt=INSTRUCTION, generate={"max_new_tokens": 4})
    assert flow.run(caption)["encodes"] == len(rows)
    kept = configured(tmp_path, rows, pooling={"output": {"dimensions": 16}}, sinks=lance(tmp_path))
    summary = flow.run(kept)
    assert (summary["encodes"], summary["fetches"], list(summary["points"].values())) == (0, 0, [len(rows)])
    assert {len(row["vector"]) for row in rows_of(kept, summary)} == {16}


def test_another_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="by its last token"):
        flow.run(configured(tmp_path, [{"id": "a", "text": "b"}], pooling={"method": "mean"}))


def lance(folder: Path) -> dict[str, Any]:
    return {"lancedb": {"uri": str(folder / "lance"), "collection": "pictures"}}


def test_batches_have_no_room_for_answers(tmp_path: Path, images: list[str]) -> None:
    """A prompt of the demo's model has some 60 tokens of 2 KB: with 2,000 tokens of an answer it would be alone."""
    rows = [{"id": path, "image": path} for path in images[:6]]
    small = {"system": INSTRUCTION, "max_batch_items": 3, "max_batch_bytes": 2_000_000}
    plans = [
        dry_run(configured(tmp_path, rows, generate={**small, "max_new_tokens": tokens}), "cpu", told=lambda _: None)
        for tokens in (1, 2000)
    ]
    assert [plan.work.prompt_batches for plan in plans] == [2, 2]
    assert plans[0].work.kv_bytes == plans[1].work.kv_bytes > 0
    run_as_foretold(configured(tmp_path, rows, generate={**small, "max_new_tokens": 2000}))
